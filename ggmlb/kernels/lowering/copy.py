"""Copies between types, shapes and places; rows taken and put by index; windows written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ggmlb.dtypes import DType
from ggmlb.enums import Op
from ggmlb.kernels.launch import Mem, elementwise, flattened, mapped
from ggmlb.kernels.lowering.base import FLOATS, Rule
from ggmlb.kernels.lowering.elementwise import combine
from ggmlb.kernels.lowering.matmul import READ_IN_EIGHTS

if TYPE_CHECKING:
    from ggmlb.kernels.launch import Launch, Target
    from ggmlb.tensor import Tensor

_PLAIN = FLOATS | {DType.I8, DType.I16, DType.I32, DType.I64}
_WRITTEN = frozenset({DType.Q4_0, DType.Q4_1, DType.Q5_0, DType.Q5_1, DType.Q8_0, DType.IQ4_NL})
_WORDS = {8: DType.I64, 4: DType.I32, 2: DType.I16, 1: DType.I8}


def _conversion(src: DType, dst: DType) -> str | None:
    """Return how elements of one type become another's: the kernel's CONVERT; `None` where nothing does."""
    if src == dst or (src in _PLAIN and dst in _PLAIN):
        return "plain"
    if src in READ_IN_EIGHTS and dst in FLOATS:
        return "dequantize"
    if src in FLOATS and dst in _WRITTEN:
        return "quantize"
    return None


def _units(kind: str, a: Mem, d: Mem) -> tuple[Mem, Mem]:
    """Return both with extents that count what the kernel moves at a step: elements, eights, or blocks."""
    if kind == "plain":
        return (_as_words(a), _as_words(d)) if a.dtype.is_quantized else (a, d)
    step = 8 if kind == "dequantize" else d.dtype.block_size
    a = a.window((a.ne[0] // step, *a.ne[1:]))
    return a, d.window((d.ne[0] // step, *d.ne[1:]))


def _convert(kind: str, src: DType) -> dict[str, Any]:
    """Return the macros that choose a conversion; what is quantised may be of any plain float type."""
    return {"CONVERT": kind, **({"FROM": src.name.lower()} if kind == "quantize" else {})}


def _as_words(m: Mem) -> Mem:
    """Return a quantised mem as integers, for blocks that are moved unchanged."""
    size = next(
        s for s in (8, 4, 2, 1) if not (m.dtype.type_size | m.nb[1] | m.nb[2] | m.nb[3] | m.offset) % s
    )
    n = m.ne[0] // m.dtype.block_size * m.dtype.type_size // size
    return m.window((n, *m.ne[1:]), (size, *m.nb[1:]), dtype=_WORDS[size])


def _no_conversion(src: Tensor, dst: Tensor) -> str | None:
    if _conversion(src.dtype, dst.dtype) is None:
        return f"no kernel converts {src.dtype.name.lower()} to {dst.dtype.name.lower()}"
    if src.dtype.is_quantized or dst.dtype.is_quantized:
        for t in (src, dst):
            if not t.is_contiguous_rows():
                return f"rows of {t.describe()} are not contiguous: apply cont"
    return None


def _copy_declines(node: Tensor) -> str | None:
    a = node.sources[0]
    why = _no_conversion(a, node)
    if why is None and a.ne != node.ne and (a.dtype.is_quantized or node.dtype.is_quantized):
        return "a copy between shapes of quantised tensors"
    return why


def copy(target: Target, a: Mem, d: Mem) -> Launch:
    """Return the launch that copies `a` to `d`, of as many elements, converting."""
    kind = _conversion(a.dtype, d.dtype)
    assert kind is not None
    if a.ne != d.ne:
        return elementwise(target, "copy_reshape", [a, d])
    a, d = _units(kind, a, d)
    if kind == "plain":
        return mapped(target, "copy", flattened(target, [a, d]), CONVERT=kind)
    return elementwise(target, "copy", [a, d], **_convert(kind, a.dtype))


def _copy(node: Tensor, target: Target) -> list[Launch]:
    return [copy(target, Mem.of(node.sources[0]), Mem.of(node))]


def _get_rows_declines(node: Tensor) -> str | None:
    return _no_conversion(node.sources[0], node)


def _get_rows(node: Tensor, target: Target) -> list[Launch]:
    a, b = node.sources
    kind = _conversion(a.dtype, node.dtype)
    assert kind is not None
    x, d = _units(kind, Mem.of(a), Mem.of(node))
    return [elementwise(target, "get_rows", [x, Mem.of(b), d], CONVERT=kind)]


def _set_rows_declines(node: Tensor) -> str | None:
    a = node.sources[0]
    return _no_conversion(a, node)


def _set_rows(node: Tensor, target: Target) -> list[Launch]:
    a, ids = node.sources[:2]
    kind = _conversion(a.dtype, node.dtype)
    assert kind is not None
    x, d = _units(kind, Mem.of(a), Mem.of(node))
    return [elementwise(target, "set_rows", [x, Mem.of(ids), d], over=0, **_convert(kind, a.dtype))]


def _window_declines(node: Tensor) -> str | None:
    a, b = node.sources
    if a.dtype != b.dtype or a.dtype not in _PLAIN:
        return f"a is {a.dtype.name.lower()} and b {b.dtype.name.lower()}: both must have one plain type"
    if node.op is Op.ACC and a.dtype not in FLOATS:
        return f"a is {a.dtype.name.lower()}: only f32, f16 and bf16 are added"
    return None


def _write_window(node: Tensor, target: Target) -> list[Launch]:
    """ACC and SET: the result is `a`, but for a window that takes b's shape, where b is added or put."""
    a, b = node.sources
    p, d, y = node.params, Mem.of(node), Mem.of(b)
    window = d.window(b.ne, (node.dtype.type_size, p["nb1"], p["nb2"], p["nb3"]), p["offset"])
    steps = [] if p["inplace"] else [copy(target, Mem.of(a), d)]
    put = copy(target, y, window) if node.op is Op.SET else combine(target, "add", window, y, window)
    return [*steps, put]


_COPY = Rule(_copy_declines, _copy)
_WINDOW = Rule(_window_declines, _write_window)

RULES = {
    **dict.fromkeys((Op.DUP, Op.CPY, Op.CONT), _COPY),
    Op.GET_ROWS: Rule(_get_rows_declines, _get_rows),
    Op.SET_ROWS: Rule(_set_rows_declines, _set_rows),
    **dict.fromkeys((Op.ACC, Op.SET), _WINDOW),
}
