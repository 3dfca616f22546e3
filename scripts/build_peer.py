"""Build llama.cpp for this processor, the peer of `benchmarks/`, once, in the cache folder.

    python scripts/build_peer.py

The source is that of PyPI's llama-cpp-python, whose bindings by ctypes the benchmarks use. It is built with
`-march=native`, all that llama.cpp has for the processor (repacked weights, llamafile's products) and its own
defaults. It prints the version and the instruction sets, which the benchmarks' tables name, and exits with 2
if a tool or the network is missing. It takes some minutes on two cores, and nothing when it is built.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path

from build_ggml_tests import JOBS, download, need_tools, run

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from peers import FOLDER, Peer

VERSION = "0.3.36"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DGGML_LLAMAFILE=ON",
    "-DGGML_CPU_REPACK=ON", "-DGGML_CCACHE=OFF", "-DCMAKE_C_FLAGS=-march=native",
    "-DCMAKE_CXX_FLAGS=-march=native", "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON", "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DLLAMA_BUILD_COMMON=OFF", "-DLLAMA_BUILD_TOOLS=OFF", "-DLLAMA_BUILD_APP=OFF", "-DLLAMA_BUILD_TESTS=OFF",
)  # fmt: skip


def main() -> None:
    """Build what is not built yet, and print what it is."""
    stamp = FOLDER / "version"
    if not stamp.exists() or stamp.read_text() != VERSION:
        need_tools()
        os.nice(10)
        archive = download("llama-cpp-python", VERSION)
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir(parents=True)
        with tarfile.open(archive) as tar:
            tar.extractall(FOLDER, filter="data")
        (unpacked,) = FOLDER.glob("llama_cpp_python-*")
        source, made = unpacked / "vendor/llama.cpp", FOLDER / "cmake"
        run("configure llama.cpp", "cmake", "-S", source, "-B", made, *OPTIONS)
        command = ["cmake", "--build", made, "--target", "llama", "--parallel", JOBS]
        run("build llama.cpp (some minutes)", *command)
        package = shutil.copytree(unpacked / "llama_cpp", FOLDER / "llama_cpp")
        (package / "lib").mkdir(exist_ok=True)
        for library in (made / "bin").glob("lib*.so*"):
            shutil.copy(library, package / "lib", follow_symlinks=False)
        for rest in (unpacked, made):
            shutil.rmtree(rest)
        stamp.write_text(VERSION)
    print(Peer("native").about)


if __name__ == "__main__":
    main()
