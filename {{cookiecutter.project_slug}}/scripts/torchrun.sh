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
options=(--max-restarts=3 --shutdown-timeout=180 --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1)
while [[ ${1:-} == --*=* && $1 != --config=* ]]; do
  options+=("$1")
  shift
done

# Without --nproc-per-node, count the devices: those of the words, or of the config. run.py refuses another number.
if [[ ${options[*]} != *--nproc* ]]; then
  config=$project/config.yaml device_ids=
  words=("" "$@")
  for i in "${!words[@]}"; do
    case ${words[i]} in
      --config) config=${words[i + 1]:-} ;;
      --config=*) config=${words[i]#*=} ;;
      device_ids=*) device_ids=${words[i]#*=} ;;
    esac
  done
  device_ids=${device_ids:-$(sed -n 's/^device_ids: *\([^#]*\).*/\1/p' "$config")}
  case $device_ids in
    auto:*) num_devices=$((${device_ids#auto:})) ;;
    auto* | "") num_devices=$("$python" -c 'import torch; print(torch.cuda.device_count() or 1)') ;;
    *) commas=${device_ids//[!,]/} num_devices=$((${#commas} + 1)) ;;
  esac
  options+=(--nproc-per-node="$num_devices")
fi
if [[ ${options[*]} != *--nnodes* ]]; then
  options+=(--standalone) # a port of its own: several runs on one node do not meet
fi

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's choice, without its warning; run.py shares out the cores
exec "$python" -m torch.distributed.run "${options[@]}" "$project/run.py" "$@"
