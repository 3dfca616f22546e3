"""llama.cpp, with its ggml, as a peer: built for this processor, or the AVX2 build of PyPI.

`native` is what `scripts/build_peer.py` builds in the cache folder, `wheel` the installed xllamacpp.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from functools import cached_property
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from platformdirs import user_cache_path
from report import processor

FOLDER = user_cache_path("ggmlb") / "peers" / sha256(processor().encode()).hexdigest()[:16]
"""The build of this processor."""
NAMES = ("native", "wheel")


class Peer:
    """One of `NAMES`.

    Attributes:
        name: Its name.
        folder: Where its libraries are, for GGMLB_GGML_PATH.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        if name == "native":
            self.folder = FOLDER / "llama_cpp/lib"
            if not (FOLDER / "version").exists():
                raise SystemExit("the peer is not built: python scripts/build_peer.py, or --peer wheel")
        else:
            spec = find_spec("xllamacpp")
            if spec is None or spec.origin is None:
                raise SystemExit("the peer is not installed: pip install xllamacpp")
            self.folder = Path(spec.origin).parent

    @cached_property
    def about(self) -> str:
        """Its version and instruction sets, for tables."""
        if self.name == "native":
            library = ctypes.CDLL(str(self.folder / "libllama.so"))
            library.llama_print_system_info.restype = ctypes.c_char_p
            info, version = library.llama_print_system_info().decode(), (FOLDER / "version").read_text()
            what = f"llama.cpp of llama-cpp-python {version}, built for this processor"
        else:
            import xllamacpp

            info, version = xllamacpp.get_system_info(), importlib.metadata.version("xllamacpp")
            what = f"llama.cpp of PyPI's xllamacpp {version}, built for AVX2"
        told = [part.split("=") for part in info.partition(":")[2].split("|") if "=" in part]
        return f"{what} ({', '.join(key.strip() for key, on in told if on.strip() == '1')})"


def llama_cpp() -> Any:
    """The functions of the native build: the module `llama_cpp.llama_cpp`, without the package's imports."""
    package = ModuleType("llama_cpp")
    package.__path__ = [str(FOLDER / "llama_cpp")]
    sys.modules["llama_cpp"] = package
    return importlib.import_module("llama_cpp.llama_cpp")
