"""Tests of model.py. Adapt them to your model, and add your own."""

import torch

from template_package.dataset import Batch, collate, decode, encode
from template_package.model import GPT, ModelConfig, compute_loss, generate

CONFIG = ModelConfig(num_layers=2, hidden_size=32, dropout=0.0, vocabulary_size=256, block_size=16)
TEXT = "To be, or not. "


def make() -> tuple[GPT, Batch]:
    torch.manual_seed(0)
    windows = torch.tensor(encode(TEXT * 4)).unfold(0, 17, 1)
    return GPT(CONFIG), Batch(windows[:, :-1], windows[:, 1:])


def test_a_token_does_not_see_the_ones_after_it() -> None:
    model, batch = make()
    changed = batch.inputs.clone()
    changed[:, 9:] += 1
    before, after = model(batch.inputs), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9])
    assert not torch.isclose(after[:, 9:], before[:, 9:]).all(2).any()


def test_a_batch_cut_in_two_has_the_gradient_of_the_whole_and_every_weight_has_one() -> None:
    model, batch = make()
    loss, rest = compute_loss(model, batch)[0], len(batch.inputs) - 10
    assert abs(loss.item() - 5.545) < 0.1  # log(256): at first all tokens are alike
    cut = [
        compute_loss(model, Batch(*(field[rows] for field in batch)))[0]
        for rows in (slice(10), slice(10, None))
    ]
    whole, *parts = (torch.autograd.grad(part, [*model.parameters()]) for part in (loss, *cut))
    for expected, first, second in zip(whole, *parts, strict=True):
        assert expected.any()
        torch.testing.assert_close(
            (10 * first + rest * second) / (10 + rest), expected, rtol=1e-3, atol=1e-6
        )


def test_what_was_learned_is_continued_whatever_stands_beside_it_in_the_batch() -> None:
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for _ in range(100):
        optimizer.zero_grad()
        compute_loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    prompts = [
        torch.tensor(encode((TEXT * 3)[start:end])) for start, end in ((0, 16), (3, 40), (5, 21))
    ]
    together = generate(model, *collate(prompts))
    assert together == [generate(model, *collate([prompt]))[0] for prompt in prompts]
    for prompt, text in zip(prompts, together, strict=True):
        assert (decode(prompt.tolist()) + text)[:200] in TEXT * 30
