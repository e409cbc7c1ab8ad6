"""Tests of model.py. Adapt them to your model, and add your own."""

from pathlib import Path

import pytest
import torch
from torch import nn

from template_package.dataset import (
    Batch,
    DataConfig,
    Sentences,
    Vocabulary,
)
from template_package.model import (
    ModelConfig,
    build_metrics,
    build_model,
    complete_config,
    compute_loss,
    predict,
    update_metrics,
)

TEXTS = ["rain and snow", "soup", "the train left at noon", "ein 高い切符", "snow"]


def make_config(**values: float) -> ModelConfig:
    config = ModelConfig(**values)  # type: ignore[arg-type]
    complete_config(config, DataConfig(vocabulary_size=60, max_length=16))
    return config


def without_dropout() -> ModelConfig:
    return make_config(dropout=0.0, embedding_dropout=0.0, token_dropout=0.0)


def make_batch(size: int = 20) -> Batch:
    vocabulary = Vocabulary(TEXTS, size=60, max_length=16)
    rows = [
        (" ".join(TEXTS[: 1 + number % 3]) + TEXTS[number % 5], number % 4)
        for number in range(size)
    ]
    return Sentences(rows, vocabulary, DataConfig()).__getitems__(list(range(size)))


def make_model(config: ModelConfig | None = None) -> nn.Module:
    torch.manual_seed(0)
    return build_model(config or without_dropout())


def test_loss_is_the_members_mean_cross_entropy_and_outputs_are_their_mean_probabilities() -> None:
    model, batch = make_model(), make_batch()
    loss, outputs = compute_loss(model, batch)
    assert (outputs.shape, loss.shape) == ((20, 4), ())
    probabilities = model(batch.inputs, batch.mask).softmax(2)
    assert probabilities.shape == (20, 3, 4)
    torch.testing.assert_close(
        loss, -probabilities[torch.arange(20), :, batch.targets].log().mean()
    )
    torch.testing.assert_close(outputs, probabilities.mean(1))
    assert not torch.allclose(probabilities[:, 0], probabilities[:, 1])


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
    """Micro-batches and multi-device runs need this. BatchNorm, or a loss that is not a sample mean, breaks it."""
    model, batch = make_model(), make_batch(20)
    parameters = list(model.parameters())
    whole = torch.autograd.grad(compute_loss(model, batch)[0], parameters)
    parts = [Batch(*(field[rows] for field in batch)) for rows in (slice(0, 15), slice(15, 20))]
    most, rest = (torch.autograd.grad(compute_loss(model, part)[0], parameters) for part in parts)
    for expected, *shares in zip(whole, most, rest, strict=True):
        together = (15 * shares[0] + 5 * shares[1]) / 20
        # float32, summed in another order
        torch.testing.assert_close(together, expected, rtol=1e-3, atol=1e-6)


def test_padding_does_not_change_what_is_said_of_a_sentence() -> None:
    """If padding changed the output, a sentence's label would depend on the other sentences in the batch."""
    model, batch = make_model().eval(), make_batch(6)
    for row in range(6):
        length = int(batch.mask[row].sum())
        alone = model(batch.inputs[row : row + 1, :length], batch.mask[row : row + 1, :length])
        torch.testing.assert_close(
            model(batch.inputs, batch.mask)[row], alone[0], rtol=1e-4, atol=1e-5
        )
    assert len(set(batch.mask.sum(1).tolist())) > 1


def test_loss_on_one_batch_goes_down() -> None:
    model, batch = make_model(), make_batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = compute_loss(model, batch)[0].item()
    for _ in range(30):
        optimizer.zero_grad()
        compute_loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert compute_loss(model, batch)[0].item() < 0.5 * first


@pytest.mark.parametrize("name", ["dropout", "embedding_dropout", "token_dropout"])
def test_dropout_acts_in_training_only(name: str) -> None:
    config = without_dropout()
    setattr(config, name, 0.5)
    model, batch = make_model(config), make_batch()
    assert not torch.equal(*(model(batch.inputs, batch.mask) for _ in range(2)))
    model.eval()
    assert torch.equal(*(model(batch.inputs, batch.mask) for _ in range(2)))


def test_prediction_is_the_likeliest_label_with_its_probability() -> None:
    model, batch = make_model().eval(), make_batch(5)
    probabilities = compute_loss(model, batch)[1]
    columns = predict(model, batch)
    assert columns["label"].tolist() == probabilities.argmax(1).tolist()
    assert columns["probability"].tolist() == pytest.approx(probabilities.amax(1).tolist())


def test_accuracy_and_confusions_are_counted_over_batches_of_unequal_size() -> None:
    metrics = build_metrics(make_config())
    for targets, predicted in (([0, 1, 2], [0, 1, 2]), ([3], [1])):
        outputs = torch.eye(4)[predicted]
        empty = torch.zeros(len(targets), 1)
        update_metrics(metrics, outputs, Batch(empty, empty, torch.tensor(targets)))
    values = metrics.compute()
    assert values["accuracy"].item() == 0.75
    assert values["confusion_matrix"].tolist() == [
        [1, 0, 0, 0],
        [0, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
    ]


def test_the_sections_of_the_config_are_made_to_fit() -> None:
    data = DataConfig(label_names=["a", "b"], vocabulary_size=100)
    model = ModelConfig()
    complete_config(model, data)
    assert (model.num_classes, model.vocabulary_size, model.max_length, data.tokenizer) == (
        2,
        100,
        64,
        None,
    )
    complete_config(model, data)  # as when a run's own config.yaml is read again
    with pytest.raises(ValueError, match=r"model\.num_classes=3: data\.label_names has 2 names"):
        complete_config(ModelConfig(num_classes=3), data)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": 62},
        {"hidden_size": 0},
        {"num_layers": 0},
        {"num_members": 0},
        *(
            {name: 2**63 - 1}
            for name in ("num_members", "num_layers", "hidden_size", "num_classes", "max_length")
        ),
        {"vocabulary_size": 2**62},
        {"dropout": 1.0},
        {"token_dropout": -0.1},
    ],
)
def test_impossible_values_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ModelConfig(**wrong)  # type: ignore[arg-type]


def test_what_comes_from_hugging_face_is_refused_without_its_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finder = "template_package.dataset.find_spec"
    monkeypatch.setattr(finder, lambda _: None)
    for make, key in ((DataConfig, "tokenizer"), (ModelConfig, "pretrained")):
        with pytest.raises(
            ValueError, match=f"{key}=x: transformers is not installed. Run pip install"
        ):
            make(**{key: "x"})  # type: ignore[arg-type]


def save_tiny_bert(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        *sorted({word for text in TEXTS for word in text.split()}),
    ]
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    transformers.BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    transformers.BertForSequenceClassification(
        transformers.BertConfig(vocab_size=len(words), num_labels=3, **sizes)
    ).save_pretrained(folder)


def test_a_pretrained_model_comes_with_its_tokenizer(tmp_path: Path) -> None:
    save_tiny_bert(tmp_path)
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    data = DataConfig(max_length=6)
    config = ModelConfig(pretrained=str(tmp_path))
    complete_config(config, data)
    assert data.tokenizer == str(tmp_path)
    from template_package.dataset import build_encoder

    sentences = Sentences([(text, 0) for text in TEXTS], build_encoder(data, []), data)
    batch = sentences.__getitems__([0, 2, 4])
    torch.manual_seed(0)
    model = build_model(config).eval()
    logits = model(batch.inputs, batch.mask)
    assert logits.shape == (3, 1, 4)  # a head of our own size

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    inputs = tokenizer(
        [TEXTS[0], TEXTS[2], TEXTS[4]],
        padding=True,
        truncation=True,
        max_length=6,
        return_tensors="pt",
    )
    theirs = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=4, ignore_mismatched_sizes=True
    )
    theirs.load_state_dict(model.model.state_dict())  # type: ignore[union-attr]
    torch.testing.assert_close(logits[:, 0], theirs.eval()(**inputs).logits, rtol=1e-4, atol=1e-5)
