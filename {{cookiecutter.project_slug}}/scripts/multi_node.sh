#!/usr/bin/env bash
# Trains on several nodes without a scheduler. Type the same arguments on each node, with its own NODE_RANK:
#
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#
# MASTER_ADDR is the address of node 0, and MASTER_PORT (29500) must be free there. Firewalls must let the nodes reach each
# other. Code and config must be the same on all nodes; only node 0 writes checkpoints and metrics. The nodes may have
# different numbers of devices. Arguments: see scripts/torchrun.sh.
#
# With a smallest and a largest number, nodes may come and go. Type the same line on each node, whenever it is free:
#
#   NNODES=1:4 MASTER_ADDR=10.0.0.1 scripts/multi_node.sh training.epochs=3
#
# runs/ must then be on a disk that all nodes see. The nodes meet at MASTER_ADDR: that node must stay. On a node that does not
# train, such as a login node, `MASTER_ADDR=10.0.0.9 scripts/multi_node.sh serve` lets them meet there.
set -euo pipefail

MASTER_PORT=${MASTER_PORT:-29500}
if [[ ${1:-} == serve && -n ${MASTER_ADDR:-} ]]; then
  echo "nodes meet at $MASTER_ADDR:$MASTER_PORT until Ctrl-C" >&2
  exec "${PYTHON:-python}" -c 'import signal, sys; from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False); signal.pause()' "$MASTER_ADDR" "$MASTER_PORT"
fi
if [[ ${NNODES:-} =~ ^[1-9][0-9]*:[1-9][0-9]*$ ]]; then
  NODE_RANK=0
fi
NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-}}
if [[ -z ${NNODES:-} || -z $NODE_RANK || -z ${MASTER_ADDR:-} ]]; then
  echo "error: NNODES, NODE_RANK and MASTER_ADDR must be set. Type on each node, with the address of node 0:" >&2
  for ((node = 0; node < ${NNODES:-2}; node++)); do
    echo "  NNODES=${NNODES:-2} NODE_RANK=$node MASTER_ADDR=${MASTER_ADDR:-10.0.0.1} $0 $*" >&2
  done
  exit 2
fi
if [[ ! $NNODES =~ ^[1-9][0-9]*(:[1-9][0-9]*)?$ || ! $NODE_RANK =~ ^(0|[1-9][0-9]*)$ || ! $MASTER_PORT =~ ^[1-9][0-9]*$ ]] || ((NODE_RANK >= ${NNODES#*:})); then
  echo "error: NNODES=$NNODES NODE_RANK=$NODE_RANK MASTER_PORT=$MASTER_PORT: must be numbers; the nodes are 0 to NNODES - 1." >&2
  exit 2
fi

# gloo takes the address of the host's name, on Debian often 127.0.1.1: name the interface that reaches node 0.
address=$(getent ahostsv4 "$MASTER_ADDR" | awk '{print $1; exit}' || true)
own=$address
if command -v ip >/dev/null; then
  route=$(ip -o route get "$address" 2>/dev/null || true)
  own=$(grep -oP 'src \K\S+' <<<"$route" || echo "$address")
  interface=$(grep -oP 'dev \K\S+' <<<"$route" || true)
  if [[ -z $interface || $interface == lo ]]; then # on node 0 itself
    interface=$(ip -o -4 address show to "$address" 2>/dev/null | awk '{print $2; exit}' || true)
  fi
  [[ -n ${GLOO_SOCKET_IFNAME:-} || -z $interface || $interface == lo ]] || export GLOO_SOCKET_IFNAME=$interface
fi

script=$(dirname "${BASH_SOURCE[0]}")/torchrun.sh
if [[ $NNODES == *:* ]]; then
  echo "$own: meeting at $MASTER_ADDR:$MASTER_PORT, $NNODES nodes" >&2
  # Without it, a rank of a later meeting reads the addresses of an earlier one.
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  conf=last_call_timeout=10,keep_alive_interval=5,keep_alive_max_attempt=3
  # torchrun asks the host's name whether it is this machine's address. On the loopback the first one serves the others.
  [[ $own == 127.* ]] || conf+=,is_host=$([[ $own == "$address" ]] && echo 1 || echo 0)
  exec "$script" --rdzv-backend=c10d --nnodes="$NNODES" --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT" --rdzv-id=ddp --local-addr="$own" \
    --rdzv-conf="$conf" --max-restarts=1000 "$@"
fi
echo "node $NODE_RANK of $NNODES: waiting until all nodes reach $MASTER_ADDR:$MASTER_PORT" >&2
# Static, because torchrun's default rendezvous (c10d) takes each node's address from its host name, often 127.0.0.1.
exec "$script" --rdzv-backend=static --nnodes="$NNODES" --node-rank="$NODE_RANK" \
  --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "$@"
