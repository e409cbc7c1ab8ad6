#!/usr/bin/env bash
# Builds Horovod 0.28.1, its newest release, for the PyTorch of the active environment. Run it again after installing
# another PyTorch. Needs g++ and, for a CUDA build of PyTorch, the CUDA toolkit. Takes about 15 minutes on two busy cores.
#
#   scripts/install_horovod.sh                                  # gradients travel over TCP (gloo), also those of GPUs
#   HOROVOD_GPU_OPERATIONS=NCCL scripts/install_horovod.sh      # over NCCL between GPUs; needs NCCL's headers
#
# Set PYTHON to use another interpreter than `python`, and JOBS to the number of compilers that run at once (2). Each
# takes up to 1.6 GB.
#
# This release passes -std=c++14, but PyTorch's headers need C++17. So the build uses a compiler wrapper that replaces the
# option. Horovod itself is not patched, and the build tools are removed afterwards.
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
  fail "this PyTorch needs the toolkit of CUDA $cuda, which was not found. Install it and put its nvcc on PATH."
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

# Horovod's setup.py does not run with setuptools 81, nor its CMakeLists.txt with CMake 4.
"$python" -m pip install --quiet --target "$build/tools" 'setuptools<81' wheel packaging 'cmake==3.31.6'
"$python" -m pip install -c "$project/constraints.txt" cffi cloudpickle packaging psutil pyyaml

# --no-cache-dir: a cached wheel may have been built for another PyTorch.
PATH="$build/tools/bin:$PATH" PYTHONPATH="$build/tools" CXX="$build/c++" MAKEFLAGS="-j${JOBS:-2}" \
  HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
  HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_CPU_OPERATIONS=GLOO \
  "$python" -m pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall 'horovod==0.28.1'

"$python" -c 'import horovod.torch as hvd; hvd.init(); print("Horovod is built; by NCCL:", bool(hvd.nccl_built()))'
