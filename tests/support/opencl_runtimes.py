"""OpenCL runtimes, each installed in a folder of its own and alone in the processes that use it.

No machine's device numbers change: only OCL_ICD_VENDORS of such a process names the runtime, and POCL_DEVICES
hides the PoCL that PyOpenCL's loader always finds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/opencl"
DEBIAN = "usr/lib/x86_64-linux-gnu"
INTEL = ("intel-opencl-rt==2026.2.0", "intel-cmplr-lib-rt==2026.2.0", "tbb==2023.2.0")


@dataclass(frozen=True)
class Runtime:
    """A runtime.

    Attributes:
        says: What the description of its device contains.
        install: Installs into a folder; raises RuntimeError with the reason if that cannot be.
        library: The file with its OpenCL, in the folder; empty if it comes with PyOpenCL.
        libraries: Where in the folder others lie that it needs.
        env: What else its processes need.
        splits: The work splits that are tested on it.
        finds_races: Whether it writes races between work-items to the log that OCLGRIND_LOG names.
    """

    says: str
    install: Callable[[Path], None] = lambda folder: None
    library: str = ""
    libraries: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[str, ...] = ("gpu", "cpu")
    finds_races: bool = False


def _run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, quietly; raise RuntimeError with the end of what it said if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", cwd=cwd)
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout)[-500:]}")


def _by_pip(*packages: str) -> Callable[[Path], None]:
    """Return what installs the files of packages that are no modules, without the packages they ask for."""

    def install(folder: Path) -> None:
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        _run(*pip, "--ignore-installed", "--no-deps", "--prefix", folder, *packages)

    return install


def _by_apt(*packages: str, needs: tuple[str, ...] = ()) -> Callable[[Path], None]:
    """Return what unpacks Debian's packages; `needs`, which are no runtimes, are installed in the system."""

    def install(folder: Path) -> None:
        if not shutil.which("apt-get"):
            raise RuntimeError(f"it is unpacked from Debian's packages {', '.join(packages)}: needs apt-get")
        missing = [p for p in needs if subprocess.run(("dpkg", "-s", p), capture_output=True).returncode]
        if missing and os.geteuid():
            raise RuntimeError(f"as root: apt-get install {' '.join(missing)}")
        if not os.geteuid():
            _run("apt-get", "update", "-qq")
        if missing:
            _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)
        _run("apt-get", "download", "-qq", *packages, cwd=folder)
        for archive in folder.glob("*.deb"):
            _run("dpkg", "-x", archive, folder)

    return install


RUNTIMES = {
    "pocl": Runtime("Portable Computing Language"),
    "intel": Runtime("Intel(R) OpenCL", _by_pip(*INTEL), "lib/libintelocl.so", "lib"),
    # Mesa's compiler looks for these by their paths in the system.
    "rusticl": Runtime(
        "rusticl",
        _by_apt(
            "mesa-opencl-icd",
            needs=("libclc-15", "libclang-common-15-dev", "libclang-cpp15", "libllvmspirvlib15", "libllvm15"),
        ),
        f"{DEBIAN}/libRusticlOpenCL.so.1",
        DEBIAN,
        {"RUSTICL_ENABLE": "llvmpipe"},
    ),
    "oclgrind": Runtime(
        "Oclgrind",
        _by_apt("oclgrind", "liboclgrind-21.10", needs=("libllvm14",)),
        "usr/lib/oclgrind/liboclgrind-rt-icd.so",
        DEBIAN,
        {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_NUM_THREADS": "1"},  # processes share the cores
        splits=("gpu",),
        finds_races=True,
    ),
}


def environment(name: str) -> dict[str, str]:
    """Install a runtime unless it is there; return the environment of processes that have it alone.

    Raises:
        RuntimeError: It cannot be installed; the message says why.
    """
    runtime = RUNTIMES[name]
    folder = FOLDER / name
    vendors, cache = folder / "vendors", folder / "cache"
    if not vendors.exists():
        print(f"installing OpenCL runtime {name} in {folder} ...", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        cache.mkdir(parents=True)
        cache.chmod(0o700)
        runtime.install(folder)
        vendors.mkdir()
        if runtime.library:
            (vendors / f"{name}.icd").write_text(f"{folder / runtime.library}\n")
    env = {"OCL_ICD_VENDORS": str(vendors), "GGMLB_CACHE_DIR": str(cache), "PYOPENCL_NO_CACHE": "1"}
    if runtime.library:
        env |= {"POCL_DEVICES": "none", "LD_LIBRARY_PATH": str(folder / runtime.libraries)}
    return {**env, **runtime.env}
