"""The vector layer: vector operations for each instruction set.

Dot products of bytes, float16 conversions, table look-ups, reductions over lanes, and transcendental
functions. They use LLVM's generic vector operations where possible, else intrinsics of the instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ggmlb.backends.llvm.codegen.emit import (
    BF16,
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    Emitter,
    Value,
    lanes_of,
    like,
    vec,
)
from ggmlb.core.dtypes import DType

# -- bytes -----------------------------------------------------------------------------------------

_ANY = 1 << 30
"""Unlimited number of products."""


class Dot:
    """Byte dot products, as `vpdpbusd`: a 32-bit lane adds four products of a weight code and a signed byte.

    A code (quantised weight) is unsigned and means `code - offset`; or signed, with `offset` `None`. The
    accumulator begins as `-offset` times the sum of the signed bytes, computed once for many rows.
    """

    def __init__(self, k: Emitter, lanes: int) -> None:
        self.k = k
        self.lanes = lanes

    def start(self, x: Value, offset: int | None) -> Value:
        """Return the initial accumulator: minus the shift that makes codes unsigned, times sums of `x`."""
        k, zero = self.k, self.k.const(vec(I32, self.lanes), 0)
        if shift := self._shift(offset):
            return zero - self._unsigned(zero, k.const(x.type, shift), x)
        return zero

    def start_from(self, count: Value, offset: int | None) -> Value:
        """Return the initial accumulator, which is `count` in all lanes if codes become unsigned, else 0.

        `count` is -128 times the sum of the signed bytes, as 128 is added to signed codes.
        """
        if shift := self._shift(offset):
            assert shift == 128
            return count.splat(self.lanes)
        return self.k.const(vec(I32, self.lanes), 0)

    def _shift(self, offset: int | None) -> int:
        """Return by how much the instruction's unsigned operand exceeds the code's value."""
        if self.k.level.dot == "vnni":
            return 128 if offset is None else offset
        return offset or 0 if self.k.level.dot == "maddubs" else 0

    def __call__(self, sums: Value, codes: Value, x: Value, offset: int | None) -> Value:
        """Return `sums + codes . x` for `sums` that began as `start(x, offset)`."""
        k = self.k
        if k.level.dot == "vnni":
            return self._unsigned(sums, codes ^ -128 if offset is None else codes, x)
        if k.level.dot == "maddubs":
            return self._unsigned(sums, *(self._magnitudes(codes, x) if offset is None else (codes, x)))
        return self._signed(sums, codes - offset if offset else codes, x)

    def group(
        self,
        offset: int | None,
        most: int,
        scale: Value | None = None,
        counts: Sequence[Value] = (),
        start: Value | None = None,
    ) -> DotSum:
        """Return a `DotSum` (accumulator) for weights `scale * (code - offset)`, with these parameters."""
        return DotSum(self, offset, most, scale, counts, start)

    def pairs(self, a: Value, b: Value) -> Value:
        """Multiply 16-bit integers and add neighbouring products in 32-bit lanes, as `vpmaddwd`."""
        k, n = self.k, self.lanes
        if k.level.dot in ("vnni", "maddubs"):
            name = "avx2.pmadd.wd" if n == 8 else "avx512.pmaddw.d.512"
            return k.call(f"llvm.x86.{name}", vec(I32, n), a, b)
        products = [
            a.shuffle(range(i, 2 * n, 2)).sext(I32) * b.shuffle(range(i, 2 * n, 2)).sext(I32) for i in (0, 1)
        ]
        return products[0] + products[1]

    def twice(self, x: Value) -> Value:
        """Copy the low 16 bits of each 32-bit lane to its high bits; 16-bit lanes are returned unchanged."""
        n = 2 * self.lanes
        if x.type.count == n:
            return x
        return x.bits(vec(I16, n)).shuffle([i // 2 * 2 for i in range(n)])

    def _unsigned(self, sums: Value, codes: Value, x: Value) -> Value:
        k, n = self.k, self.lanes
        if k.level.dot == "vnni":
            if n == 16 and k.level.lanes < 16:
                return self._halves(self._unsigned, sums, codes, x)
            return k.call(f"llvm.x86.avx512.vpdpbusd.{32 * n}", sums.type, sums, codes, x)
        if n != 8:
            return self._halves(self._unsigned, sums, codes, x)
        pairs = k.call("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 16), codes, x)
        return sums + k.call("llvm.x86.avx2.pmadd.wd", vec(I32, 8), pairs, k.const(vec(I16, 16), 1))

    def _magnitudes(self, codes: Value, x: Value) -> tuple[Value, Value]:
        """Return the codes' absolute values, and `x` with the codes' signs."""
        if self.lanes != 8:
            halves = [Dot(self.k, 8)._magnitudes(c, y) for c, y in zip(codes.split(), x.split(), strict=True)]
            return halves[0][0].join(halves[1][0]), halves[0][1].join(halves[1][1])
        x = self.k.call("llvm.x86.avx2.psign.b", x.type, x, codes)
        return self.k.call("llvm.abs.v32i8", codes.type, codes, self.k.const(I1, 0)), x

    def _signed(self, sums: Value, codes: Value, x: Value) -> Value:
        k, n = self.k, self.lanes
        if k.level.dot == "sdot":
            if n == 4:
                return k.call("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.type, sums, codes, x)
            return self._halves(self._signed, sums, codes, x)
        products = codes.sext(I32) * x.sext(I32)
        for i in range(4):
            sums = sums + products.shuffle(range(i, 4 * n, 4))
        return sums

    def _halves(self, product: Callable[..., Value], *operands: Value) -> Value:
        half = Dot(self.k, self.lanes // 2)
        parts = zip(*(v.split() for v in operands), strict=True)
        values: list[Value] = [getattr(half, product.__name__)(*part) for part in parts]
        return values[0].join(values[1])


class DotSum:
    """An accumulator of byte dot products, with an integer scale.

    Args:
        dot: The dot product.
        offset: Offset of the codes; see `Dot`.
        most: Largest magnitude of `code - offset`.
        scale: 16-bit scales in 32-bit lanes, or two equal ones per lane; `None` for 1.
        counts: Sums of the signed bytes of each lane, as two 16-bit halves: of the first two of each four
            bytes, and of the others. Several vectors are added.
        start: The initial accumulator, if there are no `counts`.

    Attributes:
        at_once: On AVX2 (`maddubs`), number of products that can be added in 16 bits without overflow.
    """

    def __init__(
        self,
        dot: Dot,
        offset: int | None,
        most: int,
        scale: Value | None,
        counts: Sequence[Value],
        start: Value | None,
    ) -> None:
        self.dot, self._offset, self._scale = dot, offset, scale
        self._in_pairs = dot.k.level.dot == "maddubs"
        shift, fit = dot._shift(offset), 32767 // (2 * 127 * most) if self._in_pairs else 0
        # Sums of shifted codes may overflow in between if all of them, and the shift, are added in 16 bits:
        # the final sum is right modulo 2^16.
        is_modular = fit >= 4 * len(counts)
        if counts and shift and not is_modular:
            fit = fit * most // (most + shift)
        self.at_once = fit // 2 * 2 if fit > 1 else _ANY  # even, as `add_words` adds two in a turn
        self._pairs: Value | None = None  # 16-bit sums of pairs of products, if several can be added
        self._sums = start
        self._free = self.at_once
        if counts and shift:
            pairs = counts[0]
            for count in counts[1:]:
                pairs = pairs + count
            if self._in_pairs and is_modular:
                self._pairs = pairs * -shift
            else:
                self._sums = dot.pairs(pairs, dot.k.const(pairs.type, -shift))

    def add(self, codes: Value, x: Value) -> None:
        """Add to each lane the dot product of four weight codes and four signed bytes of `x`."""
        if not self._free:
            self._settle()
        self._set(self._more(self._now(), codes, x))
        self._free -= 1

    def total(self) -> Value:
        """The scaled sum in 32-bit lanes."""
        self._settle()
        assert self._sums is not None
        return self._sums if self._scale is None or self._in_pairs else self._sums * self._scale

    def _now(self) -> Value:
        """The current accumulator: 16-bit sums of pairs, or 32-bit sums."""
        if self.at_once < _ANY:
            return self.dot.k.const(vec(I16, 2 * self.dot.lanes), 0) if self._pairs is None else self._pairs
        return self.dot.k.const(vec(I32, self.dot.lanes), 0) if self._sums is None else self._sums

    def _set(self, now: Value) -> None:
        if self.at_once < _ANY:
            self._pairs = now
        else:
            self._sums = now

    def _more(self, now: Value, codes: Value, x: Value) -> Value:
        """Return the accumulator `now` plus products."""
        dot = self.dot
        if not self._in_pairs:
            return dot(now, codes, x, self._offset)
        if self._offset is None:
            codes, x = dot._magnitudes(codes, x)
        pairs = dot.k.call("llvm.x86.avx2.pmadd.ub.sw", vec(I16, 16), codes, x)
        return now + (pairs if self.at_once < _ANY else self._whole(pairs))

    def _whole(self, pairs: Value) -> Value:
        """Return scaled 32-bit sums from 16-bit sums of pairs."""
        scale = self._scale
        return self.dot.pairs(
            pairs, self.dot.k.const(pairs.type, 1) if scale is None else self.dot.twice(scale)
        )

    def _settle(self) -> None:
        """Add the 16-bit sums of pairs to the 32-bit sums."""
        if self._pairs is not None:
            found = self._whole(self._pairs)
            self._sums = found if self._sums is None else self._sums + found
            self._pairs, self._free = None, self.at_once


def add_words(
    groups: Sequence[Sequence[DotSum]], n: int, read: Callable[[Value], tuple[list[Value], list[Value]]]
) -> None:
    """Add dot products of `n` words (four bytes) per lane to `groups[row][column]`; `read(i)` loads word `i`.

    `read` returns the codes of all rows and the signed bytes of all columns. With 16-bit sums it is called
    in a loop: unrolled, LLVM would fill the registers with loaded codes and spill the accumulators.
    """
    every = [(r, c, group) for r, row in enumerate(groups) for c, group in enumerate(row)]
    k, at_once = every[0][2].dot.k, every[0][2].at_once
    for first in range(0, n, at_once):
        last = min(n, first + at_once)
        if first:
            for *_, group in every:
                group._settle()
        together = 2 if k.level.dot == "maddubs" else last - first
        slots = [k.variable(group._now()) for *_, group in every]
        with k.loop(first, last, together) as i:
            for turn in range(together):
                codes, x = read(i + turn)
                for slot, (r, c, group) in zip(slots, every, strict=True):
                    slot.set(group._more(slot.now, codes[r], x[c]))
        for slot, (*_, group) in zip(slots, every, strict=True):
            group._set(slot.now)


def look_up(k: Emitter, table: Sequence[int], index: Value) -> Value:
    """Look up each byte of `index` (32 or 64 lanes) in a table of 16 bytes, as `pshufb`."""
    n = lanes_of(index.type)
    if n == 64:
        return k.call("llvm.x86.avx512.pshuf.b.512", index.type, k.table(index.type, [*table] * 4), index)
    if k.level.dot in ("vnni", "maddubs"):
        both = k.table(vec(I8, 32), [*table, *table])
        return k.call("llvm.x86.avx2.pshuf.b", index.type, both, index)
    if k.level.dot == "sdot":
        one = k.table(vec(I8, 16), table)
        low, high = (k.call("llvm.aarch64.neon.tbl1.v16i8", vec(I8, 16), one, half) for half in index.split())
        return low.join(high)
    found = k.const(index.type, 0)
    for i in range(16):
        found = k.select(index.equals(i), k.const(index.type, table[i]), found)
    assert n == 32
    return found


# -- floats in memory ------------------------------------------------------------------------------


def from_half(k: Emitter, bits: Value) -> Value:
    """Convert float16, as 16-bit integers, to float32."""
    if k.level.f16:
        return bits.bits(like(bits.type, F16)).to_float()
    wide = bits.zext(I32)
    magnitude = wide & 0x7FFF
    shifted = (magnitude << 13).bits(like(bits.type, F32)) * 2.0**112
    special = ((magnitude << 13) | 0x7F800000).bits(shifted.type)
    value = k.select(magnitude >= 0x7C00, special, shifted)
    return (value.bits(wide.type) | ((wide & 0x8000) << 16)).bits(value.type)


def to_half(k: Emitter, x: Value) -> Value:
    """Convert float32 to float16, as 16-bit integers; rounds to nearest, ties to even."""
    if k.level.f16:
        return x.trunc(F16).bits(like(x.type, I16))
    ints = like(x.type, I32)
    bits = x.bits(ints)
    magnitude = bits & 0x7FFFFFFF
    # Adding a number whose last bit has the weight of float16's last bit rounds the sum to it.
    exponent = magnitude & 0x7F800000
    least = k.select(exponent > 0x38800000, exponent, k.const(ints, 0x38800000))
    unit = (least + (13 << 23)).bits(x.type)
    rounded = (magnitude.bits(x.type) + unit) - unit
    scaled = (rounded * 2.0**-112).bits(ints) >> 13
    half = k.select(rounded >= 65536.0, k.const(ints, 0x7C00), scaled)
    half = k.select(magnitude > 0x7F800000, k.const(ints, 0x7E00), half)
    return (half | ((bits >> 16) & 0x8000)).trunc(I16)


def from_bfloat(bits: Value) -> Value:
    """Convert bfloat16, as 16-bit integers, to float32."""
    return (bits.zext(I32) << 16).bits(like(bits.type, F32))


def to_bfloat(k: Emitter, x: Value) -> Value:
    """Convert float32 to bfloat16, as 16-bit integers; rounds to nearest, ties to even."""
    bits = x.bits(like(x.type, I32))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return k.select(is_nan, (bits >> 16) | 64, rounded).trunc(I16)


def add_bfloats(k: Emitter, sums: Value, a: Value, b: Value) -> Value:
    """Add to each lane of `sums` the products of two neighbouring bfloat16, of 32-bit lanes (`vdpbf16ps`)."""
    pairs = vec(BF16, 2 * lanes_of(sums.type))
    return k.call("llvm.x86.avx512bf16.dpbf16ps.512", sums.type, sums, a.bits(pairs), b.bits(pairs))


def load_floats(k: Emitter, dtype: str, address: Value, lanes: int, mask: Value | None = None) -> Value:
    """Read `lanes` values of type f32, f16 or bf16 as float32; lanes not set in the mask are 0."""
    type_ = vec(F32 if dtype == "f32" else I16, lanes)
    raw = k.load(type_, address) if mask is None else k.load_masked(type_, address, mask)
    if dtype == "f32":
        return raw
    return from_half(k, raw) if dtype == "f16" else from_bfloat(raw)


def store_floats(
    k: Emitter, dtype: str, value: Value, address: Value, mask: Value | None = None, past_caches: bool = False
) -> None:
    """Write a float32 vector as f32, f16 or bf16; `past_caches`: by aligned non-temporal stores."""
    if dtype != "f32":
        value = to_half(k, value) if dtype == "f16" else to_bfloat(k, value)
    if mask is None and past_caches:
        k.store_past_caches(value, address, lanes_of(value.type) * SIZES[dtype])
    elif mask is None:
        k.store(value, address)
    else:
        k.store_masked(value, address, mask)


def load_float(k: Emitter, dtype: str, address: Value) -> Value:
    """Read one value of type f32, f16 or bf16 as float32."""
    if dtype == "f32":
        return k.load(F32, address)
    bits = k.load(I16, address)
    return from_half(k, bits) if dtype == "f16" else from_bfloat(bits)


SIZES = {t.name.lower(): t.type_size for t in (DType.F32, DType.F16, DType.BF16)}
"""Sizes of the float types [bytes]."""

# -- over lanes ------------------------------------------------------------------------------------


def fold(x: Value, both: Callable[[Value, Value], Value]) -> Value:
    """Reduce the lanes of `x` to a scalar by the binary function `both`, as a tree."""
    n = lanes_of(x.type)
    while n > 1:
        n //= 2
        x = both(x.shuffle(range(n)), x.shuffle(range(n, 2 * n)))
    return x[0]


def folds(vectors: Sequence[Value], both: Callable[[Value, Value], Value], each: int = 1) -> Value:
    """Reduce each vector by the binary function `both` to `each` (1 or 4) lanes; return all in one vector.

    Lane `i` of a result reduces lanes `i`, `i + each`, ... The number of vectors is a power of two.
    """
    n = lanes_of(vectors[0].type)
    found, n_results = list(vectors), each * len(vectors)
    order = [[i * each + j for j in range(each)] for i in range(len(found))]
    four = min(4, n)  # shuffles within 16 bytes cost least
    low = [i + j + n * of for i in range(0, n, four) for j in range(four // 2) for of in (0, 1)]
    high = [i + four // 2 for i in low]
    while len(found) > 1:
        step = 4 if len(order[0]) >= 4 else 1
        if step == 4:
            low = [i // 2 * 4 + n * (i % 2) + j for i in range(n // 4) for j in range(4)]
            high = [i + n // 2 for i in low]
        pairs = zip(found[::2], found[1::2], strict=True)
        found = [both(a.shuffle(low, b), a.shuffle(high, b)) for a, b in pairs]
        order = [
            [x for i in range(0, len(a), step) for of in (a, b) for x in of[i : i + step]]
            for a, b in zip(order[::2], order[1::2], strict=True)
        ]
    result = found[0]
    while n > n_results:
        n //= 2
        result = both(result.shuffle(range(n)), result.shuffle(range(n, 2 * n)))
    return result.shuffle([order[0].index(i) for i in range(n_results)])


def total(x: Value) -> Value:
    """The sum of the lanes."""
    return fold(x, lambda a, b: a + b)


def greatest(k: Emitter, x: Value) -> Value:
    """The largest lane."""
    return fold(x, k.maximum)


# -- functions -------------------------------------------------------------------------------------

_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_LOG2_E = 1.4426950408889634
_EXP = (1.3814540579915047e-3, 8.36874544620514e-3, 4.166838899254799e-2, 1.666652113199234e-1, 0.49999994)
"""`(exp(r) - 1 - r) / r^2` up to half of ln 2: minimax, 3e-9 of the exponential; highest power first."""

_ROUND = 12582912.0
"""Adding and subtracting this constant rounds numbers below 2^22 to integers."""


def polynomial(k: Emitter, x: Value, coefficients: Sequence[float]) -> Value:
    """Evaluate a polynomial of `x`; the coefficient of the highest power is first."""
    sum_ = k.const(x.type, coefficients[0])
    for c in coefficients[1:]:
        sum_ = k.fma(sum_, x, k.const(x.type, c))
    return sum_


def _power_of_two(k: Emitter, x: Value) -> tuple[Value, Value]:
    """`n` and `r` with `exp(x) = 2^n exp(r)`, where `r` is small, for `x` from -104 to 104."""
    n = k.fma(x, k.const(x.type, _LOG2_E), k.const(x.type, _ROUND)) - _ROUND
    r = k.fma(n, k.const(x.type, -_LN2_HIGH), x)
    return n, k.fma(n, k.const(x.type, -_LN2_LOW), r)


def _is_avx512(k: Emitter, x: Value) -> bool:
    """Whether the level has AVX-512, and `x` is whole vectors of 16 lanes."""
    return k.level.lanes == 16 and lanes_of(x.type) % 16 == 0


def _all(k: Emitter) -> tuple[Value, Value]:
    """Operands of an AVX-512 intrinsic: the mask of all 16 lanes, and the current rounding mode."""
    return k.const(I16, -1), k.const(I32, 4)


def _by_vectors(k: Emitter, fn: Callable[..., Value], *operands: Value) -> Value:
    """Apply a function to each 16 lanes."""
    if lanes_of(operands[0].type) == 16:
        return fn(*operands)
    low, high = (_by_vectors(k, fn, *half) for half in zip(*(x.split() for x in operands), strict=True))
    return low.join(high)


def _scaled(k: Emitter, x: Value, n: Value) -> Value:
    """`x 2^n`."""
    if _is_avx512(k, x):
        return _by_vectors(
            k, lambda x, n: k.call("llvm.x86.avx512.mask.scalef.ps.512", x.type, x, n, x, *_all(k)), x, n
        )
    # By two factors, as 2^n alone may be out of float32's range.
    exponent = n.to_int()
    half = k.select(exponent < -126, k.const(exponent.type, -126), exponent)
    half = k.select(half > 127, k.const(exponent.type, 127), half)
    for part in (half, exponent - half):
        x = x * ((part + 127) << 23).bits(x.type)
    return x


def _between(k: Emitter, x: Value, low: float, high: float) -> Value:
    """Clamp `x`; NaN stays NaN."""
    most, least = k.const(x.type, high), k.const(x.type, low)
    x = k.select(most < x, most, x)
    return k.select(least > x, least, x)


def _exp(k: Emitter, x: Value) -> Value:
    n, r = _power_of_two(k, x)
    return _scaled(k, polynomial(k, r, (*_EXP, 1.0, 1.0)), n)


def exp(k: Emitter, x: Value) -> Value:
    """The exponential, with a relative error of 1e-7; underflows to 0, overflows to infinity."""
    return _exp(k, _between(k, x, -104.0, 89.0))


def expm1(k: Emitter, x: Value) -> Value:
    """`exp(x) - 1`, accurate near 0; overflows to infinity."""
    n, r = _power_of_two(k, _between(k, x, -104.0, 89.0))
    e = k.fma(polynomial(k, r, _EXP), r * r, r)
    # 2^128 overflows where e 2^128 + 2^128 need not: so the last factor of 2 is applied after the sum.
    last = n > 127.0
    n = k.select(last, k.const(x.type, 127.0), n)
    y = _scaled(k, e, n) + (_scaled(k, k.const(x.type, 1.0), n) - 1.0)
    return y * k.select(last, k.const(x.type, 2.0), 1.0)


def tanh(k: Emitter, x: Value) -> Value:
    """The hyperbolic tangent, without overflow; keeps the sign of zero."""
    e = expm1(k, k.generic("fabs", x) * -2.0)
    ints = like(x.type, I32)
    return ((-e / (e + 2.0)).bits(ints) | (x.bits(ints) & -0x80000000)).bits(x.type)


_LOG = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
    -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
"""The logarithm's polynomial from Cephes (logf), highest power first."""


def log(k: Emitter, x: Value) -> Value:
    """The natural logarithm; NaN below 0."""
    ints = like(x.type, I32)
    small = x < 1.17549435e-38
    y = k.select(small, x * 2.0**24, x)
    bits = y.bits(ints)
    exponent = (bits >> 23).to_float() - k.select(small, k.const(x.type, 126.0 + 24), 126.0)
    m = ((bits & 0x007FFFFF) | 0x3F000000).bits(x.type)  # in [0.5, 1)
    low = m < 0.70710678118654752
    exponent = exponent - k.select(low, k.const(x.type, 1.0), 0.0)
    r = k.select(low, m + m, m) - 1.0
    square = r * r
    value = polynomial(k, r, _LOG) * r * square
    value = k.fma(exponent, k.const(x.type, _LN2_LOW), value) - square * 0.5
    value = k.fma(exponent, k.const(x.type, _LN2_HIGH), r + value)
    value = k.select(x > 3.4028234e38, x, value)
    value = k.select(x > 0.0, value, float("nan"))
    return k.select(x.equals(0.0), k.const(x.type, float("-inf")), value)


_SIN = (2.60831598e-06, -0.000198106907, 0.00833307859, -0.166666597)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


_HALF_PI_HIGH, _HALF_PI_LOW = 1.57079632673412561417, 6.07710050650619224932e-11
"""Half of pi in two parts: products of the first, of 33 bits, with numbers below 2^20 are exact."""

_FAR = 0x49800000
"""2^20, as bits: quadrants beyond are counted by `_QUADRANTS`."""

_FAR_EXPONENT = _FAR >> 23


def _quadrants() -> list[float]:
    """`2^(e - 150) / (pi / 2)` modulo 4 for each biased exponent `e` from that of `_FAR` to 254.

    In two parts each: products of the first, a multiple of 2^-27, with 24 bits are exact in float64.
    """
    fraction = 320  # bits behind the point
    pi = 4 * (4 * _arctan_of_inverse(5, fraction) - _arctan_of_inverse(239, fraction))
    inverse = (2 << 2 * fraction) // pi
    pairs: list[float] = []
    for exponent in range(_FAR_EXPONENT - 150, 255 - 150):
        quadrants = (inverse << exponent if exponent >= 0 else inverse >> -exponent) % (4 << fraction)
        high = round(quadrants / (1 << fraction) * 2**27)
        pairs += [high / 2**27, (quadrants - (high << fraction - 27)) / (1 << fraction)]
    return pairs


def _arctan_of_inverse(n: int, fraction: int) -> int:
    """`arctan(1 / n)` as an integer with `fraction` bits behind the point."""
    term = total_ = (1 << fraction) // n
    sign, odd = -1, 3
    while term:
        term //= n * n
        total_ += sign * (term // odd)
        sign, odd = -sign, odd + 2
    return total_


def _by_quadrant(k: Emitter, x: Value) -> tuple[Value, Value]:
    """Range reduction: `q`, `r` with `x = q pi / 2 + r` modulo 2 pi, for any `x`; NaN if not finite."""
    n = lanes_of(x.type)
    magnitude = x.bits(vec(I32, n)) & 0x7FFFFFFF
    is_far = magnitude >= _FAR
    wide = k.select(is_far, k.const(x.type, 0), x).to_float(F64)
    turns = k.generic("rint", wide * (2 / 3.141592653589793))
    rest = k.fma(turns, k.const(wide.type, -_HALF_PI_HIGH), wide)
    rest = k.fma(turns, k.const(wide.type, -_HALF_PI_LOW), rest)
    quadrant, r = k.variable(turns.to_int()), k.variable(k.select(is_far, x - x, rest.trunc(F32)))
    with k.when(k.any(is_far)):
        xs, quadrants, rs = (k.local(4 * n) for _ in range(3))
        for value, at in ((x.bits(magnitude.type), xs), (quadrant.now, quadrants), (r.now, rs)):
            k.store(value, at)
        pairs = k.constants("quadrants", _quadrants())
        with k.loop(0, n) as i:
            bits = k.load(I32, xs + i * 4)
            distance = bits & 0x7FFFFFFF
            with k.when((distance >= _FAR) & (distance < 0x7F800000)):
                pair = pairs + ((distance >> 23) - _FAR_EXPONENT).zext(I64) * 16
                mantissa = ((distance & 0x007FFFFF) | 0x00800000).to_float(F64)
                low = mantissa * k.load(F64, pair + 8)
                count = mantissa * k.load(F64, pair)
                count = count - k.generic("rint", count * 0.25) * 4.0
                whole = k.generic("rint", count + low)
                rest = ((count - whole) + low) * 1.5707963267948966
                is_negative = bits < 0
                k.store(k.select(is_negative, -rest, rest).trunc(F32), rs + i * 4)
                k.store(k.select(is_negative, -whole, whole).to_int(), quadrants + i * 4)
        quadrant.set(k.load(magnitude.type, quadrants))
        r.set(k.load(x.type, rs))
    return quadrant.now, r.now


def sin_cos(k: Emitter, x: Value) -> tuple[Value, Value]:
    """Sine and cosine, with a relative error of 1e-7 even for large angles."""
    quadrant, r = _by_quadrant(k, x)
    square = r * r
    sine = k.fma(polynomial(k, square, _SIN) * square, r, r)
    cosine = k.fma(polynomial(k, square, _COS), square * square, 1.0 - square * 0.5)
    odd = (quadrant & 1).equals(1)
    signs = like(x.type, I32)
    s, c = k.select(odd, cosine, sine), k.select(odd, sine, cosine)
    s = (s.bits(signs) ^ ((quadrant & 2) << 30)).bits(x.type)
    c = (c.bits(signs) ^ (((quadrant + 1) & 2) << 30)).bits(x.type)
    return s, c


def over_one_plus_exp(k: Emitter, x: Value, z: Value) -> Value:
    """`x / (1 + exp(-z))`; `x` must be NaN wherever `z` is."""
    if _is_avx512(k, x):
        most, absolute_least, zero = k.const(vec(F32, 16), 104.0), k.const(I32, 2), k.const(vec(F32, 16), 0.0)
        name = "llvm.x86.avx512.mask.range.ps.512"
        z = _by_vectors(k, lambda z: k.call(name, z.type, z, most, absolute_least, zero, *_all(k)), z)
    else:
        z = _between(k, z, -104.0, 104.0)
    return x / (_exp(k, -z) + 1.0)


def sigmoid(k: Emitter, x: Value) -> Value:
    """`1 / (1 + exp(-x))`."""
    return 1.0 / (exp(k, -x) + 1.0)
