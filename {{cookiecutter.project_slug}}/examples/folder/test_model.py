"""Tests of model.py. Adapt them to your model, and add your own."""

import torch

from template_package.dataset import Batch
from template_package.model import (
    ModelConfig,
    build_model,
    compute_loss,
    loss_weight,
)


def test_a_batch_cut_in_two_has_the_gradient_of_the_whole() -> None:
    """Micro-batches and multi-device runs need this. BatchNorm, or class weights without loss_weight(), break it."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(channels=8, class_names=["a", "b"]))
    batch = Batch(torch.randn(20, 3, 16, 16), torch.arange(20) % 2, torch.rand(20))
    parts = [Batch(*(field[rows] for field in batch)) for rows in (slice(0, 15), slice(15, 20))]
    together = sum(
        compute_loss(model, part)[0] * loss_weight(part) for part in parts
    ) / loss_weight(batch)
    expected = torch.autograd.grad(compute_loss(model, batch)[0], list(model.parameters()))
    for gradient, whole in zip(
        torch.autograd.grad(together, list(model.parameters())), expected, strict=True
    ):
        # float32, summed in another order
        torch.testing.assert_close(gradient, whole, rtol=1e-3, atol=1e-6)
