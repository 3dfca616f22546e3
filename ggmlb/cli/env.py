"""`ggmlb env`: versions, devices, drivers, caches and environment variables, for reports of faults."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from ggmlb.cli import plain
from ggmlb.cli.options import JsonOption

PACKAGES: Final = (
    "numpy", "ml-dtypes", "cupy-cuda13x", "cupy-cuda12x", "cupy", "nvidia-cuda-runtime", "nvidia-cuda-nvrtc",
    "nvidia-cublas", "pyopencl", "pocl-binary-distribution", "llvmlite", "xllamacpp", "ggml-python",
    "llama-cpp-python", "ray", "safetensors", "tokenizers", "jinja2", "threadpoolctl", "rich", "typer",
    "pytest", "pytest-xdist",
)  # fmt: skip
"""Packages whose versions matter to results, in the order of the list."""

PREFIXES: Final = (
    "CUBLAS", "CUDA", "CUPY", "GGML", "HIP", "LP_", "MESA", "MKL", "NUMEXPR", "NVIDIA", "OCL", "OMP",
    "OPENBLAS", "OPENCL", "POCL", "PYOPENCL", "ROCR", "RUSTICL", "SYCL", "VK_",
)  # fmt: skip
NAMES: Final = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "RAY_ADDRESS", "XDG_CACHE_HOME")
"""Environment variables that are shown, by prefix and by name; others are left out, as they may be secret."""

SECRET: Final = ("KEY", "PASSWORD", "SECRET", "TOKEN")
"""Parts of names of variables whose values are never shown."""


def env(as_json: JsonOption = False) -> None:
    """Print what a report of a fault needs: versions, devices, drivers, caches, environment variables.

    Examples:
      ggmlb env
      ggmlb env --json
    """
    import json

    told = collected()
    if as_json:
        plain.echo(json.dumps(told, indent=2))
        return
    for part, facts in told.items():
        plain.echo(f"{part}:")
        for name, value in facts.items():
            lines = value.items() if isinstance(value, dict) else ()
            plain.echo(f"  {name}: {'' if lines else value}".rstrip())
            for inner, text in lines:
                plain.echo(f"    {inner}: {text}")


def collected() -> dict[str, dict[str, Any]]:
    """Return the facts of this machine and installation, by part and name."""
    import ggmlb
    from ggmlb.core.errors import readable_size
    from ggmlb.interface.registry import unavailable
    from ggmlb.system.process import n_cpus
    from ggmlb.testing.about import About

    devices = ggmlb.devices()
    about = About.here(devices)
    processor = next((d.description for d in devices if d.name == "CPU"), platform.processor())
    memory = next((d.memory[1] for d in devices if d.name == "CPU"), 0)
    return {
        "ggmlb": {
            "version": about.software["version"],
            "revision": about.software["revision"],
            "folder": str(Path(ggmlb.__file__).parent),
            "API version": str(ggmlb.API_VERSION),
        },
        "system": {
            "platform": about.software["platform"],
            "C library": " ".join(platform.libc_ver()).strip() or "unknown",
            "processor": f"{processor}, {n_cpus()} of {os.cpu_count()} cores",
            "memory": readable_size(memory),
            "date": about.date,
        },
        "python": {
            "version": f"{platform.python_implementation()} {sys.version}".replace("\n", " "),
            "program": sys.executable,
            "environment": "virtual" if sys.prefix != sys.base_prefix else "system",
        },
        "packages": _packages(),
        "devices": {name: _device(facts) for name, facts in about.devices.items()},
        "unavailable": {m.name: f"{m.kind}: {' '.join(m.reason.split())}" for m in unavailable()},
        "drivers": _drivers(),
        "caches": _caches(),
        "environment": _variables(),
    }


def _device(facts: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in facts.items() if name != "device" and value}


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _drivers() -> dict[str, str]:
    """Return drivers as the system names them, whether or not a library reaches them."""
    query = ("--query-gpu=name,driver_version,compute_cap,memory.total,compute_mode", "--format=csv,noheader")
    vendors = os.environ.get("OCL_ICD_VENDORS") or "/etc/OpenCL/vendors"
    icds = [Path(vendors)] if vendors.endswith(".icd") else sorted(Path(vendors).glob("*.icd"))
    return {
        "NVIDIA": _output("nvidia-smi", *query),
        "AMD": _output("rocminfo", "--version") if shutil.which("rocminfo") else "rocminfo is not installed",
        "OpenCL": ", ".join(f"{icd.name} ({_first_line(icd)})" for icd in icds) or f"no .icd in {vendors}",
    }


def _output(*command: str) -> str:
    """Return what a program prints, in one line, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return "; ".join((done.stdout or done.stderr).split("\n")).strip("; ") or f"status {done.returncode}"


def _first_line(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip().partition("\n")[0]
    except OSError as error:
        return str(error.strerror)


def _caches() -> dict[str, str]:
    """Return the folders of compiled code, with their sizes."""
    import platformdirs

    from ggmlb.core.errors import readable_size
    from ggmlb.system import disk_cache

    places: dict[str, Callable[[], str | Path]] = {
        "ggmlb": lambda: disk_cache.folder("all").parent,
        "CuPy": lambda: Path(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache").expanduser(),
        "PyOpenCL": lambda: platformdirs.user_cache_dir("pyopencl", "pyopencl"),
        "PoCL": lambda: os.environ.get("POCL_CACHE_DIR") or platformdirs.user_cache_dir("pocl"),
    }
    told = {}
    for name, where in places.items():
        try:
            place = Path(where())
            sizes = [file.stat().st_size for file in place.rglob("*") if file.is_file()]
        except (OSError, RuntimeError) as error:  # a home that is missing, a file that was just replaced
            told[name] = f"unknown: {error}"
            continue
        told[name] = f"{place}, {len(sizes)} files, {readable_size(sum(sizes))}"
    return told


def _variables() -> dict[str, str]:
    """Return the environment variables that change what is computed, where and how fast."""
    return {
        name: "(not shown)" if any(part in name.upper() for part in SECRET) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) or name in NAMES
    }
