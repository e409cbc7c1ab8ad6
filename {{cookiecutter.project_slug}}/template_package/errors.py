"""The exceptions of this package. This file imports nothing of ours, so every other file may use it."""


class ConfigError(ValueError):
    """A mistake of the user's, in one line: key, value, rule, remedy. Ends the command with exit code 2."""

    exit_code = 2


class FailureError(ConfigError):
    """A failure that one line explains better than a traceback. Ends the command with exit code 1."""

    exit_code = 1


class StopRun(SystemExit):
    """This package ends the run in good order. Any other SystemExit comes from somebody else's code."""

    code: int


def one_line(value: object) -> str:
    """Show the value as config.yaml would, on one line of at most 80 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = f"[{', '.join(map(one_line, value[:20]))}]" if isinstance(value, list) else str(value)
    text = " ".join(text[:500].split())
    return text if len(text) <= 80 else f"{text[:79]}…"
