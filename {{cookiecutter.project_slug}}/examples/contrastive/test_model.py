"""Tests of model.py. Adapt them to your model, and add your own."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from template_package.dataset import Batch
from template_package.errors import ConfigError
from template_package.model import (
    ModelConfig,
    Towers,
    after_step,
    build_metrics,
    build_model,
    compute_loss,
    update_metrics,
)

from conftest import load_config

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


def make_batch(size: int = 20) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(*torch.rand(2, size, 4, 8, generator=generator))


def make_model(momentum: float = 0.9) -> Towers:
    torch.manual_seed(0)
    return Towers(ModelConfig(momentum=momentum))


def test_loss_is_infonce_in_both_directions() -> None:
    """In one process, the batch is the global batch. On several ranks, the trainer proves it before the first step."""
    model, batch = make_model(), make_batch()
    loss, (upper, lower) = compute_loss(model, batch)
    similar = (upper @ lower.T * model.log_scale.exp()).exp()
    right = similar.diagonal()
    by_hand = -((right / similar.sum(0)).log() + (right / similar.sum(1)).log()).mean() / 2
    torch.testing.assert_close(loss, by_hand)


def test_loss_calls_the_model_once() -> None:
    model, calls = make_model(), list[None]()
    model.register_forward_pre_hook(lambda *_: calls.append(None))  # DDP too hangs on that call
    compute_loss(model, make_batch())
    assert len(calls) == 1


def test_gradient_reaches_the_trained_towers_alone() -> None:
    model = make_model()
    compute_loss(model, make_batch())[0].backward()  # type: ignore[no-untyped-call]
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {n for n, _ in model.named_parameters() if not n.startswith("slow.")}


def test_loss_on_one_batch_goes_down() -> None:
    model, batch = build_model(ModelConfig()), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = compute_loss(model, batch)[0].item()
    for _ in range(30):
        optimizer.zero_grad()
        compute_loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert compute_loss(model, batch)[0].item() < 0.5 * first


def test_slow_towers_go_a_part_of_the_way() -> None:
    model = make_model(momentum=0.75)
    nn.init.ones_(next(model.trained.parameters()))
    former = next(model.slow.parameters()).clone()
    with torch.no_grad():
        after_step(model, 1, None)
    torch.testing.assert_close(next(model.slow.parameters()), 0.75 * former + 0.25)


def test_recall_is_over_all_batches() -> None:
    def pairs(lower: list[int]) -> tuple[Tensor, Tensor]:
        return F.one_hot(torch.arange(2), 4).float(), F.one_hot(torch.tensor(lower), 4).float()

    metrics = build_metrics(ModelConfig())
    update_metrics(metrics, pairs([0, 1]), make_batch(2))
    assert metrics.compute()["recall"] == 1
    metrics.update(*(rows.roll(2, 1) for rows in pairs([0, 3])))
    assert metrics.compute()["recall"] == 0.75


@pytest.mark.parametrize("wrong", ["width=0", "embedding_size=0", "momentum=1"])
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.{wrong}: must be"):
        load_config(CONFIG_YAML, [f"model.{wrong}"])
