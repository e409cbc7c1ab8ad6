"""Reads the file of a sweep, and lists the settings of each run that it asks for."""

import json
import math
import random
import re
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from ...config import parse_device_ids
from ...config_file import read_settings
from ...errors import ConfigError, one_line
from ..report import dotted

Number = Annotated[Any, BeforeValidator(lambda text: int(text) if re.fullmatch(r"-?\d+", text) else float(text))]
Choices = Annotated[list[Any], Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]


class Range(BaseModel, extra="forbid"):
    """Numbers from low to high; whole ones if both ends are written as whole numbers."""

    low: Number
    high: Number
    log: bool = False  # equally many of each order of magnitude

    @model_validator(mode="after")
    def check(self) -> Self:
        if not (-math.inf < self.low < self.high < math.inf and (self.low > 0 or not self.log)):
            raise ValueError("low must be less than high, and above 0 with log: true")
        return self

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


class Search(BaseModel, extra="forbid"):
    space: Annotated[dict[str, Range | Choices], Field(min_length=1)]
    trials: Positive
    method: Literal["random", "optuna"] = "random"
    prune: bool = False  # optuna: end a trial whose metric is worse than the median of the former ones at this step


class Sweep(BaseModel, extra="forbid"):
    """The keys of the file."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    grid: dict[str, Choices] | None = None  # all combinations of these values
    runs: list[dict[str, Any]] | None = None  # the settings of each run
    search: Search | None = None
    devices: Annotated[Any, BeforeValidator(parse_device_ids)] = None  # of each run; without: auto:1, or cpu
    at_once: Positive | Literal["auto"] = "auto"
    seed: int = 0  # of the trials that a search draws

    @model_validator(mode="after")
    def check(self) -> Self:
        if sum(map(bool, (self.grid, self.runs, self.search))) != 1:
            raise ValueError("one of the keys grid, runs and search must say what to run")
        return self

    def list_settings(self) -> list[dict[str, str]]:
        """The settings of each run, each once. None of optuna, which is asked for one after the other."""
        wanted = self.runs or []
        if self.grid:
            wanted = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        elif self.search is not None and self.search.method == "random":
            generator, space = random.Random(self.seed), self.search.space.items()  # more trials begin with the same
            wanted = [{key: draw(way, generator) for key, way in space} for _ in range(self.search.trials)]
        return list({repr(settings): settings for settings in map(as_words, wanted)}.values())

    def list_bounds(self) -> list[dict[str, str]]:
        """Settings of one key each that a search may draw: the ends of ranges, and all choices."""
        space = self.search.space.items() if self.search is not None else ()
        ends = {key: [way.low, way.high] if isinstance(way, Range) else way for key, way in space}
        return [as_words({key: value}) for key, values in ends.items() for value in values]


def draw(way: Range | list[Any], generator: random.Random) -> Any:
    """A random value, with few enough digits to be typed again."""
    if isinstance(way, list):
        return generator.choice(way)
    low, high = (math.log(way.low), math.log(way.high)) if way.log else (way.low, way.high)
    value = generator.uniform(low, high)
    value = math.exp(value) if way.log else value
    return round(value) if way.is_whole else min(max(float(f"{value:.4g}"), way.low), way.high)


def as_words(settings: dict[str, Any]) -> dict[str, str]:
    """The settings under dotted keys, with their values as they are typed."""
    words = dotted(settings).items()
    return {key: json.dumps(value) if isinstance(value, list | dict | NoneType) else str(value) for key, value in words}


def read_sweep(path: Path) -> Sweep:
    """The sweep that the file describes. ConfigError with key, value and rule of the first mistake."""
    try:
        return Sweep.model_validate(read_settings(path, []))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        value = "" if isinstance(problem["input"], dict) else f"={one_line(problem['input'])}"
        mistake = f"{'.'.join(map(str, problem['loc']))}{value}: {problem['msg']}".lstrip(": ")
        raise ConfigError(f"{path}: {mistake}. A sweep has the keys {', '.join(Sweep.model_fields)}.") from None
