"""Tests of model.py. Adapt them to your model, and add your own."""

from pathlib import Path

import pytest
import torch
from torch import nn

from template_package.dataset import NUM_FEATURES, Batch
from template_package.errors import ConfigError
from template_package.model import (
    ModelConfig,
    build_metrics,
    build_model,
    compute_loss,
)

from conftest import load_config

CONFIG_YAML = Path(__file__).parents[1] / "config.yaml"


def make_batch(size: int = 20) -> Batch:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(size, width, generator=generator) for width in NUM_FEATURES)
    return Batch(first, second, torch.randn(size, generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig())


def test_loss_is_the_mean_squared_error_and_outputs_match_the_targets() -> None:
    batch = make_batch()
    loss, predictions = compute_loss(make_model(), batch)
    assert (predictions.shape, loss.shape) == (batch.targets.shape, ())
    torch.testing.assert_close(loss, ((predictions - batch.targets) ** 2).mean())


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
    """Micro-batches and multi-device runs need this. BatchNorm breaks it.

    If model.py defines loss_weight(), replace 15, 5 and 20 by what it returns for the two parts and the whole batch.
    """
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
    model, batch = make_model(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = compute_loss(model, batch)[0].item()
    for _ in range(50):
        optimizer.zero_grad()
        compute_loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert compute_loss(model, batch)[0].item() < 0.5 * first


def test_there_are_no_metrics_beside_the_loss() -> None:
    assert len(build_metrics(ModelConfig())) == 0


@pytest.mark.parametrize("wrong", ["hidden_size=0"])
def test_impossible_values_are_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"^model.{wrong}: must be"):
        load_config(CONFIG_YAML, [f"model.{wrong}"])
