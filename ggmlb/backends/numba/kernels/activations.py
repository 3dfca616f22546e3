"""Activations as bytes: rows of float32 quantised in blocks of 32, once for all products with them.

A row of `k` elements becomes, one part after the other: `k` codes (int8), `k / 32` scales (float32),
`k / 32` sums of the values as quantised (float32), and `k / 16` sums of codes (int32).
"""

from __future__ import annotations

from ggmlb.backends.numba.llvm.emit import F32, I8, I32, Kernel, Value, vec
from ggmlb.backends.numba.llvm.simd import greatest, load_floats, total


def row_nbytes(k: int) -> int:
    """Bytes of a row of `k` elements as quantised."""
    return k + k // 2


def parts(address: Value, k: Value) -> tuple[Value, Value, Value, Value]:
    """Where the parts of a row of `k` elements are: codes, scales, sums of values, sums of codes."""
    scales = address + k
    sums = scales + (k >> 3)
    return address, scales, sums, sums + (k >> 3)


def quantize(k: Kernel, dtype: str) -> None:
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
        inverse = k.select(top > 0.0, 127.0 / top, 0.0)
        scale = top * (1 / 127)
        codes = k.generic("rint", values * inverse.splat(32)).to_int()
        q, d, s, c = parts(out + row * (n + (n >> 1)), n)
        k.store(codes.trunc(I8), q + block * 32)
        halves = [total(k, half) for half in codes.split()]
        k.store(k.const(vec(I32, 2), 0).put(0, halves[0]).put(1, halves[1]), c + block * 8)
        k.store(scale, d + block * 4)
        k.store((halves[0] + halves[1]).to_float(F32) * scale, s + block * 4)
