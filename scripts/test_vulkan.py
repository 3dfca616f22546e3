"""Run the tests of ggml's Vulkan, on Mesa's driver for the CPU (lavapipe) where there is no card.

    python scripts/test_vulkan.py [pytest's options]

It installs what it needs: Debian's `mesa-vulkan-drivers` and `libvulkan1` (as root), and npm's package of
node-llama-cpp with ggml's libraries, in `build/vulkan`, where compiled shaders are kept too. What cannot be
installed is told, and nothing is run.
"""

from __future__ import annotations

import ctypes.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGE = "@node-llama-cpp/linux-x64-vulkan@3.22.1"
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/vulkan"
LIBRARIES = FOLDER / "package/bins/linux-x64-vulkan"
ICDS = Path("/usr/share/vulkan/icd.d")


def run(*command: str | Path) -> None:
    """Run a command, quietly; raise RuntimeError with the end of what it said if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise RuntimeError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {(done.stderr or done.stdout)[-500:]}")


def install_driver() -> None:
    """Install Vulkan's loader and Mesa's drivers, unless there are some."""
    if ctypes.util.find_library("vulkan") and list(ICDS.glob("*.json")):
        return
    if not shutil.which("apt-get") or os.geteuid():
        raise RuntimeError("there is no Vulkan driver: apt-get install mesa-vulkan-drivers libvulkan1")
    print("installing Mesa's Vulkan drivers ...", flush=True)
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", "mesa-vulkan-drivers", "libvulkan1")


def install_library() -> None:
    """Unpack ggml's libraries."""
    if LIBRARIES.exists():
        return
    print(f"downloading {PACKAGE} (24 MB) ...", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    run("npm", "pack", "--silent", "--pack-destination", FOLDER, PACKAGE)
    for archive in FOLDER.glob("*.tgz"):
        with tarfile.open(archive) as tar:
            tar.extractall(FOLDER, filter="data")


def main() -> int:
    """Install, and run the tests."""
    try:
        install_driver()
        install_library()
    except RuntimeError as why:
        print(f"test-vulkan is skipped: {why}")
        return 0
    cache = FOLDER / "cache"
    cache.mkdir(mode=0o700, exist_ok=True)
    environment = {
        "GGMLB_GGML_PATH": str(LIBRARIES),
        "GGML_VK_VISIBLE_DEVICES": "0",  # else ggml passes over drivers that run on the CPU
        "GGMLB_CACHE_DIR": str(cache),
        "MESA_SHADER_CACHE_DIR": str(cache),
    }
    if lavapipe := list(ICDS.glob("lvp_icd*.json")):
        environment["VK_ICD_FILENAMES"] = str(lavapipe[0])
    command = [sys.executable, "-m", "pytest", "--durations=5", "tests/vulkan", *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env={**environment, **os.environ}).returncode


if __name__ == "__main__":
    sys.exit(main())
