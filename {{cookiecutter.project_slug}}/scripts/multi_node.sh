#!/usr/bin/env bash
# Trains on several nodes without a scheduler. Type the same arguments on each node, with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#
# MASTER_ADDR is the address of node 0, and MASTER_PORT (29500) must be free there. Firewalls must let the nodes reach each
# other. Code and config must be the same on all nodes; only node 0 writes checkpoints and metrics. The nodes may have
# different numbers of devices. Arguments: see scripts/torchrun.sh.
set -euo pipefail

NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
if [[ -z ${NNODES:-} || -z $NODE_RANK || -z ${MASTER_ADDR:-} ]]; then
  echo "error: NNODES, NODE_RANK and MASTER_ADDR must be set. Type on each node, with the address of node 0:" >&2
  for ((node = 0; node < ${NNODES:-2}; node++)); do
    echo "  NNODES=${NNODES:-2} NODE_RANK=$node MASTER_ADDR=${MASTER_ADDR:-10.0.0.1} $0 $*" >&2
  done
  exit 2
fi
MASTER_PORT=${MASTER_PORT:-29500}
if [[ ! $NNODES =~ ^[1-9][0-9]*$ || ! $NODE_RANK =~ ^(0|[1-9][0-9]*)$ || ! $MASTER_PORT =~ ^[1-9][0-9]*$ ]] || ((NODE_RANK >= NNODES)); then
  echo "error: NNODES=$NNODES NODE_RANK=$NODE_RANK MASTER_PORT=$MASTER_PORT: must be numbers; the nodes are 0 to NNODES - 1." >&2
  exit 2
fi

# gloo takes the address of the host's name, on Debian often 127.0.1.1: name the interface that reaches node 0.
if [[ -z ${GLOO_SOCKET_IFNAME:-} ]] && command -v ip >/dev/null; then
  interface=$(ip -o route get "$(getent ahostsv4 "$MASTER_ADDR" | awk '{print $1; exit}')" 2>/dev/null | grep -oP 'dev \K\S+' || true)
  if [[ -z $interface || $interface == lo ]]; then # on node 0 itself
    address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{print $1; exit}' || true)
    interface=$(ip -o -4 address show to "$address" 2>/dev/null | awk '{print $2; exit}' || true)
  fi
  [[ -z $interface || $interface == lo ]] || export GLOO_SOCKET_IFNAME=$interface
fi

echo "node $NODE_RANK of $NNODES: waiting until all nodes reach $MASTER_ADDR:$MASTER_PORT" >&2
# Static, because torchrun's default rendezvous (c10d) takes each node's address from its host name, often 127.0.0.1.
exec "$(dirname "${BASH_SOURCE[0]}")/torchrun.sh" --rdzv-backend=static --nnodes="$NNODES" --node-rank="$NODE_RANK" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
