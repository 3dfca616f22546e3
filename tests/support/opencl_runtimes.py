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
KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
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
        release: The Debian release whose C library it needs; empty for this system's.
        faults: Work splits with programs that fail by its fault (docs/opencl-faults.md).
    """

    says: str
    install: Callable[[Path], None] = lambda folder: None
    library: str = ""
    libraries: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    splits: tuple[str, ...] = ("gpu", "cpu")
    finds_races: bool = False
    release: str = ""
    faults: frozenset[str] = frozenset()


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


def _by_release(release: str, *packages: str) -> Callable[[Path], None]:
    """Return what unpacks packages of another release of Debian, with all they need, C library included."""

    def install(folder: Path) -> None:
        if not shutil.which("apt-get"):
            raise RuntimeError(f"it is unpacked from Debian's packages {', '.join(packages)}: needs apt-get")
        form = ("apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages")
        known = subprocess.run(form, capture_output=True, text=True).stdout.split()
        if not known:
            raise RuntimeError("apt-get knows no mirror of Debian's")
        apt = folder / "apt"
        for made in ("lists/partial", "cache/archives/partial"):
            (apt / made).mkdir(parents=True)
        (apt / "status").touch()
        (apt / "sources.list").write_text(f"deb [signed-by={KEYS}] {known[0]} {release} main\n")
        facts = {
            "Dir::Etc::sourcelist": apt / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": apt / "lists",
            "Dir::State::status": apt / "status",
            "Dir::Cache": apt / "cache",
            "APT::Sandbox::User": "root",
        }
        options = [word for fact, value in facts.items() for word in ("-o", f"{fact}={value}")]
        _run("apt-get", *options, "update", "-qq")
        wanted = ("install", "-y", "-qq", "--no-install-recommends", "--download-only", *packages)
        _run("apt-get", *options, *wanted)
        for archive in (apt / "cache/archives").glob("*.deb"):
            _run("dpkg", "-x", archive, folder)
        shutil.rmtree(apt)
        (folder / "usr/lib/lib").symlink_to("llvm-19/lib")  # where Mesa looks for the headers of its compiler
        loader, python = folder / "usr/lib64/ld-linux-x86-64.so.2", Path(sys.executable)
        script = folder / "python"
        script.write_text(
            f"#!/bin/sh\nexec {loader} --library-path {folder / DEBIAN} --argv0 {python} {python.resolve()} "
            '"$@"\n'
        )
        script.chmod(0o755)

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
    "pocl6": Runtime(
        "Portable Computing Language",
        _by_release("trixie", "pocl-opencl-icd"),
        f"{DEBIAN}/libpocl.so.2",
        release="trixie",
        env={"POCL_DEVICES": "cpu"},  # PyOpenCL's knows none of that name
        faults=frozenset({"gpu cross_entropy_loss_back-0"}),
    ),
    "rusticl25": Runtime(
        "rusticl",
        _by_release("trixie", "mesa-opencl-icd"),
        f"{DEBIAN}/libRusticlOpenCL.so.1",
        splits=("gpu",),  # the other one's mul_mat_id ends the process
        release="trixie",
        env={"RUSTICL_ENABLE": "llvmpipe"},
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
    env["POCL_CACHE_DIR"] = str(cache)
    if runtime.library:
        env["POCL_DEVICES"] = "none"
    if runtime.libraries:
        env["LD_LIBRARY_PATH"] = str(folder / runtime.libraries)
    return {**env, **runtime.env}


def interpreter(name: str) -> str:
    """Return the command of the Python that can load a runtime, for processes with its `environment`."""
    return str(FOLDER / name / "python") if RUNTIMES[name].release else sys.executable
