"""Activations as bytes: rows of float32 quantised in blocks of 32, once for all products with them.

A row of `k` elements becomes, one part after the other: `k` codes (int8), `k / 32` scales (float32),
`k / 32` sums of the values as quantised (float32), and `k / 16` sums of codes (int32).

Weights of 8 bits deserve more: some channels of a model's hidden states are many times as large as their
neighbours, which 8 bits with a common scale leave little of. For such weights the codes of a block with a
value that stands out are `128 high + low`; `k` high parts (int8) follow, and `k / 32` bytes that tell which
blocks have them, so that products leave out the others' zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ggmlb.backends.numba.llvm.simd import greatest, load_floats, total
from ggmlb.backends.numba.llvm.value import F32, I8, I32, Value, vec

if TYPE_CHECKING:
    from ggmlb.backends.numba.llvm.emit import Kernel

HIGH = 128
"""What high parts of codes count. With low parts up to 64 no sum of two products of bytes leaves 16 bits."""

CREST = 5.0
"""A block has high parts if its greatest value is that many times the root of the mean square."""

FLAGS = 16
"""Flags that are read at a time."""


class Parts(NamedTuple):
    """Where the parts of a row are.

    Attributes:
        codes: The codes, or their low parts.
        scales: Of 32 each.
        sums: Of 32 values each.
        counts: Sums of 16 codes each.
        high: The high parts of codes, if a row is to have them.
        flags: Whether a block has high parts.
    """

    codes: Value
    scales: Value
    sums: Value
    counts: Value
    high: Value | None = None
    flags: Value | None = None


def row_nbytes(k: int, wide: bool) -> int:
    """Bytes of a row of `k` elements as quantised, with high parts if it is `wide`."""
    return k + k // 2 + (k + _flags_nbytes(k) if wide else 0)


def _flags_nbytes(k: Any) -> Any:
    """Whole vectors of flags."""
    return (k // 32 + (FLAGS - 1)) // FLAGS * FLAGS


def parts(address: Value, k: Value, wide: bool) -> Parts:
    """Where the parts of a row of `k` elements are."""
    scales = address + k
    sums = scales + (k >> 3)
    counts = sums + (k >> 3)
    if not wide:
        return Parts(address, scales, sums, counts)
    high = counts + (k >> 2)
    return Parts(address, scales, sums, counts, high, high + k)


def quantize(k: Kernel, dtype: str, wide: bool) -> None:
    """Quantise rows: `x, nb1, nb2, nb3, ne0, ne1, ne2, ne3, out`."""
    x, nb1, nb2, nb3, n, n1, n2, n3, out = k.ints(9)
    blocks = n >> 5
    work = blocks * n1 * n2 * n3
    size = k.i64(128 if dtype == "f32" else 64)
    with k.loop(work * k.chunk // k.n_chunks, work * (k.chunk + 1) // k.n_chunks) as i:
        row, block = i // blocks, i % blocks
        i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
        values = load_floats(k, dtype, x + i1 * nb1 + i2 * nb2 + i3 * nb3 + block * size, 32)
        magnitude = k.generic("fabs", values)
        top = greatest(k, magnitude)
        most = k.const(F32, 127.0)
        stands_out = top * top > total(k, values * values) * (CREST**2 / 32)
        if wide:
            most = k.select(stands_out, k.const(F32, 127.0 * HIGH), most)
        inverse = k.select(top > 0.0, most / top, 0.0)
        scale = top / most
        whole = k.generic("rint", values * inverse.splat(32))
        codes = whole.to_int()
        nbytes = n + (n >> 1) + (n + _flags_nbytes(n) if wide else 0)
        q, d, s, c, high, flags = parts(out + row * nbytes, n, wide)
        low = codes
        if high is not None and flags is not None:
            upper = k.select(stands_out.splat(32), k.generic("rint", whole * (1 / HIGH)).to_int(), 0)
            low = codes - upper * HIGH
            k.store(upper.trunc(I8), high + block * 32)
            k.store(stands_out.zext(I8), flags + block)
        k.store(low.trunc(I8), q + block * 32)
        halves = [total(k, half) for half in codes.split()]
        k.store(k.const(vec(I32, 2), 0).put(0, halves[0]).put(1, halves[1]), c + block * 8)
        k.store(scale, d + block * 4)
        k.store((halves[0] + halves[1]).to_float(F32) * scale, s + block * 4)
