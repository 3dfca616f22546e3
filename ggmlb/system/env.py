"""The environment variables that ggmlb reads: each by a function here, and nowhere else."""

from __future__ import annotations

import os


def backend_path() -> str | None:
    """GGMLB_BACKEND_PATH: a backend's file or package folder, or a folder of several; `None` if unset."""
    return os.environ.get("GGMLB_BACKEND_PATH") or None


def fuse() -> bool:
    """GGMLB_FUSE: `0` lets every node be computed by itself; see `ggmlb.backends.common.fusion`."""
    return os.environ.get("GGMLB_FUSE") != "0"


def sanitize() -> bool:
    """GGMLB_SANITIZE: whether the sanitizer watches the whole process; yes unless unset, empty or `0`."""
    return os.environ.get("GGMLB_SANITIZE", "") not in ("", "0")


def progress() -> bool | None:
    """GGMLB_PROGRESS: `1` tells of long tasks wherever stderr goes, `0` never."""
    value = os.environ.get("GGMLB_PROGRESS")
    return None if not value else value != "0"


def cache_dir() -> str | None:
    """GGMLB_CACHE_DIR: the folder for compiled kernels; `None` for the system's usual place."""
    return os.environ.get("GGMLB_CACHE_DIR") or None


def simd() -> str | None:
    """GGMLB_SIMD: the instruction set that the LLVM device keeps to; `None` if unset: the host's widest."""
    return os.environ.get("GGMLB_SIMD") or None


def cuda_graphs() -> bool:
    """GGMLB_CUDA_GRAPHS: 0 queues the steps of a plan one by one, instead of as CUDA graphs."""
    return os.environ.get("GGMLB_CUDA_GRAPHS", "1") != "0"


def cuda_sync() -> bool:
    """GGMLB_CUDA_SYNC: 1 waits after each node, so that an error names it."""
    return os.environ.get("GGMLB_CUDA_SYNC", "0") == "1"


def cuda_pinned() -> bool:
    """GGMLB_CUDA_NO_PINNED: 1 gives pageable memory for CUDA_Host."""
    return os.environ.get("GGMLB_CUDA_NO_PINNED", "0") != "1"


def cuda_register_host() -> bool:
    """GGMLB_CUDA_REGISTER_HOST: 1 lets CUDA devices page-lock a caller's memory, for buffer_from_host_ptr."""
    return os.environ.get("GGMLB_CUDA_REGISTER_HOST", "0") == "1"
