"""Gemm: products of dense matrices in the terms of cuBLAS. No device is needed.

ggml's matrices are row-major and cuBLAS's column-major, so that cuBLAS reads each one transposed: `a`, ne
`[k, m]`, is a k x m matrix of columns; `b`, ne `[k, n]`, is k x n; and `d`, ne `[m, n]`, is m x n. Hence
d = a^T b, without a copy: `transa` is T, `transb` is N, and the leading dimensions are the rows' strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggmlb.backends.common.strided import Mem

MAX_CALLS = 2
"""Most separate calls for a batch without equal strides; beyond, one call with lists of pointers."""


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product of matrices, or a batch of them; accumulated in f32.

    Attributes:
        a: Rows of `k` elements: the weights.
        b: As `a`, of the same type.
        d: Rows of `m` elements, f32.
        m: Rows of `a`.
        n: Rows of `b`.
        k: Elements of a row.
        ld: Strides of rows of a, b, d [elements].
        stride: Strides of matrices of a, b, d [elements], if there are several.
        count: Number of matrices.
        places: Offsets of the matrices of a, b and d [bytes], for batches without equal strides; else empty.
    """

    a: Mem
    b: Mem
    d: Mem
    m: int
    n: int
    k: int
    ld: tuple[int, int, int]
    stride: tuple[int, int, int] = (0, 0, 0)
    count: int = 1
    places: tuple[tuple[int, int, int], ...] = ()

    @property
    def mems(self) -> tuple[Mem, ...]:
        """Its operands, then its result."""
        return self.a, self.b, self.d


def cannot_describe(*mems: Mem) -> str | None:
    """Return why cuBLAS cannot read the matrices in place (strides in whole elements), or `None`."""
    for m in mems:
        size = m.dtype.type_size
        if m.nb[0] != size and m.ne[0] > 1:
            return f"elements of a row are {m.nb[0]} bytes apart"
        if m.ne[1] > 1 and (m.nb[1] < m.ne[0] * size or m.nb[1] % size):
            return f"rows are {m.nb[1]} bytes apart"
        if (m.ne[2] > 1 and m.nb[2] % size) or (m.ne[3] > 1 and m.nb[3] % size):
            return f"matrices are {m.nb[2]} and {m.nb[3]} bytes apart"
    return None


def gemms(a: Mem, b: Mem, d: Mem) -> list[Gemm]:
    """Return the calls that compute ggml's mul_mat: matrix (i2, i3) of b times (i2/r2, i3/r3) of a.

    Args:
        a: ne `[k, m, ne2, ne3]`.
        b: ne `[k, n, r2*ne2, r3*ne3]`, of the same type.
        d: ne `[m, n, r2*ne2, r3*ne3]`, f32.
    """
    b, d = _stacked(a, b, d)
    (k, m, a2, _), (_, n, b2, b3) = a.ne, b.ne
    r2, r3 = b2 // a2, b3 // a.ne[3]
    size, out = a.dtype.type_size, d.dtype.type_size
    ld = _leading(a, k), _leading(b, k), _leading(d, m)

    def strided(starts: tuple[int, int, int], strides: tuple[int, int, int], count: int) -> Gemm:
        x, y, z = (t.window(t.ne, t.nb, start) for t, start in zip((a, b, d), starts, strict=True))
        s = strides[0] // size, strides[1] // size, strides[2] // out
        return Gemm(x, y, z, m, n, k, ld, s if count > 1 else (0, 0, 0), count)

    if r2 == r3 == 1 and all(t.ne[2] == 1 or t.ne[3] == 1 or t.nb[3] == b2 * t.nb[2] for t in (a, b, d)):
        i = 3 if b2 == 1 else 2
        return [strided((0, 0, 0), (a.nb[i], b.nb[i], d.nb[i]), b2 * b3)]
    if r2 * b3 <= MAX_CALLS:
        return [
            strided(
                (i3 // r3 * a.nb[3], i3 * b.nb[3] + j * b.nb[2], i3 * d.nb[3] + j * d.nb[2]),
                (a.nb[2], r2 * b.nb[2], r2 * d.nb[2]),
                a2,
            )
            for i3 in range(b3)
            for j in range(r2)
        ]
    places = tuple(
        (i2 // r2 * a.nb[2] + i3 // r3 * a.nb[3], i2 * b.nb[2] + i3 * b.nb[3], i2 * d.nb[2] + i3 * d.nb[3])
        for i3 in range(b3)
        for i2 in range(b2)
    )
    return [Gemm(a, b, d, m, n, k, ld, count=len(places), places=places)]


def _stacked(a: Mem, b: Mem, d: Mem) -> tuple[Mem, Mem]:
    """Merge the matrices of b and d that are multiplied by one matrix of a, if their rows are contiguous."""
    r2, r3 = b.ne[2] // a.ne[2], b.ne[3] // a.ne[3]
    if r2 > 1 and all(t.nb[2] == t.ne[1] * t.nb[1] for t in (b, d)):
        b, d = (
            t.window((t.ne[0], t.ne[1] * r2, t.ne[2] // r2, t.ne[3]), (*t.nb[:2], r2 * t.nb[2], t.nb[3]))
            for t in (b, d)
        )
    if r3 > 1 and b.ne[2] == 1 and all(t.nb[3] == t.ne[1] * t.nb[1] for t in (b, d)):
        b, d = (
            t.window((t.ne[0], t.ne[1] * r3, 1, t.ne[3] // r3), (*t.nb[:3], r3 * t.nb[3])) for t in (b, d)
        )
    return b, d


def _leading(t: Mem, n: int) -> int:
    """Return the leading dimension; a single row's stride is ignored."""
    return max(n, t.nb[1] // t.dtype.type_size) if t.ne[1] > 1 else n
