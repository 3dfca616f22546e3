"""Quantisation of activations to int8 in blocks of 32, once for all products that read them.

Like ggml's q8_0 and q8_1, but as separate arrays per row. A row of `k` elements becomes: `k` codes (int8),
`k / 32` scales (float32), sums of 32 or 16 dequantised values (float32), and `k / 16` sums of 16 codes, each
as two 16-bit halves: of codes 0 and 1 of each four, and of codes 2 and 3.

With 8-bit weights, activations need more precision: some channels of hidden states are outliers, and with a
common scale their neighbours would lose precision. In this *wide* layout a block with an outlier has codes
`128 high + low`; `k` high parts (int8) follow, and a flag per block, so that products skip blocks without
high parts. As 128 is added to the signed weight codes (`vpdpbusd` needs unsigned ones), it has, instead of
the sums of codes, the accumulator's initial value (int32): -128 times a block's sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from ggmlb.backends.llvm.codegen.emit import F32, I8, I16, I32, Emitter, Level, Value, lanes_of, like, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, Dot, DotSum, folds, load_floats
from ggmlb.backends.llvm.kernels.blocks import FORMATS

HIGH = 128
"""Factor of the high parts. As low parts are at most 64, a sum of two byte products fits in 16 bits."""

CREST = 5.0
"""A block has high parts if its maximum exceeds this multiple of its root mean square."""

AT_ONCE = 4
"""Number of blocks quantised together."""

FLAGS = 32
"""Number of flags loaded at a time."""


QUANTIZED = "q8"
"""Name of the type of quantised activations, as a parameter of kernels."""


class ActivationLayout(NamedTuple):
    """The layout of a row of activations quantised to int8.

    Attributes:
        wide: Whether blocks may have high parts.
        sums: Number of values per sum: 32 or 16.
        interleaved_pairs: Whether the codes of two blocks alternate in runs of 16, so that each half of a
            32-byte vector belongs to one block.
        bf16: Whether it is no quantised row, but one of bfloat16.
    """

    wide: bool = False
    sums: int = 32
    interleaved_pairs: bool = False
    bf16: bool = False

    def codes_nbytes(self, k: Any) -> Any:
        """Size of the int8 codes of `k` elements, padded to 64 if blocks are interleaved in pairs [bytes]."""
        return (k + 63) // 64 * 64 if self.interleaved_pairs else k

    def row_nbytes(self, k: Any) -> Any:
        """Size of a quantised row of `k` elements [bytes]."""
        if self.bf16:  # rows a power of two apart would share cache sets
            return 2 * k + 64
        codes, more = self.codes_nbytes(k), k // 8 + k // self.sums * 4
        return codes + more + (k // 8 + codes + _flags_nbytes(k) if self.wide else k // 4)


def layout_for_rows(dtype: str, level: Level) -> ActivationLayout:
    """Return the layout of activations for `matvec` kernels with weights of type `dtype`."""
    form = FORMATS[dtype]
    return ActivationLayout(form.wide, form.group, interleaved_pairs=max(8, level.lanes) == 8)


def layout_for_strips(dtype: str) -> ActivationLayout:
    """Return the layout of activations for `interleaved_products` with weights of type `dtype`."""
    return ActivationLayout(FORMATS[dtype].wide)


def layout_for_tiles(dtype: str) -> ActivationLayout:
    """Return the layout of activations for `byte_tiles` with weights of type `dtype`."""
    form = FORMATS[dtype]
    return ActivationLayout(form.wide, form.group if form.has_min else 32)


class QuantRow(NamedTuple):
    """Addresses of the arrays of a quantised row.

    Attributes:
        codes: The codes, or their low parts.
        scales: A scale per block of 32.
        sums: Sums of dequantised values.
        counts: Sums of 16 codes, in two halves; in wide layouts, a block's initial accumulator.
        high: The high parts, in wide layouts.
        flags: Which blocks have high parts, in wide layouts.
    """

    codes: Value
    scales: Value
    sums: Value
    counts: Value
    high: Value | None = None
    flags: Value | None = None


def _flags_nbytes(k: Any) -> Any:
    """Size of the flags, padded to whole vectors [bytes]."""
    return (k // 32 + (FLAGS - 1)) // FLAGS * FLAGS


def parts(address: Value, k: Value, layout: ActivationLayout) -> QuantRow:
    """Return the addresses of the arrays of a quantised row of `k` elements."""
    codes = layout.codes_nbytes(k)
    scales = address + codes
    sums = scales + (k >> 3)
    counts = sums + k // layout.sums * 4
    if not layout.wide:
        return QuantRow(address, scales, sums, counts)
    high = counts + (k >> 3)
    return QuantRow(address, scales, sums, counts, high, high + codes)


def quantize(k: Emitter, dtype: str, layout: ActivationLayout) -> None:
    """Quantise rows of activations to int8, in the given layout.

    Arguments: `x, nb1, nb2, nb3, ne0, ne1, ne2, ne3, out`.
    """
    x, nb1, nb2, nb3, n, n1, n2, n3, out = k.ints(9)
    blocks = n >> 5
    work = blocks * n1 * n2 * n3
    first, last = work * k.chunk // k.n_chunks, work * (k.chunk + 1) // k.n_chunks
    nbytes = layout.row_nbytes(n)
    with k.loop(first // blocks, (last + blocks - 1) // blocks) as row:
        i1, i2, i3 = row % n1, row // n1 % n2, row // (n1 * n2)
        source = x + i1 * nb1 + i2 * nb2 + i3 * nb3
        to = parts(out + row * nbytes, n, layout)
        begin, end = k.maximum(first - row * blocks, 0), k.least(last - row * blocks, blocks)
        whole = begin + (end - begin) // AT_ONCE * AT_ONCE
        with k.loop(begin, whole, AT_ONCE) as block:
            _quantize(k, dtype, source, block, AT_ONCE, to, layout)
        with k.loop(whole, end) as block:
            _quantize(k, dtype, source, block, 1, to, layout)


def _quantize(
    k: Emitter, dtype: str, source: Value, block: Value, n: int, to: QuantRow, layout: ActivationLayout
) -> None:
    """Quantise `n` blocks of a row, beginning at `block`."""
    start = source + block * (32 * SIZES[dtype])
    values = [load_floats(k, dtype, start + i * (32 * SIZES[dtype]), 32) for i in range(n)]
    # Compared as integers, NaN is above infinity, which is above all numbers: the scale becomes NaN or inf.
    magnitudes = [x.bits(vec(I32, 32)) & 0x7FFFFFFF for x in values]
    tops = folds([k.maximum(*m.split()) for m in magnitudes], k.maximum)
    tops = tops.bits(like(tops.type, F32))
    most = k.const(tops.type, 127.0)
    stands_out = None
    if to.high is not None:
        squares = folds([_both(operator.add, x * x) for x in values], operator.add)
        stands_out = tops * tops > squares * (CREST**2 / 32)
        most = k.select(stands_out, k.const(tops.type, 127.0 * HIGH), most)
    inverse, scales = k.select(tops > 0.0, most / tops, 0.0), tops / most
    halves: list[Value] = []
    for i, x in enumerate(values):
        whole = k.generic("rint", x * inverse[i].splat(32))
        codes = whole.to_int()
        low = codes
        at = block + i
        if stands_out is not None and to.high is not None and to.flags is not None:
            upper = k.select(stands_out[i].splat(32), k.generic("rint", whole * (1 / HIGH)).to_int(), 0)
            low = codes - upper * HIGH
            _store_codes(k, upper, to.high, at, layout)
        _store_codes(k, low, to.codes, at, layout)
        halves += (codes if to.high is not None else codes << k.table(codes.type, [0, 0, 16, 16] * 8)).split()
    counts = sums = folds(halves, operator.add)
    if to.high is None:
        counts = counts + ((counts & 0x8000) << 1)  # undo the borrow of a negative lower half
        sums = both_parts(counts)
    k.store(scales, to.scales + block * 4)
    if layout.sums == 32:
        sums = sums.shuffle(range(0, 2 * n, 2)) + sums.shuffle(range(1, 2 * n, 2))
    if to.high is not None:
        counts = sums * -HIGH
    spread = scales.shuffle([i * layout.sums // 32 for i in range(32 * n // layout.sums)])
    k.store(sums.to_float() * spread, to.sums + block * (128 // layout.sums))
    k.store(counts, to.counts + block * (4 * lanes_of(counts.type) // n))
    if stands_out is not None and to.flags is not None:
        k.store(stands_out.zext(I8), to.flags + block)


def _store_codes(k: Emitter, codes: Value, to: Value, block: Value, layout: ActivationLayout) -> None:
    """Write the codes of block number `block`."""
    if not layout.interleaved_pairs:
        k.store(codes.trunc(I8), to + block * 32)
        return
    at = to + (block >> 1) * 64 + (block & 1) * 16
    for i, half in enumerate(codes.trunc(I8).split()):
        k.store(half, at + 32 * i)


def both_parts(counts: Value) -> Value:
    """Return sums of codes as 32-bit integers: the sum of the two 16-bit halves of each."""
    parts_, n = counts.bits(vec(I16, 2 * lanes_of(counts.type))), 2 * lanes_of(counts.type)
    return parts_.shuffle(range(0, n, 2)).sext(I32) + parts_.shuffle(range(1, n, 2)).sext(I32)


def counts(k: Emitter, n: int, size: int, group: Value, x: QuantRow) -> list[Value]:
    """Load the sums of codes of activation group number `group`, broadcast to `n` 32-bit lanes."""
    at = [x.counts + (group * (size // 16) + i) * 4 for i in range(size // 16)]
    return [k.load(I32, a).splat(n).bits(vec(I16, 2 * n)) for a in at]


def begin(
    dot: Dot, size: int, offset: int | None, most: int, group: Value, x: QuantRow, scale: Value | None = None
) -> DotSum:
    """Return a `DotSum` (accumulator) for weight codes times group number `group` (`size` codes) of `x`."""
    k = dot.k
    if x.high is None:
        return dot.group(offset, most, scale, counts(k, dot.lanes, size, group, x))
    return dot.group(offset, most, scale, start=dot.start_from(k.load(I32, x.counts + group * 4), offset))


def _both(fn: Callable[[Value, Value], Value], x: Value) -> Value:
    """Combine the halves of a vector."""
    low, high = x.split()
    return fn(low, high)
