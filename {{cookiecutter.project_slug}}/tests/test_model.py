"""Tests of model.py. Adapt them to your model, and add your own."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from template_package.dataset import Batch
from template_package.errors import ConfigError
from template_package.model import (
    ModelConfig,
    build_metrics,
    build_model,
    compute_loss,
    update_metrics,
)

from conftest import load_config

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


def make_batch(size: int = 20) -> Batch:
    generator = torch.Generator().manual_seed(0)
    return Batch(torch.rand(size, 1, 8, 8, generator=generator), torch.arange(size) % 10)


def make_model(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(dropout=dropout))


def test_loss_is_the_mean_cross_entropy_and_outputs_are_logits() -> None:
    batch = make_batch()
    loss, logits = compute_loss(make_model(), batch)
    assert (logits.shape, loss.shape) == ((20, 10), ())
    by_hand = -logits.log_softmax(1)[torch.arange(20), batch.targets].mean()
    torch.testing.assert_close(loss, by_hand)


def test_loss_calls_the_model_once() -> None:
    model, calls = make_model(), list[None]()
    model.register_forward_pre_hook(lambda *_: calls.append(None))  # DDP too hangs on that call
    compute_loss(model, make_batch())
    assert len(calls) == 1


def test_gradient_reaches_every_parameter() -> None:
    model = make_model()
    names = [name for name, _ in model.named_parameters()]
    gradients = torch.autograd.grad(
        compute_loss(model, make_batch())[0], list(model.parameters()), allow_unused=True
    )
    assert [
        name for name, grad in zip(names, gradients, strict=True) if grad is None or not grad.any()
    ] == []


def test_a_batch_cut_in_two_has_the_gradient_of_the_whole() -> None:
    """Splitting a batch must not change its gradient. BatchNorm, or a loss not averaged over samples, breaks this."""
    model, batch = make_model(), make_batch(20)
    parameters = list(model.parameters())
    whole = torch.autograd.grad(compute_loss(model, batch)[0], parameters)
    parts = [Batch(*(field[rows] for field in batch)) for rows in (slice(0, 15), slice(15, 20))]
    most, rest = (torch.autograd.grad(compute_loss(model, part)[0], parameters) for part in parts)
    for expected, *shares in zip(whole, most, rest, strict=True):
        together = (15 * shares[0] + 5 * shares[1]) / 20
        # float32, summed in another order
        torch.testing.assert_close(together, expected, rtol=1e-3, atol=1e-6)


def test_loss_on_one_batch_goes_down() -> None:
    model, batch = make_model(dropout=0.1), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = compute_loss(model, batch)[0].item()
    for _ in range(30):
        optimizer.zero_grad()
        compute_loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert compute_loss(model, batch)[0].item() < 0.5 * first


def test_dropout_acts_in_training_only() -> None:
    model, inputs = make_model(dropout=0.5), make_batch().inputs
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_accuracy_counts_over_batches_of_unequal_size() -> None:
    metrics = build_metrics(ModelConfig())
    for targets, predicted in (([0, 1, 2], [0, 1, 2]), ([3], [4])):
        logits = F.one_hot(torch.tensor(predicted), 10).float()
        update_metrics(
            metrics, logits, Batch(torch.zeros(len(targets), 1, 8, 8), torch.tensor(targets))
        )
    assert {name: value.item() for name, value in metrics.compute().items()} == {"accuracy": 0.75}


@pytest.mark.parametrize("wrong", ["num_classes=9", "channels=0", "channels=6", "dropout=1"])
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.{wrong}: must be"):
        load_config(CONFIG_YAML, [f"model.{wrong}"])
