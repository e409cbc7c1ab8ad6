"""Your data set. This example uses image files, with one folder for each class.

To use your own images, set `data.folder` in config.yaml. For other data, rewrite this file. The trainer uses
`DataConfig` and `build_datasets`, and passes each batch to model.py. `run.py predict` uses `read_inputs`.
"""

import hashlib
import tempfile
from dataclasses import dataclass, field
from glob import iglob
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy
import torch
from PIL import Image, ImageOps
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset

from .errors import ConfigError, one_line

ROOT, DIGITS = Path(__file__).parents[1], "data/digits"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
# by the folder's name
SPLITS = {
    "train": "train",
    "validation": "validation",
    "val": "validation",
    "test": "test",
}
# ImageNet's
MEAN, DEVIATION = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)


@dataclass
class DataConfig:
    """The keys under `data:` in config.yaml. pydantic's Field defines which values are allowed."""

    folder: str = field(default=DIGITS, metadata={"decisive": False})
    # complete_config() fills this in; a run keeps its class ids
    class_names: list[str] = field(default_factory=list)
    validation_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.15
    class_weights: Literal["none", "balanced"] = "none"
    check_files: bool = field(default=True, metadata={"decisive": False})
    image_size: Annotated[int, Field(ge=8, le=4096)] = 16
    smallest_crop: Annotated[float, Field(gt=0, le=1)] = 0.8
    flip_probability: Annotated[float, Field(ge=0, le=1)] = 0.0


class Batch(NamedTuple):
    inputs: Tensor  # (B, 3, image_size, image_size) float32, about 0 on average
    targets: Tensor  # (B,) int64, the class id: an index into data.class_names
    weights: Tensor  # (B,) float32, how much the sample counts in the loss


class Images(Dataset[Batch]):
    """Reads image files. `samples` holds (path, class id) pairs. `weights` is (num_classes,) float32, one per class."""

    def __init__(
        self,
        samples: list[tuple[str, int]],
        weights: Tensor,
        config: DataConfig,
        is_training: bool = False,
    ):
        self.samples, self.weights, self.config, self.is_training = (
            samples,
            weights,
            config,
            is_training,
        )
        self.label_names = config.class_names  # for reports and predictions
        if config.check_files:
            check_files([path for path, _ in samples])

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Batch:
        (path, target), size = self.samples[index], self.config.image_size
        try:
            with Image.open(path) as file:
                file.draft("RGB", (2 * size, 2 * size))  # decodes a JPEG no larger than needed
                # upright, by the camera's mark
                image = ImageOps.exif_transpose(file).convert("RGBA").convert("RGB")
        except Exception as error:  # a JPEG may break off: only reading all of it tells
            raise RuntimeError(
                f"{path} cannot be read ({one_line(error)}). Replace or remove it."
            ) from error
        side, across, down = float(min(image.size)), 0.5, 0.5  # the square in the middle
        if self.is_training:
            # Plain random calls are right here: before each item the loader seeds them from (seed, epoch, index).
            shrink, across, down, flip = torch.rand(4).tolist()
            side *= 1 - shrink * (1 - self.config.smallest_crop)
            image = ImageOps.mirror(image) if flip < self.config.flip_probability else image
        left, top = across * (image.width - side), down * (image.height - side)
        image = image.resize(
            (size, size), Image.Resampling.BILINEAR, (left, top, left + side, top + side)
        )
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)  # (H, W, 3) -> (3, H, W)
        return Batch((pixels / 255 - MEAN) / DEVIATION, torch.tensor(target), self.weights[target])


def check_files(paths: list[str]) -> None:
    """Raise ConfigError if an image is broken, or gray with more than 8 bits. Truncated JPEGs are not found here."""
    problems = []
    for path in paths:
        try:
            with Image.open(path) as image:
                image.verify()
            if image.mode[0] in "IF":  # Pillow would cut off what is above 255
                problems.append(f"{path} (more than 8 bits a channel)")
        except Exception as error:  # a broken file fails anywhere in Pillow
            problems.append(f"{path} ({one_line(error)})")
    if problems:
        raise ConfigError(
            f"{len(problems)} images cannot be read. Replace or remove them: {'; '.join(problems[:3])}"
        )


def build_datasets(config: DataConfig) -> tuple[Images, ...]:
    """Return the training, validation and, if there are test images, test sets. The sets are the same in every run."""
    if config.folder == DIGITS and not (ROOT / DIGITS).exists():
        write_digits(ROOT / DIGITS)
    splits, samples = (
        find_splits(config),
        {"train": list[tuple[str, int]](), "validation": [], "test": []},
    )
    for split, folder in [
        (split, folder) for split, folders in splits.items() for folder in folders
    ]:
        if folder.name not in config.class_names:
            raise ConfigError(
                f"data.folder={config.folder}: {folder} is none of data.class_names. Move it elsewhere."
            )
        # By a digest of the name: an image that is added or removed hardly moves others from set to set.
        paths = sorted(list_images(folder), key=lambda path: hashlib.sha256(path.encode()).digest())
        found = [(str(folder / path), config.class_names.index(folder.name)) for path in paths]
        if split == "train" and not splits.get("validation"):
            num_validation = round(config.validation_fraction * len(found))
            samples["validation"] += found[:num_validation]
            found = found[num_validation:]
        samples[split] += found
    weights = torch.ones(len(config.class_names))
    if config.class_weights == "balanced":
        counts = torch.tensor([target for _, target in samples["train"]]).bincount(
            minlength=len(weights)
        )
        # 1 on average over the samples
        weights = len(samples["train"]) / ((counts > 0).sum() * counts.clamp(min=1))
    train, *others = (samples[split] for split in samples if samples[split] or split != "test")
    return Images(train, weights, config, is_training=True), *(
        Images(other, weights, config) for other in others
    )


def read_inputs(source: str, config: DataConfig) -> tuple[Images, list[str]]:
    """Return the images for `run.py predict SOURCE`, and the name of each. SOURCE is an image file or a folder."""
    path = Path(source)
    folder, names = (path, list_images(path)) if path.is_dir() else (path.parent, [path.name])
    if not names:
        raise ConfigError(
            f"predict {source}: holds no image ({', '.join(SUFFIXES)}). Name a file or a folder of them."
        )
    return Images(
        [(str(folder / name), 0) for name in names], torch.ones(len(config.class_names)), config
    ), names


def find_splits(config: DataConfig) -> dict[str, list[Path]]:
    """Return the class folders of each split. Without train/, the split "train" has all folders in data.folder."""
    folder = ROOT / config.folder
    if config.folder == DIGITS and not folder.exists():  # build_datasets() makes it
        return {"train": [folder / digit for digit in "0123456789"]}
    inner = {
        SPLITS[path.name]: sorted(path.glob("[!.]*/"))
        for path in folder.glob("*/")
        if path.name in SPLITS
    }
    splits = inner if inner.get("train") else {"train": sorted(folder.glob("[!.]*/"))}
    if not splits["train"]:
        raise ConfigError(
            f"data.folder={config.folder}: there are no folders in {folder}. Make one for each class."
        )
    return splits


def list_images(folder: Path) -> list[str]:
    """Return the sorted paths of the images in `folder` and its subfolders, relative to `folder`. Skip hidden files."""
    return sorted(
        path
        for path in iglob("**", root_dir=folder, recursive=True)
        if path.lower().endswith(SUFFIXES)
    )


def write_digits(folder: Path) -> None:
    """Write the 1,797 handwritten digits of scikit-learn as 8x8 PNG files to `folder`/<digit>/<number>.png."""
    # here, so that only who writes the files pays for the import
    from sklearn.datasets import (
        load_digits,
    )

    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        for number, (pixels, digit) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
            path = Path(beside, "digits", str(digit), f"{number:04d}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            # 0 to 16 -> 0 to 240
            Image.fromarray((15 * pixels).astype("uint8").reshape(8, 8)).save(path)
        if not folder.exists():  # another node that shares the disk may have been first
            Path(beside, "digits").rename(folder)
