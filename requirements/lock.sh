#!/bin/sh
# Resolves the lock files anew. Run through `make lock`; UV names the uv command.
set -eu
cd "$(dirname "$0")/.."
UV=${UV:-uv}
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT

# The libraries of a CUDA build of torch: named by that build itself when it is installed, and never by a CPU build.
without_cuda="--no-emit-package triton --no-emit-package cuda-bindings --no-emit-package cuda-pathfinder --no-emit-package cuda-toolkit"
for library in cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn cufft cufile curand cusolver cusparse cusparselt nccl nvjitlink nvshmem nvtx; do
  for build in "" -cu12 -cu13; do
    without_cuda="$without_cuda --no-emit-package nvidia-$library$build"
  done
done

lock() {
  output=$1
  shift
  "$UV" pip compile "$@" --no-header --no-annotate --quiet -o "requirements/$output" > /dev/null
}

echo 'torch==2.13.0' > "$constraint"
lock app.txt pyproject.toml --universal --python-version 3.11 $without_cuda -c "$constraint"
lock dev.txt pyproject.toml --extra dev --universal --python-version 3.11 $without_cuda -c requirements/app.txt
lock megatron.txt pyproject.toml --extra megatron --universal --python-version 3.11 $without_cuda -c requirements/app.txt
echo 'sglang==0.5.17' > "$constraint"
lock engine.txt "$constraint" --python-version 3.12 --python-platform x86_64-manylinux_2_34 --prerelease=if-necessary-or-explicit
echo 'harbor==0.26.0' > "$constraint"
lock harbor.txt "$constraint" --python-version 3.12 --python-platform x86_64-manylinux_2_34
