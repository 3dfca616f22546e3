"""Rotary position embedding: the angles of a token are computed once for all its heads."""

from __future__ import annotations

from collections.abc import Sequence

from ggmlb.backends.llvm.codegen.emit import F32, I32, I64, Emitter, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, load_floats, sin_cos, store_floats
from ggmlb.backends.llvm.kernels.convert import convert, row_number

MOST_PAIRS = 1024


def rope(
    k: Emitter,
    dtypes: Sequence[str],
    width: int,
    interleaved: bool,
    has_factors: bool,
    channels: bool,
    index: str | None = None,
) -> None:
    """Rotate pairs of elements (rope; M-RoPE if `channels`); `index`: type of a fused set_rows' row indices.

    Arguments: `magnitude, sine's sign, y, nb1..3, x, nb1..3, ne0, heads, tokens, batches, positions, angles,
    channels, factors, pairs, start`; with an index `ids, nb0, nb1, ne1, limit, errors, step` too.

    Args:
        k: The emitted kernel.
        dtypes: Types of `y` and `x`.
        width: Pairs per vector; divides their number.
        interleaved: Whether the elements of a pair are neighbours; else they are `pairs` apart (NeoX).
        has_factors: Whether angles are divided by frequency factors.
        channels: Whether each pair uses one of several positions (M-RoPE).
        index: Type of the row indices of a fused `set_rows`; `None`: a token is written to its own row.
    """
    out, src = dtypes
    magnitude, direction = k.float_arg().splat(width), k.float_arg().splat(width)
    y, y1, y2, y3, x, x1, x2, x3, n0, heads, tokens, batches = k.ints(12)
    positions, angles, channel, factors, pairs, start = k.ints(6)
    ids, nb0, nb1, ne1, limit, errors, step = k.ints(7) if index else [k.i64(0)] * 7
    in_blocks = out not in SIZES
    rotated, form = (k.local(8 * MOST_PAIRS), "f32") if in_blocks else (None, out)
    cosines, sines, own = (k.local(4 * MOST_PAIRS) for _ in range(3))
    with k.units(tokens * batches) as i:
        token, batch = i % tokens, i // tokens
        if channels:
            with k.loop(0, pairs) as p:
                of = k.load(I64, channel + p * 8)
                place = k.load(I32, positions + (of * tokens + token) * 4)
                k.store(place.to_float(), own + p * 4)
        place = k.load(I32, positions + token * 4).to_float().splat(width)
        with k.loop(0, pairs, width) as p:
            theta = load_floats(k, "f32", own + p * 4, width) if channels else place
            theta = theta * load_floats(k, "f32", angles + p * 4, width)
            if has_factors:
                theta = theta / load_floats(k, "f32", factors + p * 4, width)
            s, c = sin_cos(k, theta)
            k.store(c * magnitude, cosines + p * 4)
            k.store(s * magnitude * direction, sines + p * 4)
        target, is_right = token, None
        if index is not None:
            at = ids + token * nb0 + batch % ne1 * nb1
            target, is_right = row_number(k, at, index, limit, (errors, step))
        with k.loop(0, heads if is_right is None else k.select(is_right, heads, 0)) as head:
            result = y + head * y1 + target * y2 + batch * y3
            to = result if rotated is None else rotated
            row = x + head * x1 + token * x2 + batch * x3
            with k.loop(0, pairs, width) as p:
                c, s = (k.load(vec(F32, width), t + p * 4) for t in (cosines, sines))
                _rotate(k, (form, src), (to, row), (c, s), p, pairs, start, interleaved)
            convert(k, form, src, to, row, k.i64(0), start)
            convert(k, form, src, to, row, start + pairs * 2, n0)
            if rotated is not None:
                convert(k, out, "f32", result, rotated, k.i64(0), n0)


def _rotate(
    k: Emitter,
    dtypes: Sequence[str],
    at: tuple[Value, Value],
    rotation: tuple[Value, Value],
    p: Value,
    pairs: Value,
    start: Value,
    interleaved: bool,
) -> None:
    (out, src), (to, row), (c, s) = dtypes, at, rotation
    n = c.type.count
    if interleaved:
        both = load_floats(k, src, row + (start + p * 2) * SIZES[src], 2 * n)
        a, b = both.shuffle(range(0, 2 * n, 2)), both.shuffle(range(1, 2 * n, 2))
    else:
        a = load_floats(k, src, row + (start + p) * SIZES[src], n)
        b = load_floats(k, src, row + (start + pairs + p) * SIZES[src], n)
    first, second = a * c - b * s, a * s + b * c
    if interleaved:
        order = [i // 2 + n * (i % 2) for i in range(2 * n)]
        store_floats(k, out, first.shuffle(order, second), to + (start + p * 2) * SIZES[out])
    else:
        store_floats(k, out, first, to + (start + p) * SIZES[out])
        store_floats(k, out, second, to + (start + pairs + p) * SIZES[out])
