#!/usr/bin/env bash
# Starts one rank per device of this node with torchrun. After a crash all ranks restart from the last checkpoint.
#
#   scripts/torchrun.sh device_ids=0,2 training.epochs=3           the arguments of `python run.py`
#   scripts/torchrun.sh --max-restarts=5 --nproc-per-node=2        torchrun's own options come first, as --name=value
#
# Set PYTHON to use another interpreter than `python`.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}

# Many schedulers send SIGUSR1 as a warning. Ranks have three minutes to save after a signal.
options=(--max-restarts=3 --shutdown-timeout=180 "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
while [[ ${1:-} == --*=* && $1 != --config=* ]]; do
  options+=("$1")
  shift
done

# An older torchrun lacks these options: it kills ranks that save for more than 30 seconds, and SIGUSR1 ends it at once.
locate='from importlib.metadata import distribution; print(distribution("torch").locate_file("torch/distributed/run.py"))'
torchrun=$("$python" -c "$locate")
for index in "${!options[@]}"; do
  name=${options[index]%%=*}
  if [[ $name == --shutdown-timeout || $name == --signals-to-handle ]] && ! grep -q -- "\"$name\"" "$torchrun"; then
    echo "this torch's torchrun has no $name: going on without it" >&2
    unset "options[index]"
  fi
done

# Prints the number of devices that a run with these arguments would take here. Exit code 2 for a mistake in them.
count_devices() {
  PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} "$python" - "$project" "$@" <<'PYTHON'
import sys
from contextlib import redirect_stdout
from pathlib import Path

from template_package.core.launch import choose_devices
from template_package.core.settings import read_command_line
from template_package.errors import ConfigError

try:
    with redirect_stdout(sys.stderr):  # also what --help and imports of model.py print
        line = read_command_line(sys.argv[2:], Path(sys.argv[1], "config.yaml"))
        line.load_config()  # a mistake is told once, not by each rank
        devices = choose_devices(line)
except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(len(devices.names))
PYTHON
}

if [[ ${options[*]} != *--nproc* ]]; then
  num_devices=$(count_devices "$@")
  [[ -n $num_devices ]] || exit 0 # --help was printed
  options+=(--nproc-per-node="$num_devices")
fi
if [[ ${options[*]} != *--nnodes* ]]; then
  # A free port, so that several runs on one node do not meet; an address, since the host's name may lead nowhere.
  options+=(--nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1)
fi

export PYTHONHASHSEED=${PYTHONHASHSEED:-0} # a set of names has the same order on all ranks
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's default without its warning; run.py divides the cores itself
exec "$python" -m torch.distributed.run "${options[@]}" "$project/run.py" "$@"
