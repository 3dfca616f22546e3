"""The error of CuPy's compiler."""

from __future__ import annotations


class CompileException(Exception):
    def __init__(
        self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str = "nvrtc"
    ) -> None:
        super().__init__()
        self._msg = msg

    def __str__(self) -> str:
        return self._msg
