#!/usr/bin/env bash
# Builds Horovod 0.28.1, its newest release, for the PyTorch of the active environment; again after another PyTorch is
# installed. Needs g++, and with a CUDA build of PyTorch the CUDA toolkit; takes a quarter of an hour on two busy cores.
#
#   scripts/install_horovod.sh                                  # gradients travel over TCP (gloo), from GPUs too
#   HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh      # over NCCL between GPUs: needs NCCL's headers
#
# PYTHON names the interpreter, if it is not this shell's `python`; JOBS the number of compilers at once, each of which
# takes up to 1.6 GB.
#
# That release asks the compiler for C++14 by name, and PyTorch's headers want C++17: the build is given a compiler that
# reads the one as the other. Nothing of Horovod is patched, and what the build alone needs does not stay behind.
set -euo pipefail

project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}

fail() {
  echo "install_horovod.sh: $1" >&2
  exit 1
}

cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")') ||
  fail "$python has no PyTorch. Type: $python -m pip install -c constraints.txt -e ."
if [[ $cuda && ! -x $(command -v nvcc || echo "${HOROVOD_CUDA_HOME:-/usr/local/cuda}/bin/nvcc") ]]; then
  fail "this PyTorch is for CUDA $cuda, and the toolkit is not here. Install it, and put its nvcc on PATH."
fi
compiler=$(command -v "${CXX:-g++}") || fail "no C++ compiler. Install g++, or name one in CXX."

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
cat >"$build/c++" <<WRAPPER
#!/usr/bin/env bash
for word; do
  shift
  [[ \$word != -std=c++1[14] && \$word != -std=gnu++1[14] ]] || word=-std=gnu++17
  set -- "\$@" "\$word"
done
exec "$compiler" "\$@"
WRAPPER
chmod +x "$build/c++"

# Its setup.py is older than setuptools 81, its CMakeLists.txt than CMake 4.
"$python" -m pip install --quiet --target "$build/tools" 'setuptools<81' wheel packaging 'cmake==3.31.6'
"$python" -m pip install -c "$project/constraints.txt" cffi cloudpickle packaging psutil pyyaml

# No wheel from pip's cache: it may be another PyTorch's.
PATH="$build/tools/bin:$PATH" PYTHONPATH="$build/tools" CXX="$build/c++" MAKEFLAGS="-j${JOBS:-2}" \
  HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO \
  "$python" -m pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall 'horovod==0.28.1'

"$python" -c 'import horovod.torch as hvd; hvd.init(); print("Horovod is built; by NCCL:", bool(hvd.nccl_built()))'
