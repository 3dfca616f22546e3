#!/bin/sh
# A second compiler of CUDA, for `tests/unit/test_cuda_compilers.py`: Debian's newest Clang in build/clang, with nothing
# installed in the system, and CUDA's headers and libdevice, as old as NVRTC, in the environment of $PYTHON.
set -eu
cd "$(dirname "$0")/.."
python=$(pwd)/${PYTHON:-.venv/bin/python}
version=$(apt-cache search --names-only '^clang-[0-9]+$' | sed 's/clang-\([0-9]*\).*/\1/' | sort -n | tail -1)
mkdir -p build/clang
cd build/clang
apt-get -qq download "clang-$version" "libclang-cpp$version" "libllvm$version" "libclang-common-$version-dev"
for package in *.deb; do dpkg -x "$package" .; done
cuda=$("$python" -c 'from scripts.nvrtc import Nvrtc; print(Nvrtc().version)')
"$python" -m pip install --quiet "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*" "nvidia-nvvm==$cuda.*"
# Clang takes a folder for CUDA's only with a `bin` in it, as the compiler's own package would bring.
mkdir -p "$("$python" -c 'from scripts.nvrtc import wheel; print(wheel("nvidia-cuda-runtime"))')/bin"
