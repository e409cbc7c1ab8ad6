"""Declares the `benchmark:` section of config.yaml."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field


@dataclass
class Options:
    steps: Annotated[int, Field(ge=1)] = 50  # optimizer steps of a run that are timed
    # runs of each row; more where other work disturbs the machine
    rounds: Annotated[int, Field(ge=1)] = 3
