"""Tests of the folder example: it reads many kinds of folders and images, and is right on at least 97 % of digits."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from baking import bake, plain_environment


@pytest.fixture
def modules(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import model.py and dataset.py of a new project."""
    monkeypatch.syspath_prepend(
        str(bake(template, tmp_path / "project", example="folder", package_name="photos"))
    )
    for name in [name for name in sys.modules if name.partition(".")[0] == "photos"]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("photos.model"), importlib.import_module("photos.dataset")


def make_images(folder: Path, *names: str, mode: str = "RGB") -> None:
    for path in (folder / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.linear_gradient("L").resize((40, 20)).convert(mode).save(path)


def build(modules: Any, folder: Path, **values: Any) -> Any:
    model, dataset = modules
    config = dataset.DataConfig(folder=str(folder), **values)
    model.complete_config(model.ModelConfig(), config)
    return dataset.build_datasets(config)


def test_folders_of_splits_are_used_as_they_are_and_rare_classes_weigh_more(
    modules: Any, tmp_path: Path
) -> None:
    make_images(
        tmp_path / "a",
        "train/x/1.png",
        "train/y/deep/2.JPG",
        "train/y/3.png",
        "train/y/.hidden.png",
        "train/y/4.png",
    )
    make_images(tmp_path / "a", "val/y/1.png", "test/x/1.jpg", "unused/1.png")
    datasets = build(modules, tmp_path / "a", class_weights="balanced")
    assert [sorted(target for _, target in images.samples) for images in datasets] == [
        [0, 1, 1, 1],
        [1],
        [0],
    ]
    assert {item.targets.item(): item.weights.item() for item in datasets[0]} == pytest.approx(
        {0: 2, 1: 2 / 3}
    )
    make_images(tmp_path / "a", "train/z/1.png")
    with pytest.raises(ValueError, match=r"train/z is none of data\.class_names"):
        build(modules, tmp_path / "a", class_names=["x", "y"])
    make_images(tmp_path / "b", "train/1.png", "plane/1.png")  # a class may be called train
    assert [len(images) for images in build(modules, tmp_path / "b")] == [2, 0]
    with pytest.raises(ValueError, match="there are no folders in"):
        build(modules, tmp_path / "b" / "train")


def test_images_of_any_mode_look_alike_and_only_training_draws_at_random(
    modules: Any, tmp_path: Path
) -> None:
    for mode, suffix in {
        "L": "png",
        "P": "png",
        "LA": "png",
        "RGBA": "png",
        "CMYK": "jpg",
        "RGB": "jpg",
    }.items():
        make_images(tmp_path, f"train/x/{mode}.{suffix}", f"val/x/{mode}.{suffix}", mode=mode)
    train, validation = build(
        modules, tmp_path, image_size=24, smallest_crop=0.5, flip_probability=0.5
    )
    first, *others = [item.inputs for item in validation]
    assert first.shape == (3, 24, 24) and first.std() > 0.5 and len(others) == 5
    assert all((first - other).abs().max() < 0.2 for other in others)  # JPEG loses a little
    torch = sys.modules["torch"]
    for images, num_different in ((train, 2), (validation, 1)):
        draws = [
            (torch.manual_seed(seed), images[0].inputs.numpy().tobytes())[1]
            for seed in (1, 2, 1, 2)
        ]
        assert draws[:2] == draws[2:] and len({*draws}) == num_different


def test_broken_files_are_named_before_training_or_when_they_are_read(
    modules: Any, tmp_path: Path
) -> None:
    make_images(
        tmp_path,
        *(
            f"{label}/{number}.{end}"
            for label in "xy"
            for number in range(3)
            for end in ("png", "jpg")
        ),
    )
    (tmp_path / "x" / "0.png").write_bytes((tmp_path / "x" / "0.png").read_bytes()[:60])
    (tmp_path / "y" / "1.jpg").write_text("<html>", encoding="utf-8")
    Image.new("I;16", (9, 9)).save(tmp_path / "y" / "2.png")
    with pytest.raises(ValueError, match="3 images cannot be read") as refusal:
        build(modules, tmp_path, validation_fraction=0.01)
    assert all(
        name in str(refusal.value)
        for name in ("x/0.png (", "y/1.jpg (", "y/2.png (more than 8 bits")
    )
    train = build(modules, tmp_path, check_files=False, validation_fraction=0.01)[0]
    broken = next(
        number for number, (path, _) in enumerate(train.samples) if path.endswith("x/0.png")
    )
    with pytest.raises(RuntimeError, match=r"x/0\.png cannot be read"):
        train[broken]


@pytest.mark.slow
def test_two_ranks_reach_97_percent_on_the_digits_and_predict_a_folder(
    template: Path, tmp_path: Path
) -> None:
    project = bake(template, tmp_path, example="folder", package_name="photos")
    for words in (["device_ids=cpu,cpu"], ["predict", "data/digits/7"]):
        subprocess.run(
            [sys.executable, "run.py", *words],
            cwd=project,
            env=plain_environment(),
            check=True,
            timeout=280,
        )
    run = project / "runs" / "baseline"
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    assert summary["best"]["accuracy"] >= 0.97 and summary["train_seconds"] < 180
    rows = [
        json.loads(line) for line in (run / "predictions.jsonl").read_text("utf-8").splitlines()
    ]
    assert len(rows) == 179 and sum(row["label"] == "7" for row in rows) > 170
    assert (
        len(
            json.loads((run / "reports" / "validation_best.json").read_text("utf-8"))[
                "confusion_matrix"
            ]
        )
        == 10
    )
