"""Defines the exceptions of this package, and formats values for error messages."""

NEEDS_FULL = "needs size=full. Type: scripts/update_from_template.sh size=full"


class ConfigError(ValueError):
    """A user's mistake, which is reported without a traceback. The command ends with exit code 2."""

    exit_code = 2

    # without the traceback of a loader's worker, which torch puts in front
    def __str__(
        self,
    ) -> str:
        return super().__str__().rpartition(f"{ConfigError.__name__}: ")[2].strip()


class FailureError(ConfigError):
    """A failure that a short message explains better than a traceback. The command ends with exit code 1."""

    exit_code = 1


class StopRun(SystemExit):
    """Ends the run on purpose, with `code` as the exit code. On a rank, any other SystemExit counts as a failure."""

    code: int


class Interrupted(Exception):  # noqa: N818 - not an error
    """Raised in an evaluation when the run is asked to stop. The next start repeats it."""


def one_line(value: object) -> str:
    """Return the value as one line of YAML, for example `null` or `[0, 2]`, cut to at most 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"[{', '.join(map(one_line, value[:20]))}]" if isinstance(value, list) else str(value)
    text = " ".join(text[:500].split())
    return text if len(text) <= 80 else f"{text[:79]}…"
