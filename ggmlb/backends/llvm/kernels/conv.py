"""Convolutions and pools of planes of floats; the nodes behind a convolution are applied to its sums.

A convolution is a product of its kernel with windows of the data (implicit GEMM): a tile of windows, of some
neighbouring pixels of the result, is packed so that lanes are pixels, and stays in the cache for all channels
of the result.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ggmlb.backends.llvm.codegen.emit import F32, I32, Emitter, Level, Value, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, load_float, load_floats
from ggmlb.backends.llvm.kernels import float_tiles
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS
from ggmlb.backends.llvm.kernels.matvec import MatChunk

if TYPE_CHECKING:
    from ggmlb.backends.llvm.kernels.tiles import Finish

MOST_STRIDE = 4
"""Largest stride along the width: so many vectors are read for one of the result."""

LOWEST = float(np.finfo(np.float32).min)
"""The smallest result of max pooling, and the value of its padding."""

PLANES = ("x", "x_nb1", "x_nb2", "x_nb3", "w", "h", "y", "y_nb2", "y_nb3", "ow", "oh", "c", "p0", "p1", "s1")
"""Arguments of all kernels here: address, byte strides, width and height of the data; address and strides of
the result, of contiguous planes, and its width, height and channels; padding; stride along the height."""


class TailStep(NamedTuple):
    """A node behind a convolution: a function of one tensor, or a sum or product with another.

    Attributes:
        function: Name in `elementwise.FUNCTIONS`.
        n_params: Number of its parameters.
        operand: The other tensor: `pixels`, of the result's shape; `channels`, one element each; or `None`.
    """

    function: str
    n_params: int = 0
    operand: str | None = None


Tail = tuple[TailStep, ...]


def _read_tail(tail: Tail, image: Value, k: Emitter) -> Finish | None:
    """Read the arguments of the nodes behind a convolution; return a function that applies them.

    Arguments of each: parameters; address, byte strides of channels and images of the other tensor.
    """
    found = []
    for step in tail:
        params = [k.float_arg() for _ in range(step.n_params)]
        at, nb2, nb3 = k.ints(3) if step.operand else [k.i64(0)] * 3
        found.append((step, params, at + image * nb3, nb2))

    def finish(value: Value, channel: Value, pixel: Value, mask: Value | None) -> Value:
        n = value.type.count
        for step, params, start, nb2 in found:
            other, at = [], start + channel * nb2
            if step.operand == "channels":
                other.append(k.load(F32, at).splat(n))
            elif step.operand:
                other.append(load_floats(k, "f32", at + pixel * 4, n, mask))
            value = FUNCTIONS[step.function](k, value, *other, *[p.splat(n) for p in params])
        return value

    return finish if tail else None


def _inside(p: dict[str, Value], row: Value) -> Value:
    return (row >= 0) & (row < p["h"])


def _strided(
    k: Emitter, dtype: str, p: dict[str, Value], plane: Value, row: Value, first: Value, step: int, n: int,
    padding: float = 0.0
) -> Value:  # fmt: skip
    """Read elements `first`, `first + step`, .. of a row of a plane, which is surrounded by `padding`."""
    places, width = k.table(vec(I32, n * step), range(n * step)), k.select(_inside(p, row), p["w"], 0)
    low, high = ((-end).trunc(I32).splat(n * step) for end in (first, first - width))
    inside = (places >= low) & (places < high)
    at = plane + row * p["x_nb1"] + first * SIZES[dtype]
    found = load_floats(k, dtype, at, n * step, inside)
    if padding:
        found = k.select(inside, found, padding)
    return found if step == 1 else found.shuffle(range(0, n * step, step))


def _plane(p: dict[str, Value], number: Value) -> tuple[Value, Value, Value, Value]:
    """Return channel and image of a plane by its number, and its addresses in the data and in the result."""
    channel, image = number % p["c"], number // p["c"]
    x = p["x"] + image * p["x_nb3"] + channel * p["x_nb2"]
    return channel, image, x, p["y"] + image * p["y_nb3"] + channel * p["y_nb2"]


# -- products --------------------------------------------------------------------------------------


class _ConvChunk(MatChunk):
    """A chunk of a convolution: an image, a range of its tiles of pixels, and a range of channels.

    The rows of the weight are the windows of pixels, those of activations the kernels of channels.
    """

    def __init__(self, k: Emitter, n_columns: int, n_pixels: int) -> None:
        p = self.args = k.named(*PLANES, "a", "a_nb3", "kw", "kh", "ic", "d0", "d1", "bands", "parts")
        part, rest = k.chunk % p["parts"], k.chunk // p["parts"]
        band, self.image = rest % p["bands"], rest // p["bands"]
        self.x = p["x"] + self.image * p["x_nb3"]
        self.y = p["y"] + self.image * p["y_nb3"]
        self.k, self.m = p["kw"] * p["kh"] * p["ic"], p["ow"] * p["oh"]
        tiles, groups = (self.m + (n_pixels - 1)) // n_pixels, (p["c"] + (n_columns - 1)) // n_columns
        self.first, self.last = tiles * part // p["parts"], tiles * (part + 1) // p["parts"]
        self.start = groups * band // p["bands"] * n_columns
        self.n = k.least(groups * (band + 1) // p["bands"] * n_columns, p["c"])

    def column(self, c: Value | int) -> Value:
        """Address of the kernel of channel `c`."""
        return self.args["a"] + self.args["a_nb3"] * c

    def result(self, c: Value | int) -> Value:
        """Address of channel `c` of the result."""
        return self.y + self.args["y_nb2"] * c


def conv_2d(k: Emitter, dtype: str, a_dtype: str, step: int, n_columns: int, tail: Tail) -> None:
    """Convolve planes, `n_columns` channels of the result at a time, with a stride `step` along the width.

    Arguments: `PLANES`; address of the kernel, and the stride of its channels; its width, height and
    channels; dilations; chunks along channels and pixels of an image; scratch and its size per thread; those
    of `tail`.
    """
    chunk = _ConvChunk(k, n_columns, float_tiles.tile_rows(k.level))
    pack = partial(_pack, k, dtype, chunk, step)
    read = partial(_read_tail, tail, chunk.image)
    float_tiles.multiply(k, (dtype, a_dtype), n_columns, chunk, read, pack, float_tiles.STRIP_DEPTH)


def _pack(
    k: Emitter, dtype: str, chunk: _ConvChunk, step: int, first: Value, begin: Value, count: Value, to: Value
) -> list[Value]:
    """Pack `count` elements of the windows of a tile's pixels, from pixel `first` and element `begin` on."""
    p, n, n_pixels = chunk.args, k.level.lanes, float_tiles.tile_rows(k.level)
    taps, lane = p["kw"] * p["kh"], k.variable(k.i64(0))
    limit = k.least(chunk.m - first, n_pixels)
    with k.while_() as (again, end):  # the tile's pixels of one row of the result
        start, pixel = lane.now, first + lane.now
        row, column = pixel // p["ow"] * p["s1"] - p["p1"], pixel % p["ow"]
        left, length = column * step - p["p0"], k.least(p["ow"] - column, k.i64(n_pixels) - start)
        plane = k.variable(chunk.x + begin // taps * p["x_nb2"])
        ky, kx = k.variable(begin % taps // p["kw"]), k.variable(begin % taps % p["kw"])
        with k.loop(0, count) as i:
            y, x = row + ky.now * p["d1"], left + kx.now * p["d0"]
            at = to + (i * n_pixels + start) * 4
            with k.loop(0, length, n) as v:
                values = _strided(k, dtype, p, plane.now, y, x + v * step, step, n)
                left_over = k.i64(n_pixels) - start - v
                with k.build.if_else((left_over >= n).raw) as (whole, partly):
                    with whole:  # lanes beyond the row are overwritten by the next one
                        k.store(values, at + v * 4)
                    with partly:
                        k.store_masked(values, at + v * 4, k.first_lanes(n, left_over))
            kx.set(kx.now + 1)
            with k.when(kx.now.equals(p["kw"])):
                kx.set(k.i64(0))
                ky.set(ky.now + 1)
            with k.when(ky.now.equals(p["kh"])):
                ky.set(k.i64(0))
                plane.set(plane.now + p["x_nb2"])
        lane.set(start + length)
        k.build.cbranch((lane.now < limit).raw, again, end)
    return [to, to + 4 * n]


def im2col(k: Emitter, dtype: str, step: int) -> None:
    """Write the window of each pixel as a row, for kernels with a dilation `step` along the width.

    Arguments: `PLANES`, the result being f32; width, height and channels of the kernel; dilation along the
    height; stride along the width; number of pixels of all images.
    """
    p, n = k.named(*PLANES, "kw", "kh", "ic", "d1", "s0", "pixels"), k.level.lanes
    with k.units(p["pixels"]) as pixel:
        column, rest = pixel % p["ow"], pixel // p["ow"]
        row, image = rest % p["oh"] * p["s1"] - p["p1"], rest // p["oh"]
        left, to = column * p["s0"] - p["p0"], p["y"] + pixel * p["y_nb2"]
        with k.loop(0, p["ic"]) as c, k.loop(0, p["kh"]) as ky:
            y, plane = row + ky * p["d1"], p["x"] + image * p["x_nb3"] + c * p["x_nb2"]
            at = to + (c * p["kh"] + ky) * p["kw"] * 4
            with k.loop(0, p["kw"], n) as kx:
                values = _strided(k, dtype, p, plane, y, left + kx * step, step, n)
                k.store_masked(values, at + kx * 4, k.first_lanes(n, p["kw"] - kx))


def overlap_add(k: Emitter, step: int) -> None:
    """Write the sums of windows that overlap (a transposed convolution), `step` apart: 1, 2 or 4.

    Arguments: `PLANES`, whose data are the windows: for each channel, and each element of a window, a plane
    of w x h places; width and height of the window; number of planes.
    """
    p, n = k.named(*PLANES, "kw", "kh", "planes"), k.level.lanes
    with k.units(p["planes"] * p["oh"]) as unit:
        row, (_, _, x, start) = unit % p["oh"], _plane(p, unit // p["oh"])
        y = start + row * p["ow"] * 4
        with k.loop(0, p["ow"], step * n) as column:
            sums = [k.variable(k.const(vec(F32, n), 0)) for _ in range(step)]
            with k.loop(row % step, p["kh"], step) as ky:
                at = (row - ky) >> step.bit_length() - 1  # negative above the first row
                for r, found in enumerate(sums):
                    with k.loop(r, p["kw"], step) as kx:
                        plane = x + (ky * p["kw"] + kx) * (p["h"] * p["x_nb1"])
                        first = column // step - kx // step
                        found.set(found.now + _strided(k, "f32", p, plane, at, first, 1, n))
            values = [found.now for found in sums]
            while len(values) > 1:  # interleaved: those of the first half are the even ones
                half = len(values) // 2
                lanes = values[0].type.count
                order = [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]
                values = [a.shuffle(order, b) for a, b in zip(values[:half], values[half:], strict=True)]
            k.store_masked(values[0], y + column * 4, k.first_lanes(step * n, p["ow"] - column))


# -- of each channel -------------------------------------------------------------------------------


def width_lanes(level: Level, width: int) -> int:
    """Return the lanes of the vectors along a row: half as many if that leaves fewer of them unused."""
    half = level.lanes // 2
    return half if half >= 4 and -(-width // half) % 2 else level.lanes


def conv_2d_dw(
    k: Emitter, types: tuple[str, str], lanes: int, n_rows: int, taps: tuple[int, int],
    steps: tuple[int, int, int, int], tail: Tail
) -> None:  # fmt: skip
    """Convolve each channel with its own kernel, of `taps` elements, `n_rows` rows of the result at a time.

    Arguments: `PLANES`; address and channel stride of the kernels; number of planes; those of `tail`.

    Args:
        k: The emitted kernel.
        types: Types of the data and of the kernels.
        lanes: Lanes of a vector along the width.
        n_rows: Rows of the result that share values in registers.
        taps: Width and height of the kernels.
        steps: Strides and dilations.
        tail: The nodes behind the convolution.
    """
    p = k.named(*PLANES, "a", "a_nb3", "planes")
    (dtype, a_dtype), (kw, kh), (s0, s1, d0, d1) = types, taps, steps
    blocks = (p["oh"] + (n_rows - 1)) // n_rows
    with k.units(p["planes"] * blocks) as unit:
        first, (channel, image, x, y) = unit % blocks * n_rows, _plane(p, unit // blocks)
        finish = _read_tail(tail, image, k)
        a, size = p["a"] + channel * p["a_nb3"], SIZES[a_dtype]
        weights = [load_float(k, a_dtype, a + i * size).splat(lanes) for i in range(kw * kh)]
        with k.loop(0, p["ow"], lanes) as column:
            sums = [k.variable(k.const(vec(F32, lanes), 0)) for _ in range(n_rows)]
            for below in sorted({r * s1 + ky * d1 for r in range(n_rows) for ky in range(kh)}):
                users = [(r, ky) for r in range(n_rows) for ky in range(kh) if r * s1 + ky * d1 == below]
                row = first * s1 - p["p1"] + below
                with k.when(_inside(p, row)):
                    for kx in range(kw):
                        at = column * s0 - p["p0"] + kx * d0
                        value = _strided(k, dtype, p, x, row, at, s0, lanes)
                        for r, ky in users:
                            sums[r].set(k.fma(value, weights[ky * kw + kx], sums[r].now))
            mask = k.first_lanes(lanes, p["ow"] - column)
            for r, found in enumerate(sums):
                with k.when(first + r < p["oh"]):
                    pixel = (first + r) * p["ow"] + column
                    value = found.now if finish is None else finish(found.now, channel, pixel, mask)
                    k.store_masked(value, y + pixel * 4, mask)


def pool_2d(k: Emitter, dtype: str, lanes: int, step: int, is_max: bool) -> None:
    """Write the largest or mean element of windows of planes, with a stride `step` along the width.

    Arguments: `PLANES`; width and height of the window; number of planes.
    """
    p, padding = k.named(*PLANES, "kw", "kh", "planes"), LOWEST if is_max else 0.0
    divisor = (p["kw"] * p["kh"]).to_float().splat(lanes)
    with k.units(p["planes"] * p["oh"]) as unit:
        row, (_, _, x, start) = unit % p["oh"], _plane(p, unit // p["oh"])
        y = start + row * p["ow"] * 4
        with k.loop(0, p["ow"], lanes) as column:
            found = k.variable(k.const(vec(F32, lanes), padding))
            with k.loop(0, p["kh"]) as ky, k.loop(0, p["kw"]) as kx:
                at, first = row * p["s1"] - p["p1"] + ky, column * step - p["p0"] + kx
                value = _strided(k, dtype, p, x, at, first, step, lanes, padding)
                found.set(k.maximum(value, found.now) if is_max else found.now + value)
            result = found.now if is_max else found.now / divisor
            k.store_masked(result, y + column * 4, k.first_lanes(lanes, p["ow"] - column))
