"""The trials of optuna's study, which lies in study.db beside the runs. Each trial is a run, also after a kill."""

import math
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .plan import Range, Search, as_words


class Study:
    """Asks optuna for settings and tells it results. A trial that failed gets none, so it is tried again."""

    def __init__(self, folder: Path, search: Search, seed: int, mode: str) -> None:
        try:
            import optuna
        except ImportError:
            raise ConfigError("search.method=optuna: optuna is missing. Type: python -m pip install optuna") from None
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction: Any = f"{mode}imize"
        self._optuna, self._search = optuna, search
        storage = f"sqlite:///{folder.absolute()}/study.db"
        self._study = optuna.create_study(storage=storage, direction=direction, study_name="s", load_if_exists=True)
        seed += len(self._study.trials)  # or a second start would draw the trials of the first again
        self._study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)  # for several trials at once

    def list_trials(self) -> list[tuple[int, dict[str, str], str]]:
        """(number, settings, status as a run has it) of all trials so far."""
        states = {"RUNNING": "waiting", "PRUNED": "pruned"}
        return [
            (trial.number, as_words(trial.params), states.get(trial.state.name, "complete"))
            for trial in self._study.trials
        ]

    def ask(self) -> tuple[int, dict[str, str]] | None:
        """The number and settings of one more trial, or None if there are enough."""
        if len(self._study.trials) >= self._search.trials:
            return None
        trial = self._study.ask({key: self._distribution(way) for key, way in self._search.space.items()})
        return trial.number, as_words(trial.params)

    def _distribution(self, way: Range | list[Any]) -> Any:
        kinds = self._optuna.distributions
        if isinstance(way, Range):
            kind = kinds.IntDistribution if way.is_whole else kinds.FloatDistribution
            return kind(way.low, way.high, log=way.log)
        return kinds.CategoricalDistribution([as_words({"": choice})[""] for choice in way])

    def is_hopeless(self, number: int, values: dict[int, float]) -> bool:
        """Whether to prune the trial. values: its metric until now, by step."""
        stored = self._study.trials[number]
        trial = self._optuna.trial.Trial(self._study, stored._trial_id)
        for step in sorted(values.keys() - stored.intermediate_values.keys()):
            trial.report(values[step], step)
        return bool(self._search.prune and trial.should_prune())

    def tell(self, number: int, value: float | None, *, is_pruned: bool) -> None:
        """End the trial with its value, unless it has ended before."""
        states, is_number = self._optuna.trial.TrialState, value is not None and math.isfinite(value)
        state = states.PRUNED if is_pruned else states.COMPLETE if is_number else states.FAIL
        self._study.tell(number, value if state == states.COMPLETE else None, state, skip_if_finished=True)
