#!/usr/bin/env bash
# One rank a device on this node, started by torchrun: after a crash all go on from the last checkpoint.
#
#   scripts/torchrun.sh device_ids=0,2 training.epochs=3           words are those of `python run.py`
#   scripts/torchrun.sh --max-restarts=5 --nproc-per-node=2        options in front of them are torchrun's: --name=value
#
# PYTHON names the interpreter, if it is not this shell's `python`.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}

# SIGUSR1 is the warning of many schedulers. Ranks that are asked to stop have three minutes to save.
options=(--max-restarts=3 --shutdown-timeout=180 "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
while [[ ${1:-} == --*=* && $1 != --config=* ]]; do
  options+=("$1")
  shift
done

# Without --nproc-per-node: a rank for each device that can be had here. A mistake in the words ends it now, in one line.
if [[ ${options[*]} != *--nproc* ]]; then
  num_devices=$(PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH} "$python" -m template_package.commands._count_devices "$@")
  [[ -n $num_devices ]] || exit 0 # it has printed what --help asks for
  options+=(--nproc-per-node="$num_devices")
fi
if [[ ${options[*]} != *--nnodes* ]]; then
  options+=(--standalone) # a port of its own: several runs on one node do not meet
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's choice, without its warning; run.py shares out the cores
exec "$python" -m torch.distributed.run "${options[@]}" "$project/run.py" "$@"
