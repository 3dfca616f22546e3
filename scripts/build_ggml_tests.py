"""Build ggml and its own `test-backend-ops` as shared libraries, in `build/ggml/lib`.

    python scripts/build_ggml_tests.py

The source is that of PyPI's xllamacpp, which holds ggml with its tests. The version is pinned: the cases in
`tests/support/ggml_bridge/ggml_faults.json` are those of its ggml, 0.26. It exits with 2 if a tool or the
network is missing, and costs nothing when all is built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "2026.10.11549"
FOLDER = Path(__file__).parents[1] / "build/ggml"
SOURCE = FOLDER / "source"
INSIDE = f"xllamacpp-{VERSION}/thirdparty/llama.cpp/"
REPEATABLE = Path(__file__).parents[1] / "tests/support/ggml_bridge/repeatable.h"
STAMP = FOLDER / f"lib/.built-{VERSION}"
JOBS = "2"
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_OPENMP=OFF", "-DGGML_LLAMAFILE=OFF",
    "-DGGML_CCACHE=OFF", "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF",
)  # fmt: skip


def run(what: str, *command: str | Path) -> None:
    """Run a command, quietly; end the script with its output if it fails."""
    print(f"{what} ...", flush=True)
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    if done.returncode:
        print(done.stdout[-4000:])
        print(f"could not {what}: the command above failed with status {done.returncode}")
        sys.exit(2)


def need_tools() -> str:
    """Return the C++ compiler; end the script with what to install where a tool is missing."""
    compiler = next(
        (c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None
    )
    tools = {
        "cmake": shutil.which("cmake"),
        "g++": compiler,
        "make": shutil.which("make") or shutil.which("ninja"),
    }
    missing = [name for name, found in tools.items() if found is None]
    if missing or compiler is None:
        print(f"building ggml needs {', '.join(missing)}: apt-get install {' '.join(missing)}")
        sys.exit(2)
    return compiler


def download(package: str = "xllamacpp", version: str = VERSION) -> Path:
    """Return a package's source archive from PyPI."""
    archive = FOLDER / f"sdist/{package.replace('-', '_')}-{version}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        command += ["--no-binary", ":all:", f"{package}=={version}", "-d", str(archive.parent)]
        run(f"download {package}'s source from PyPI", *command)
    return archive


def unpack(archive: Path) -> None:
    """Take ggml and its test out of the archive."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    wanted = (f"{INSIDE}ggml/", f"{INSIDE}tests/test-backend-ops.cpp", f"{INSIDE}LICENSE")
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.startswith(wanted):
                member.name = member.name.removeprefix(INSIDE)
                tar.extract(member, SOURCE, filter="data")
    # A template for pkg-config, which ggml's CMakeLists.txt wants and the archive lacks.
    (SOURCE / "ggml/ggml.pc.in").touch()


def main() -> None:
    """Build what is not built yet."""
    if STAMP.exists() and STAMP.stat().st_mtime > REPEATABLE.stat().st_mtime:
        return
    compiler = need_tools()
    os.nice(10)
    unpack(download())
    made, lib = FOLDER / "cmake", FOLDER / "lib"
    shutil.rmtree(made, ignore_errors=True)
    shutil.rmtree(lib, ignore_errors=True)
    run("configure ggml", "cmake", "-S", SOURCE / "ggml", "-B", made, *OPTIONS)
    run("build ggml (some minutes)", "cmake", "--build", made, "--parallel", JOBS)
    lib.mkdir(parents=True)
    for library in (made / "src").glob("libggml*.so*"):
        shutil.copy(library, lib, follow_symlinks=False)
    run(
        "build test-backend-ops",
        *(compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-DGGML_SHARED", "-DGGML_BACKEND_SHARED"),
        *(f"-I{SOURCE / 'ggml/include'}", "-include", REPEATABLE, SOURCE / "tests/test-backend-ops.cpp"),
        *(
            "-o",
            lib / "libtest-backend-ops.so",
            f"-L{lib}",
            "-lggml",
            "-lggml-cpu",
            "-lggml-base",
            "-lpthread",
        ),
        "-Wl,-rpath,$ORIGIN",
    )
    STAMP.touch()


if __name__ == "__main__":
    main()
