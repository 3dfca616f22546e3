"""Copies between types, shapes and strides; gather and scatter of rows; writes to views (ACC, SET)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ggmlb.backends.common.rules import FLOATS, converts, in_window, same_shape_of_blocks
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import (
    BadIndex,
    Launch,
    Target,
    elementwise,
    flattened,
    mapped,
    segmented,
    vector_width,
)
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.backends.gpu.lowering.elementwise import combine
from ggmlb.backends.gpu.lowering.matmul import READ_IN_EIGHTS
from ggmlb.backends.gpu.source import types_with
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggmlb.core.tensor import Tensor

_PLAIN = FLOATS | {DType.I8, DType.I16, DType.I32, DType.I64}
_WRITTEN = types_with("QUANTIZE_", "quantize.h")
_WORDS = {8: DType.I64, 4: DType.I32, 2: DType.I16, 1: DType.I8}


def _conversion(src: DType, dst: DType) -> str | None:
    """Return the kernel's CONVERT macro for two types; `None` if there is no conversion."""
    if src == dst or (src in _PLAIN and dst in _PLAIN):
        return "plain"
    if src in READ_IN_EIGHTS and dst in FLOATS:
        return "dequantize"
    if src in FLOATS and dst in _WRITTEN:
        return "quantize"
    return None


def _moved(target: Target, kernel: str, a: Mem, d: Mem, beside: Sequence[Mem] = (), over: int = -1) -> Launch:
    """Return a launch that copies elements or selected rows of `a` to `d` or to selected rows of it."""
    kind = _conversion(a.dtype, d.dtype)
    assert kind is not None
    if kind == "plain":
        mems = [*_as_words(a, d, target)] if a.dtype is d.dtype else [a, d]
        if kernel == "copy":
            mems = flattened(target, mems)
        return mapped(target, kernel, mems, over=over, beside=beside, CONVERT=kind)
    if kind == "dequantize" and not target.on_cpu:
        return segmented(target, kernel, [a, *beside, d], vector_width([d]), CONVERT=kind, EIGHTS=1)
    step = 8 if kind == "dequantize" else d.dtype.block_size
    # the kernel counts units of a step: eight elements, or a block
    a, d = (m.window((m.ne[0] // step, *m.ne[1:])) for m in (a, d))
    flags = {"FROM": a.dtype.name.lower()} if kind == "quantize" else {}
    return elementwise(target, kernel, [a, *beside, d], over=over, CONVERT=kind, **flags)


def _as_words(a: Mem, d: Mem, target: Target) -> tuple[Mem, Mem]:
    """Return two tensors of one type as integers, to copy bytes: quantised, or with contiguous rows."""
    dtype = a.dtype
    if not dtype.is_quantized and any(m.nb[0] != dtype.type_size for m in (a, d)):
        return a, d
    largest = 8 if target.on_cpu else 4  # GPUs move several of four bytes at once
    size = math.gcd(largest, dtype.row_size(a.ne[0]), *a.steps(), *d.steps())

    def words(m: Mem) -> Mem:
        n = m.ne[0] // dtype.block_size * dtype.type_size // size
        return m.window((n, *m.ne[1:]), (size, *m.nb[1:]), dtype=_WORDS[size])

    return words(a), words(d)


_converts = converts(lambda src, dst: _conversion(src, dst) is not None)


def copy(target: Target, a: Mem, d: Mem) -> Launch:
    """Return the launch that copies `a` to `d`; types and shapes may differ, not the number of elements."""
    if a.ne != d.ne:
        return elementwise(target, "copy_reshape", [a, d])
    return _moved(target, "copy", a, d)


@RULES.rule((Op.DUP, Op.CPY, Op.CONT), _converts, same_shape_of_blocks)
def _copy(node: Tensor, target: Target) -> list[Launch]:
    return [copy(target, Mem.of(node.sources[0]), Mem.of(node))]


@RULES.rule(Op.GET_ROWS, _converts)
def _get_rows(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.sources
    return [_moved(target, "get_rows", Mem.of(a), Mem.of(node), [Mem.of(b), BadIndex(node, a.ne[1]).mem])]


@RULES.rule(Op.SET_ROWS, _converts)
def _set_rows(node: Tensor, target: Target) -> list[Launch]:
    a, ids = node.sources[:2]
    beside = [Mem.of(ids), BadIndex(node, node.ne[1]).mem]
    return [_moved(target, "set_rows", Mem.of(a), Mem.of(node), beside, over=0)]


def _one_plain_type(node: Tensor) -> str | None:
    a, b = node.sources
    if a.dtype != b.dtype or a.dtype not in _PLAIN:
        return f"a is {a.dtype.name.lower()} and b {b.dtype.name.lower()}: both must have one plain type"
    if node.op is Op.ACC and a.dtype not in FLOATS:
        return f"a is {a.dtype.name.lower()}: only f32, f16 and bf16 are added"
    return None


@RULES.rule((Op.ACC, Op.SET), _one_plain_type, in_window)
def _write_window(node: Tensor, target: Target) -> list[Launch]:
    """ACC and SET: the result is `a`, with `b` added to, or written to, a view of b's shape."""
    a, b = node.sources
    p, d, y = node.params, Mem.of(node), Mem.of(b)
    window = d.window(b.ne, (node.dtype.type_size, p["nb1"], p["nb2"], p["nb3"]), p["offset"])
    steps = [] if p["inplace"] else [copy(target, Mem.of(a), d)]
    put = copy(target, y, window) if node.op is Op.SET else combine(target, "add", window, y, window)
    return [*steps, put]
