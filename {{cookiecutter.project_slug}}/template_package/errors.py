"""Defines the exceptions of this package. It imports no other file of the package, so every file may import it."""


class ConfigError(ValueError):
    """Reports a user's mistake in one line: key, value, rule, remedy. Ends the command with exit code 2."""

    exit_code = 2


class FailureError(ConfigError):
    """Reports a failure that one line explains better than a traceback. Ends the command with exit code 1."""

    exit_code = 1


class StopRun(SystemExit):
    """Ends the run on purpose, with `code` as exit code. Any other SystemExit comes from code outside this package."""

    code: int


def one_line(value: object) -> str:
    """Return the value as YAML (null, true, [0, 2]), on one line of at most 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"[{', '.join(map(one_line, value[:20]))}]" if isinstance(value, list) else str(value)
    text = " ".join(text[:500].split())
    return text if len(text) <= 80 else f"{text[:79]}…"
