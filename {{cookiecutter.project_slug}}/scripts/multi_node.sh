#!/usr/bin/env bash
# Several nodes without a scheduler. Type the same words on each, with that node's number; node 0 has the address:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#
# MASTER_PORT (29500) must be free on node 0, and the nodes must be let through to each other by their firewalls. Code
# and config must be the same everywhere; node 0 alone writes checkpoints and metrics. Words: see scripts/torchrun.sh.
set -euo pipefail

NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
if [[ -z ${NNODES:-} || -z $NODE_RANK || -z ${MASTER_ADDR:-} ]]; then
  echo "error: NNODES, NODE_RANK and MASTER_ADDR must be set. Type on each node (node 0 has the address):" >&2
  for ((node = 0; node < ${NNODES:-2}; node++)); do
    echo "  NNODES=${NNODES:-2} NODE_RANK=$node MASTER_ADDR=${MASTER_ADDR:-10.0.0.1} $0 $*" >&2
  done
  exit 2
fi

# torchrun's default rendezvous (c10d) takes each node's address from its host name, often 127.0.0.1; this one does not.
exec "$(dirname "${BASH_SOURCE[0]}")/torchrun.sh" --rdzv-backend=static --nnodes="$NNODES" --node-rank="$NODE_RANK" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" "$@"
