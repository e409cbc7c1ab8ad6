"""Several commands of run.py in one process, to save its start: python session.py '[["evaluate"], ["name=a", ...]]'.

Prints one JSON line a command: its exit code and what it printed. One rank runs where it is called.
"""

import contextlib
import io
import json
import sys

import run

if __name__ == "__main__":
    for words in json.loads(sys.argv[1]):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = run.main(words)
        print(json.dumps([code, printed.getvalue()]), flush=True)
