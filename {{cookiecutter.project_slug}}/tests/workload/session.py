"""Runs the tests' commands one after the other in one process, whose fork server stays warm: ranks start in a second.

python session.py FD: reads lines of JSON, {"folder", "script", "words"}, and writes each command's exit code to file
descriptor FD. What the commands and their ranks print goes to stdout. One rank runs in this process.
"""

import importlib
import json
import os
import sys
from pathlib import Path

from template_package.launching.starting import warm_up


def run(folder: str, script: str, words: list[str]) -> int:
    """The exit code of `python <script>.py <words>`, typed in the folder, with that folder's modules."""
    package = warm_up.__module__.partition(".")[0]
    for name in list(sys.modules):
        if name.partition(".")[0] in (package, "run", "many_runs"):
            del sys.modules[name]
    os.chdir(folder)
    sys.path[0], sys.argv = folder, [f"{script}.py", *words]
    importlib.invalidate_caches()
    try:
        code: int = importlib.import_module(script).main(words)
    except KeyboardInterrupt:
        code = 130
    except SystemExit as stop:
        code = int(stop.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


if __name__ == "__main__":
    warm_up(["device_ids=cpu,cpu"], Path("config.yaml"))
    with os.fdopen(int(sys.argv[1]), "w") as replies:
        for line in sys.stdin:
            print(run(**json.loads(line)), file=replies, flush=True)
