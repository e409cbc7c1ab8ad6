#!/usr/bin/env bash
# Installs the Debian packages that tests/cluster needs, if it can; without them those tests are skipped and say why.
set -euo pipefail

missing=()
for pair in ip:iproute2 munged:munge slurmctld:slurm-wlm; do
  PATH=$PATH:/usr/sbin:/sbin command -v "${pair%:*}" >/dev/null || missing+=("${pair#*:}")
done
if ((${#missing[@]} == 0)); then
  exit 0
elif [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "test-cluster: not installed, and only root can, with Debian's apt-get: ${missing[*]}. What needs them is skipped." >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update && apt-get install -y --no-install-recommends "${missing[@]}"; } >/dev/null; then
  echo "test-cluster: apt-get could not install ${missing[*]}. What needs them is skipped." >&2
fi
