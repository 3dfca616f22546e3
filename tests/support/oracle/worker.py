"""A process that computes programs with ggml-python: ggml ends its process where an assertion fails.

It reads pickled requests on stdin and writes pickled answers on stdout, until stdin ends. A request is
`(leafs, steps, outputs)`: leafs `(name, type, ne, bytes)`, steps `(out, fn, args)` with the C arguments
after ctx, tensors as `"$name"`, arrays as lists; outputs are names. An answer holds `(type, ne, bytes)` of
each output. With `(loss, params)` besides, the graph has gradients of a scalar, read as `"grad NAME"`.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
from typing import Any

import numpy as np
from ggml import ggml

CONTEXT_NBYTES = 256 << 20


def compute(
    leafs: Any, steps: Any, outputs: list[str], gradient: tuple[str, list[str]] | None = None
) -> list[Any] | str:
    """Return type, extents and contiguous bytes of each output, or the name of what ggml lacks."""
    ctx = ggml.ggml_init(ggml.ggml_init_params(mem_size=CONTEXT_NBYTES, mem_buffer=None, no_alloc=False))
    try:
        tensors = {}
        for name, dtype, ne, data in leafs:
            tensor = ggml.ggml_new_tensor(ctx, dtype, 4, (ctypes.c_int64 * 4)(*ne))
            ctypes.memmove(tensor.contents.data, data, len(data))
            tensors[name] = tensor
        graph = ggml.ggml_new_graph_custom(ctx, 2048, gradient is not None)
        for name in gradient[1] if gradient else ():
            ggml.ggml_set_param(tensors[name])
        results = []
        for out, fn, args in steps:
            function = getattr(ggml, f"_ggml_{fn}", None) or getattr(ggml, f"ggml_{fn}", None)
            if function is None:
                return str(fn)
            kinds = list(function.argtypes)
            in_context = [ctx] if kinds[0] is ctypes.c_void_p else []
            own = zip(args, kinds[len(in_context) :], strict=True)
            result = function(*in_context, *(_argument(arg, kind, tensors) for arg, kind in own))
            if out is not None:
                tensors[out] = result
                results.append(result)
        if gradient:
            ggml.ggml_set_loss(tensors[gradient[0]])
            results = [tensors[gradient[0]]]
        for result in results:
            ggml.ggml_build_forward_expand(graph, result)
        if gradient:
            ggml.ggml_build_backward_expand(ctx, graph, None)
            ggml.ggml_graph_reset(graph)
            for name in gradient[1]:
                tensors[f"grad {name}"] = ggml.ggml_graph_get_grad(graph, tensors[name])
        ggml.ggml_graph_compute_with_ctx(ctx, graph, 1)
        return [_read(tensors[name].contents) if tensors[name] else (-1, (), b"") for name in outputs]
    finally:
        ggml.ggml_free(ctx)


def _argument(arg: Any, kind: Any, tensors: dict[str, Any]) -> Any:
    if isinstance(arg, str):
        return tensors[arg[1:]]
    if isinstance(arg, list):
        return (kind._type_ * len(arg))(*arg)
    return arg


def _read(tensor: Any) -> tuple[int, tuple[int, ...], bytes]:
    ne, nb = tuple(tensor.ne), tuple(tensor.nb)
    block, size = ggml.ggml_blck_size(tensor.type), ggml.ggml_type_size(tensor.type)
    shape = (*ne[:0:-1], ne[0] // block)
    if 0 in shape:
        return tensor.type, ne, b""
    extent = size + sum((n - 1) * stride for n, stride in zip(shape, nb[::-1], strict=True))
    memory = (ctypes.c_ubyte * extent).from_address(tensor.data)
    items = np.ndarray(shape, np.dtype((np.void, size)), memory, 0, nb[::-1])
    return tensor.type, ne, np.ascontiguousarray(items).tobytes()


def main() -> None:
    requests = sys.stdin.buffer
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ggml prints is no answer
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        pickle.dump(compute(*request), answers)
        answers.flush()


if __name__ == "__main__":
    main()
