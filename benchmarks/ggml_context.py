"""ggml's functions as methods, so that one function builds a graph in ggmlb and in ggml."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ggml

from ggmlb import DType


class GgmlContext:
    """A context of ggml: its functions without the `ggml_` before the name and without the context argument.

    Args:
        nbytes: Room for the tensors' descriptions [bytes].
    """

    def __init__(self, nbytes: int) -> None:
        params = ggml.ggml_init_params(mem_size=nbytes, mem_buffer=None, no_alloc=True)
        self.ctx = ggml.ggml_init(params)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(ggml, f"ggml_{name}"), self.ctx)

    def new_tensor(self, dtype: DType, ne: tuple[int, ...]) -> Any:
        return getattr(ggml, f"ggml_new_tensor_{len(ne)}d")(self.ctx, int(dtype), *ne)

    def weight(self, dtype: DType, *ne: int) -> Any:
        """Return a tensor that counts as placed."""
        tensor = self.new_tensor(dtype, ne)
        tensor.contents.data = 4096  # not null
        return tensor

    def set_input(self, tensor: Any) -> Any:
        ggml.ggml_set_input(tensor)
        return tensor

    def set_output(self, tensor: Any) -> Any:
        ggml.ggml_set_output(tensor)
        return tensor

    def free(self) -> None:
        ggml.ggml_free(self.ctx)
