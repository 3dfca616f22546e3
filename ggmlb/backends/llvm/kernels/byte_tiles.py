"""Products of quantised weights with many rows of quantised activations, by packed tiles of the weight.

What tiles are, and what both kinds share, is in `tiles`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

from llvmlite import ir

from ggmlb.backends.llvm.codegen.emit import F32, I1, I8, I32, I64, Emitter, Level, Value, Variable, vec
from ggmlb.backends.llvm.codegen.simd import Dot, DotSum, add_words
from ggmlb.backends.llvm.kernels import amx, tiles
from ggmlb.backends.llvm.kernels.activations import FLAGS, HIGH, QuantRow, begin, layout_for_tiles, parts
from ggmlb.backends.llvm.kernels.blocks import FORMATS, SCALES, BlockFormat
from ggmlb.backends.llvm.kernels.interleaved import ROWS, Interleaved, fields_of, lanes, prefetches, spread
from ggmlb.backends.llvm.kernels.matvec import ExpertChunk, MatChunk
from ggmlb.backends.llvm.kernels.tiles import DEPTH, Epilogue, store, transposed

PASS = 0.35
"""Cost of one more pass over a tile, in rows of activations."""


def columns(level: Level, dtype: str, n: int) -> int:
    """Return how many of `n` rows of activations are multiplied at once by a packed tile of weights.

    The last pass computes padding rows, which may cost more than another pass.
    """
    if _in_registers(level, dtype):
        return tiles.columns(n, amx.ROWS)
    most = _columns_at_once(level)
    return min(range(most, most // 2, -1), key=lambda c: -(-n // c) * (c + PASS))


def rows_together(level: Level, dtype: str) -> int:
    """Return the least number of rows in a panel of activations; for each the weight is packed again.

    A panel of so few rows may exceed the L1 cache. Vector code reads activations slowly enough for the L2
    cache; AMX reads several times as fast.
    """
    return 2 * amx.ROWS if _in_registers(level, dtype) else 128


def tile_rows(level: Level, dtype: str, of_experts: bool = False) -> int:
    """Return the number of weight rows in a tile: at least two vectors, which share a loaded activation."""
    return ROWS if _in_registers(level, dtype) and not of_experts else max(ROWS, 2 * level.lanes)


def _in_registers(level: Level, dtype: str) -> bool:
    """Whether to use tile registers (AMX); with 16 elements per scale, vectors are faster."""
    return level.tiles and FORMATS[dtype].group == 32


def _columns_at_once(level: Level) -> int:
    """Return the most rows of activations that vectors multiply by a tile at once."""
    return 8 if level.lanes == 16 else 4


def scratch_nbytes(level: Level, dtype: str, k: int, of_experts: bool = False) -> int:
    """Scratch memory that a thread needs for a packed tile of weight rows of `k` elements [bytes]."""
    form, whole = FORMATS[dtype], -(-k // DEPTH) * DEPTH
    floats = whole // form.group * (2 if form.has_min else 1)
    flags = -(-k // 32 // FLAGS) * FLAGS if form.wide else 0
    return tile_rows(level, dtype, of_experts) * (whole + 4 * floats) + flags


def _transpose(k: Emitter, source: Value, stride: int, to: Value, n_rows: int, words: Value) -> None:
    """Transpose `n_rows` rows of 32-bit words, `stride` bytes apart."""
    n = k.level.lanes
    for first in range(0, n_rows, n):
        with k.loop(0, words, n) as w:
            rows = [k.load(vec(I32, n), source + (first + r) * stride + w * 4) for r in range(n)]
            for i, column in enumerate(transposed(rows)):
                k.store(column, to + (w + i) * (n_rows * 4) + first * 4)


class _Strip:
    """Addresses of a packed strip's codes, scales and minimums (if any), and of its end."""

    def __init__(self, form: BlockFormat, size: Value, scratch: Value) -> None:
        whole = (size + (DEPTH - 1)) // DEPTH * DEPTH
        self.codes = scratch
        self.scales = scratch + whole * ROWS
        floats = whole // form.group * (4 * ROWS)
        self.minimums = self.scales + floats
        self.end = self.minimums + floats if form.has_min else self.minimums

    def word(self, k: Emitter, group: Value, size: int, word: Value, first: int) -> Value:
        """Load codes `4 word` to `4 word + 3` of a group, of each row; a group has `size` elements."""
        at = (group * (size // 4) + word) * (4 * ROWS) + first * 4
        return k.load(vec(I8, 4 * k.level.lanes), self.codes + at, 4)

    def scale(self, k: Emitter, group: Value, first: int) -> Value:
        """Load the scales of a group, a lane per row."""
        return k.load(vec(F32, k.level.lanes), self.scales + (group * ROWS + first) * 4)

    def minimum(self, k: Emitter, group: Value, first: int) -> Value:
        """Load the minimums of a group, a lane per row."""
        return k.load(vec(F32, k.level.lanes), self.minimums + (group * ROWS + first) * 4)


class StripView(NamedTuple):
    """A strip (16 interleaved rows) of the weight read in place, with the methods of a packed one."""

    dtype: str
    base: Value

    def word(self, k: Emitter, group: Value, size: int, word: Value, first: int) -> Value:
        """Load codes `4 word` to `4 word + 3` of a group, for a vector of rows from `first` on."""
        return self._block(k, group, first, word * (4 * ROWS))["qs"].bytes(4)[0]

    def scale(self, k: Emitter, group: Value, first: int) -> Value:
        """Load the scales of a group, a lane per row, from row `first` of the strip."""
        return SCALES[self.dtype](self._block(k, group, first)).scale(0)

    def prefetch(self, k: Emitter, block: Value) -> None:
        """Prefetch the strip's cache lines `AHEAD` bytes after block number `block`."""
        for first in range(0, ROWS, lanes(k.level)):
            for call in prefetches(k, self.dtype, self.base, block, k.i64(first)):
                call()

    def _block(self, k: Emitter, block: Value, first: int, ahead: Value | int = 0) -> Interleaved:
        return Interleaved(k, fields_of(self.dtype), self.base + ahead, block, k.i64(first))


def _reads_in_place(level: Level, dtype: str, is_interleaved: bool) -> bool:
    """Whether vectors read codes from the weight's strips: those of whole bytes, without minimums (q8_0)."""
    return is_interleaved and FORMATS[dtype].wide and lanes(level) == level.lanes


def _offset(level: Level, form: BlockFormat, signed: bool = False) -> int | None:
    """Offset of a packed tile's codes; `None` if they are signed."""
    if form.offset is None:
        return 128 if level.dot == "vnni" and not signed else None
    return None if form.offset and (signed or level.dot in ("sdot", "widen")) else form.offset


def _packed(form: BlockFormat, codes: Value, offset: int | None) -> Value:
    """Convert a type's codes to those of a packed tile."""
    if form.offset is None:
        return codes if offset is None else codes ^ -128
    return codes - form.offset if offset is None else codes


def _pack_bytes(
    k: Emitter, form: BlockFormat, packed: _Strip, rows: list[Value], chunk: MatChunk, offset: int | None
) -> None:
    (tile, first, last), size, nb1 = rows, chunk.k, chunk.a_nb1
    local = k.local(ROWS * DEPTH)
    per_turn = DEPTH // form.block
    n_blocks = size // form.block
    with k.loop(0, n_blocks, per_turn) as begin:
        count = k.least(n_blocks - begin, per_turn)
        with k.loop(0, ROWS) as r:
            row = tile + k.least(first + r, last) * nb1
            with k.loop(0, count) as b:
                at = row + (begin + b) * form.nbytes
                for i, run in enumerate(form.codes(k, at)):
                    k.store(_packed(form, run, offset), local + r * DEPTH + b * form.block + 32 * i)
                scales, minimums = form.scales(k, [at])
                groups = form.block // form.group
                to = (begin + b) * (groups * 4 * ROWS) + r * 4
                for g in range(groups):
                    k.store(scales[g], packed.scales + to + g * 4 * ROWS)
                    if minimums is not None:
                        k.store(minimums[g], packed.minimums + to + g * 4 * ROWS)
        to = packed.codes + begin * (form.block * ROWS)
        _transpose(k, local, DEPTH, to, ROWS, k.i64(DEPTH // 4))


def _unpack_strip(
    k: Emitter, dtype: str, packed: _Strip, chunk: MatChunk, strip: Value, offset: int | None
) -> None:
    form, n_blocks = FORMATS[dtype], chunk.k // FORMATS[dtype].block
    base = chunk.a + strip * (chunk.a_nb1 * ROWS)
    row = 4 * ROWS
    with k.loop(0, n_blocks) as block, k.loop(0, ROWS, lanes(k.level)) as first:
        ask = spread(prefetches(k, dtype, base, block, first), 8)
        at = Interleaved(k, fields_of(dtype), base, block, first)
        to = packed.codes + block * (form.block * ROWS) + first * 4
        words = form.codes(k, at)
        for w in range(8):
            for i, run in enumerate(words):
                k.store(_packed(form, run[w], offset), to + row * (8 * i + w))
            next(ask)
        to = block * (form.block // form.group * row) + first * 4
        scales = SCALES[dtype](at)
        for g in range(form.block // form.group):
            k.store(scales.scale(g), packed.scales + to + row * g)
            minimum = scales.minimum(g)
            if minimum is not None:
                k.store(minimum, packed.minimums + to + row * g)


def many(
    k: Emitter, dtype: str, b_dtype: str, is_interleaved: bool, n_columns: int, epilogue: Epilogue
) -> None:
    """Multiply a quantised weight by many rows of activations, `n_columns` at a time, and apply `epilogue`.

    Arguments: `matvec.ARGS`, scratch and its size per thread, the epilogue's. `n_columns`: from `columns`.
    """
    _tiles(k, dtype, is_interleaved, n_columns, MatChunk(k, tile_rows(k.level, dtype)), epilogue)


def many_experts(k: Emitter, dtype: str, b_dtype: str, is_interleaved: bool) -> None:
    """Multiply experts' quantised matrices by activations of the tokens that selected them (mul_mat_id)."""
    chunk = ExpertChunk(k, tile_rows(k.level, dtype, of_experts=True))
    _tiles(k, dtype, is_interleaved, _columns_at_once(k.level), chunk, Epilogue())


def _tiles(
    k: Emitter, dtype: str, is_interleaved: bool, n_columns: int, chunk: MatChunk, epilogue: Epilogue
) -> None:
    form = FORMATS[dtype]
    scratch, stride = k.ints(2)
    finish = epilogue.read(k)
    on_tiles = _in_registers(k.level, dtype) and chunk.step is not None
    in_place = not on_tiles and _reads_in_place(k.level, dtype, is_interleaved)
    n_strips = tile_rows(k.level, dtype, of_experts=chunk.step is None) // ROWS
    packed = [_Strip(form, chunk.k, scratch + k.thread * stride)]
    for _ in range(1, n_strips):
        packed.append(_Strip(form, chunk.k, packed[-1].end))
    offset = None if in_place else _offset(k.level, form, signed=on_tiles)
    registers = amx.tiles(k, n_columns, form.group) if on_tiles else nullcontext()
    with registers, k.loop(chunk.first, chunk.last) as tile:
        first = tile * (n_strips * ROWS)
        strips: list[_Strip | StripView] = []
        for i, to in enumerate(packed):
            strip = k.least(tile * n_strips + i, (chunk.m - 1) // ROWS)
            if in_place:
                strips.append(StripView(dtype, chunk.a + strip * (chunk.a_nb1 * ROWS)))
                continue
            strips.append(to)
            if is_interleaved:
                _unpack_strip(k, dtype, to, chunk, strip, offset)
            else:
                _pack_bytes(k, form, to, [chunk.a, first + i * ROWS, chunk.m - 1], chunk, offset)
        with k.loop(0, chunk.n, n_columns) as start:
            column = start
            if on_tiles:
                column = k.least(start, chunk.n - n_columns)  # the last pass may repeat some
                sums = _multiply_tiles(k, dtype, packed[0], chunk, column, n_columns)
            else:
                # Rows beyond the last one read the last.
                rows = [chunk.column(k.least(column + c, chunk.n - 1)) for c in range(n_columns)]
                sums = _multiply_bytes(k, dtype, strips, rows, chunk.k, offset, start.equals(0))
            store(k, sums, chunk, first, (column, start), finish)


def _multiply_tiles(
    k: Emitter, dtype: str, packed: _Strip, chunk: MatChunk, column: Value, n_columns: int
) -> list[list[Value]]:
    """Return a tile's sums, by AMX, for `n_columns` rows of activations from `column` on."""
    form, step, n = FORMATS[dtype], chunk.step, k.level.lanes
    assert step is not None
    floats, size, n_blocks = vec(F32, n), amx.ROW_NBYTES * n_columns, chunk.k >> 5
    all_parts = [parts(chunk.column(column + c), chunk.k, layout_for_tiles(dtype)) for c in range(n_columns)]
    x = all_parts[0]
    sums = [k.variable(k.const(floats, 0)) for _ in range(n_columns)]
    room = [k.local(2 * size) for _ in range(1 + form.wide)]
    if form.wide:
        _any_flags(k, all_parts, chunk.k, packed.end)

    def each(block: Value) -> Iterator[tuple[Value, Value, float]]:
        """The AMX products of a block: codes of activations, address of the sums, and their factor."""
        to = (block & 1) * size
        yield x.codes, room[0] + to, 1.0
        if x.high is not None:
            with k.when(k.load(I8, packed.end + block).zext(I32) > 0):
                yield x.high, room[1] + to, float(HIGH)

    def multiply(block: Value) -> None:
        for of, to, _ in each(block):
            amx.product(k, of + block * 32, step, packed.codes + block * (32 * ROWS), form.has_min, to)

    multiply(k.i64(0))
    with k.loop(0, n_blocks) as block:
        with k.when(block + 1 < n_blocks):
            multiply(block + 1)  # one block ahead, as a load soon after a tile store stalls
        for _, found, times in each(block):
            scale = k.load(floats, packed.scales + block * (4 * ROWS)) * times
            for c, slot in enumerate(sums):
                factor = k.load(F32, x.scales + step * c + block * 4).splat(n)
                value = k.load(vec(I32, n), found + amx.ROW_NBYTES * c, 64).to_float()
                slot.set(k.fma(value, scale * factor, slot.now))
        if form.has_min:
            minimum = k.load(floats, packed.minimums + block * (4 * ROWS))
            for c, slot in enumerate(sums):
                total = k.load(F32, x.sums + step * c + block * 4)
                slot.set(k.fma(minimum, total.splat(n), slot.now))
    return [[slot.now for slot in sums]]


def _multiply_bytes(
    k: Emitter,
    dtype: str,
    strips: Sequence[_Strip | StripView],
    rows: list[Value],
    size: Value,
    offset: int | None,
    is_first: Value,
) -> list[list[Value]]:
    """Return a tile's sums, for each vector of its rows and each row of activations.

    Args:
        k: The emitted kernel.
        dtype: The weight's type.
        strips: The strips of the tile.
        rows: Addresses of rows of activations.
        size: Elements of a row.
        offset: Offset of the strips' codes.
        is_first: Whether this is the first pass over the tile, before it is in the cache.
    """
    form, n = FORMATS[dtype], k.level.lanes
    vectors = [(strip, first) for strip in strips for first in range(0, ROWS, n)]
    zero, dot = k.const(vec(F32, n), 0), Dot(k, n)
    sums = [[k.variable(zero) for _ in rows] for _ in vectors]
    columns = [parts(row, size, layout_for_tiles(dtype)) for row in rows]
    ahead = [strip.prefetch for strip in strips if isinstance(strip, StripView)]

    def add(
        number: Value,
        codes: list[Value],
        groups: list[list[DotSum]],
        factors: list[Value],
        slots: list[list[Variable]],
    ) -> None:
        """Add a group's products with the activations' codes to the sums."""

        def read(word: Value) -> tuple[list[Value], list[Value]]:
            weights = [strip.word(k, number, form.group, word, first) for strip, first in vectors]
            at = (number * (form.group // 4) + word) * 4
            return weights, [k.load(I32, x + at).splat(n).bits(vec(I8, 4 * n)) for x in codes]

        add_words(groups, form.group // 4, read)
        for (strip, first), line, to in zip(vectors, groups, slots, strict=True):
            scale = strip.scale(k, number, first)
            for group, factor, slot in zip(line, factors, to, strict=True):
                slot.set(k.fma(group.total().to_float(), scale * factor, slot.now))

    for c, x in enumerate(columns):
        if x.high is None:
            continue
        with _blocks_with_high_parts(k, x, size) as block:
            groups = [[dot.group(offset, form.most)] for _ in vectors]
            factor = (k.load(F32, x.scales + block * 4) * float(HIGH)).splat(n)
            add(block, [x.high], groups, [factor], [[line[c]] for line in sums])
    # A loop over groups: unrolled, LLVM would keep one group's sums in registers during the next.
    with k.loop(0, size // form.group) as number:
        if ahead:
            with k.when(is_first):
                for prefetch in ahead:
                    prefetch(k, number)
        groups = [[begin(dot, form.group, offset, form.most, number, x) for x in columns] for _ in vectors]
        factors = [k.load(F32, x.scales + number // (32 // form.group) * 4).splat(n) for x in columns]
        add(number, [x.codes for x in columns], groups, factors, sums)
        if form.has_min:
            totals = [k.load(F32, x.sums + number * 4).splat(n) for x in columns]
            for (strip, first), line in zip(vectors, sums, strict=True):
                assert isinstance(strip, _Strip)  # types that are read in place have no minimums
                minimum = strip.minimum(k, number, first)
                for slot, total in zip(line, totals, strict=True):
                    slot.set(k.fma(minimum, total, slot.now))
    return [[slot.now for slot in row] for row in sums]


@contextmanager
def _blocks_with_high_parts(k: Emitter, x: QuantRow, size: Value) -> Iterator[Value]:
    """Emit the block as a loop over the blocks of a row that have high parts; yields their numbers."""
    assert x.flags is not None
    n_blocks = size >> 5
    with k.loop(0, n_blocks, FLAGS) as first:
        flags = (k.load(vec(I8, FLAGS), x.flags + first) > 0).bits(ir.IntType(FLAGS)).zext(I64)
        inside = (k.i64(1) << k.least(n_blocks - first, FLAGS)) - 1
        rest = k.variable(flags & inside)
        with k.while_() as (_, end):
            turn = k.build.append_basic_block("turn")
            k.build.cbranch((rest.now > 0).raw, turn, end)
            k.build.position_at_end(turn)
            yield first + k.call("llvm.cttz.i64", I64, rest.now, k.const(I1, 1))
            rest.set(rest.now & (rest.now - 1))


def _any_flags(k: Emitter, columns: list[QuantRow], size: Value, to: Value) -> None:
    """Write a flag per block: whether any row of activations has high parts there."""
    flags = vec(I8, FLAGS)
    with k.loop(0, size >> 5, FLAGS) as i:
        any_ = k.const(flags, 0)
        for x in columns:
            if x.flags is not None:
                any_ = any_ | k.load(flags, x.flags + i)
        k.store(any_, to + i)
