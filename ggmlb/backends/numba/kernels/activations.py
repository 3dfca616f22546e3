"""Activations as bytes: rows of float32 quantised in blocks of 32, once for all products with them.

A row of `k` elements becomes, one part after the other: `k` codes (int8), `k / 32` scales (float32),
`k / 32` sums of the values as quantised (float32), and `k / 16` sums of codes (int32).

Weights of 8 bits deserve more: some channels of a model's hidden states are many times as large as their
neighbours, which 8 bits with a common scale leave little of. For them a code is `128 high + low`, and `k`
high parts (int8) follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ggmlb.backends.numba.llvm.emit import F32, I8, I32, Kernel, Value, vec
from ggmlb.backends.numba.llvm.simd import greatest, load_floats, total

if TYPE_CHECKING:
    from collections.abc import Sequence


HIGH_BITS = 7
"""How far high parts of codes are shifted. No sum of two products of bytes leaves 16 bits so."""


class Parts(NamedTuple):
    """Where the parts of a row are.

    Attributes:
        codes: The codes, or their low parts.
        scales: Of 32 each.
        sums: Of 32 values each.
        counts: Sums of 16 codes each.
        high: The high parts of codes, if they have them.
    """

    codes: Value
    scales: Value
    sums: Value
    counts: Value
    high: Value | None

    @property
    def terms(self) -> list[Value]:
        """The bytes that codes are made of, high parts first."""
        return [self.codes] if self.high is None else [self.high, self.codes]


def row_nbytes(k: int, wide: bool) -> int:
    """Bytes of a row of `k` elements as quantised, with high parts if it is `wide`."""
    return k + k // 2 + (k if wide else 0)


def parts(address: Value, k: Value, wide: bool) -> Parts:
    """Where the parts of a row of `k` elements are."""
    scales = address + k
    sums = scales + (k >> 3)
    counts = sums + (k >> 3)
    return Parts(address, scales, sums, counts, counts + (k >> 2) if wide else None)


def combined(products: Sequence[Value]) -> Value:
    """Products with a code's parts, high ones first, as one with the code."""
    return products[0] if len(products) == 1 else (products[0] << HIGH_BITS) + products[1]


def quantize(k: Kernel, dtype: str, wide: bool) -> None:
    """Quantise rows: `x, nb1, nb2, nb3, ne0, ne1, ne2, ne3, out`."""
    most = 127 << HIGH_BITS if wide else 127
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
        inverse = k.select(top > 0.0, float(most) / top, 0.0)
        scale = top * (1 / most)
        whole = k.generic("rint", values * inverse.splat(32))
        codes = whole.to_int()
        nbytes = n + (n >> 1) + (n if wide else 0)
        q, d, s, c, high = parts(out + row * nbytes, n, wide)
        low = codes
        if high is not None:
            upper = k.generic("rint", whole * (1 / (1 << HIGH_BITS))).to_int()
            low = codes - (upper << HIGH_BITS)
            k.store(upper.trunc(I8), high + block * 32)
        k.store(low.trunc(I8), q + block * 32)
        halves = [total(k, half) for half in codes.split()]
        k.store(k.const(vec(I32, 2), 0).put(0, halves[0]).put(1, halves[1]), c + block * 8)
        k.store(scale, d + block * 4)
        k.store((halves[0] + halves[1]).to_float(F32) * scale, s + block * 4)
