"""Recurrent layers: state space models, the gated delta rule, RWKV-7.

A result has the outputs of all tokens, then the last states, the newest first. A thread computes some lines
of a state for all tokens in turn: a line is contiguous, and independent of the others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ggmlb.backends.llvm.codegen.emit import F32, Emitter, Level, Value, Variable, vec
from ggmlb.backends.llvm.codegen.simd import SIZES, exp, folds, load_float, load_floats, store_floats, total
from ggmlb.backends.llvm.kernels.convert import row_number
from ggmlb.backends.llvm.kernels.row_loop import each_vector
from ggmlb.backends.llvm.kernels.tiles import transposed

BLOCK = 32
"""Lines of a head's state that a thread computes together, so that they stay in its cache."""

MOST_VECTORS, MOST_LINES = 16, 4
"""Largest number of vectors that are kept in registers, and of lines that they are of."""


def known_width(level: Level, width: int) -> int:
    """Return the length of a line as a parameter of kernels; 0 if it is only known when they run."""
    return width if width % level.lanes == 0 and 0 < 2 * width <= MOST_VECTORS * level.lanes else 0


def lines_together(level: Level, known: int) -> int:
    """Return how many lines of a known length are computed together, so that their latencies overlap."""
    return min(MOST_LINES, MOST_VECTORS * level.lanes // known) // 2 * 2 if known else 1


def ssm_conv(k: Emitter, out: str, src: str, kernel: str) -> None:
    """The causal convolution of each channel; `out`, `src` and `kernel` are the types of `y`, `x` and `c`.

    Arguments: `y, nb1, nb2, x, nb1, nb2, c, nb1, taps, channels, tokens, sequences`.
    """
    y, y_nb1, y_nb2, x, x_nb1, x_nb2, c, c_nb1, n_taps, n_channels, n_tokens, n_seqs = k.ints(12)
    n = k.level.lanes
    bands = (n_channels + (n - 1)) // n
    with k.units(bands * n_seqs) as unit:
        first, sequence = unit % bands * n, unit // bands
        channels = [k.least(first + i, n_channels - 1) for i in range(n)]
        inside = k.first_lanes(n, n_channels - first)
        with k.loop(0, n_tokens, n) as token:
            mask = k.first_lanes(n, n_tokens - token)
            sums = [_sum(k) for _ in range(n)]
            with k.loop(0, n_taps) as tap:
                for channel, slot in zip(channels, sums, strict=True):
                    at = x + sequence * x_nb2 + channel * x_nb1 + (token + tap) * SIZES[src]
                    factor = load_float(k, kernel, c + channel * c_nb1 + tap * SIZES[kernel]).splat(n)
                    slot.set(k.fma(load_floats(k, src, at, n, mask), factor, slot.now))
            for i, line in enumerate(transposed([slot.now for slot in sums])):
                with k.when(token + i < n_tokens):
                    at = y + sequence * y_nb2 + (token + i) * y_nb1 + first * SIZES[out]
                    store_floats(k, out, line, at, inside)


# -- states ----------------------------------------------------------------------------------------


@contextmanager
def _each_token(
    k: Emitter, first: Value, states: Value, n_floats: Value, n_tokens: Value, kept: tuple[Value, Value]
) -> Iterator[tuple[Value, Value, Value]]:
    """Context manager: code in its body runs for each token; yields it, and the old and the new state.

    Args:
        k: The emitted kernel.
        first: Address of the state before the first token.
        states: Address of the newest state to keep.
        n_floats: Number of contiguous floats of a state that the thread computes.
        n_tokens: Number of tokens; if there are fewer than states to keep, the first state fills the rest.
        kept: Number of states to keep, and the bytes from one to the next.
    """
    n_kept, stride = kept
    with k.loop(n_tokens, n_kept) as slot:
        each_vector(
            k, k.i64(0), n_floats, lambda i, m: _put(k, states + slot * stride, i, _get(k, first, i, m), m)
        )
    old = k.variable(first)
    with k.loop(0, n_tokens) as token:
        slot = n_tokens - 1 - token
        new = states + k.select(slot < n_kept, slot, 0) * stride
        yield token, old.now, new
        old.set(new)


def _get(k: Emitter, at: Value, i: Value, mask: Value | None) -> Value:
    """Load a vector of floats from element `i` on."""
    return load_floats(k, "f32", at + i * 4, k.level.lanes, mask)


def _put(k: Emitter, at: Value, i: Value, value: Value, mask: Value | None) -> None:
    store_floats(k, "f32", value, at + i * 4, mask)


class _Lines:
    """Some lines of a state; vectors are in registers between two passes if the length is known.

    Args:
        k: The emitted kernel.
        width: Length of a line.
        known: The same, if it is known; else 0.
        old: Address of the first line before the token.
        new: Its address after it.
        n: Number of lines; 1 if the length is not known.
    """

    def __init__(self, k: Emitter, width: Value, known: int, old: Value, new: Value, n: int) -> None:
        self._k, self._width, self._known, self._at, self._new = k, width, known, old, new
        self._vectors: dict[tuple[int, int], Value] = {}
        self.n = n

    def sums(self) -> list[Variable]:
        """Return a sum of 0 for each line."""
        return [_sum(self._k) for _ in range(self.n)]

    def totals(self, sums: Sequence[Variable]) -> Value:
        """Return the sums' totals, a lane per line."""
        vectors = [s.now for s in sums]
        return folds(vectors, operator.add) if self.n > 1 else total(vectors[0]).splat(1)

    def each(self, body: Callable[[Value, Value | None, Value, int], Value]) -> None:
        """Emit a pass: `body(i, mask, old, line)` returns the new value of the vector from element `i` on."""
        k = self._k
        for i in range(0, self._known, k.level.lanes):
            for line in range(self.n):
                old = self._vectors.get((line, i)) or _get(k, self._at, k.i64(line * self._known + i), None)
                self._vectors[line, i] = body(k.i64(i), None, old, line)
        if not self._known:

            def advance(i: Value, mask: Value | None) -> None:
                _put(k, self._new, i, body(i, mask, _get(k, self._at, i, mask), 0), mask)

            each_vector(k, k.i64(0), self._width, advance)
            self._at = self._new

    def close(self) -> None:
        """Write the vectors in registers to memory."""
        for (line, i), value in self._vectors.items():
            self._k.store(value, self._new + 4 * (line * self._known + i))


def _inside(k: Emitter, x: Value, mask: Value | None) -> Value:
    """`x`, with 0 in lanes not set in the mask, where infinite factors of a line make it NaN."""
    return x if mask is None else k.select(mask, x, 0.0)


def _splat(k: Emitter, at: Value) -> Value:
    """Load a float into all lanes."""
    return k.load(F32, at).splat(k.level.lanes)


def _sum(k: Emitter) -> Variable:
    return k.variable(k.const(vec(F32, k.level.lanes), 0))


def ssm_scan(k: Emitter, one_rate: bool, known: int) -> None:
    """The selective scan of Mamba: `S = S exp(dt A) + (x dt) B`, then `y = S C`; `dt` after softplus.

    Arguments: `y, states, s, ids, nb0, states' count, errors, step, x, nb2, nb3, dt, A, B, nb1..3, C, nb1..3,
    d_state, head_dim, heads, heads per group, tokens, sequences, kept, heads per unit`.

    Args:
        k: The emitted kernel.
        one_rate: Whether a head has one decay `A`; else one for each element of its states.
        known: `d_state`, if it is known when the kernel is compiled (`known_width`); else 0.
    """
    y, states, s, ids, ids_nb0, limit, errors, step = k.ints(8)
    x, x_nb2, x_nb3, dt, a, b, b_nb1, b_nb2, b_nb3, c, c_nb1, c_nb2, c_nb3 = k.ints(13)
    width, dim, n_heads, per_group, n_tokens, n_seqs, n_kept, per_unit = k.ints(8)
    head_nbytes = dim * width * 4
    units = (n_heads + per_unit - 1) // per_unit
    with k.units(units * n_seqs) as unit:
        sequence, begin = unit // units, unit % units * per_unit
        end = k.least(begin + per_unit, n_heads)
        number, is_right = row_number(k, ids + sequence * ids_nb0, "i32", limit, (errors, step))
        first = s + (number * n_heads + begin) * head_nbytes
        to = states + (sequence * n_heads + begin) * head_nbytes
        n_floats, kept = (end - begin) * dim * width, (n_kept, n_seqs * n_heads * head_nbytes)
        with k.when(is_right), _each_token(k, first, to, n_floats, n_tokens, kept) as (token, old, new):
            x_row = x + sequence * x_nb3 + token * x_nb2
            row = (sequence * n_tokens + token) * n_heads
            with k.loop(begin, end) as head:
                time = _splat(k, dt + (row + head) * 4)
                rate = a + head * (4 if one_rate else width * 4)
                same = exp(k, time * _splat(k, rate)) if one_rate else None
                group = head // per_group
                b_row = b + sequence * b_nb3 + token * b_nb2 + group * b_nb1
                c_row = c + sequence * c_nb3 + token * c_nb2 + group * c_nb1
                with k.loop(0, dim) as i:
                    line = ((head - begin) * dim + i) * width * 4
                    value, read = _splat(k, x_row + (head * dim + i) * 4) * time, _sum(k)

                    state = _Lines(k, width, known, old + line, new + line, 1)

                    def advance(j: Value, mask: Value | None, before: Value, _: int) -> Value:
                        decay = exp(k, time * _get(k, rate, j, mask)) if same is None else same
                        now = _inside(k, k.fma(before, decay, value * _get(k, b_row, j, mask)), mask)
                        read.set(k.fma(now, _get(k, c_row, j, mask), read.now))
                        return now

                    state.each(advance)
                    state.close()
                    k.store(total(read.now), y + ((row + head) * dim + i) * 4)


@dataclass(frozen=True)
class _HeadLines:
    """Some lines of the square state of a head, and a token.

    Attributes:
        sequence: Number of the sequence.
        head: Number of the head.
        lines: Range of lines of the state.
        token: Number of the token in the sequence.
        row: Number of the token's row of the head, among the rows of all tokens.
        old: Address of the first of these lines in the state before the token.
        new: The same after it.
    """

    sequence: Value
    head: Value
    lines: tuple[Value, Value]
    token: Value
    row: Value
    old: Value
    new: Value


@contextmanager
def _each_head(
    k: Emitter,
    first: Value,
    states: Value,
    size: Value,
    n_heads: Value,
    n_tokens: Value,
    n_seqs: Value,
    n_kept: Value,
) -> Iterator[_HeadLines]:
    """Context manager: code in its body runs for blocks of lines of the chunk's heads, token by token."""
    blocks = (size + (BLOCK - 1)) // BLOCK
    with k.units(blocks * n_heads * n_seqs) as unit:
        begin, number = unit % blocks * BLOCK, unit // blocks
        head, sequence = number % n_heads, number // n_heads
        end = k.least(begin + BLOCK, size)
        at = (number * size + begin) * size * 4
        kept = n_kept, n_seqs * n_heads * size * size * 4
        n_floats = (end - begin) * size
        with _each_token(k, first + at, states + at, n_floats, n_tokens, kept) as (token, old, new):
            row = (sequence * n_tokens + token) * n_heads + head
            yield _HeadLines(sequence, head, (begin, end), token, row, old, new)


def rwkv_wkv7(k: Emitter, known: int) -> None:
    """`S = S w + v k + (S a) b`, then `y = S r`, with the state `S[v, k]`.

    Arguments: `y, states, r, w, k, v, a, b, s, size, heads, tokens, sequences`. `known`: see `ssm_scan`.
    """
    y, states, *operands, s = k.ints(9)
    size, n_heads, n_tokens, n_seqs = k.ints(4)
    with _each_head(k, s, states, size, n_heads, n_tokens, n_seqs, k.i64(1)) as now:
        at = now.row * size * 4
        r, w, key, v, a, b = (p + at for p in operands)
        n = lines_together(k.level, known)
        with k.loop(*now.lines, n) as i:
            line = (i - now.lines[0]) * size * 4
            state = _Lines(k, size, known, now.old + line, now.new + line, n)
            values = [_splat(k, v + (i + j) * 4) for j in range(n)]
            seen, read = state.sums(), state.sums()

            def look(j: Value, mask: Value | None, before: Value, line: int) -> Value:
                seen[line].set(k.fma(before, _get(k, a, j, mask), seen[line].now))
                return before

            state.each(look)
            totals = state.totals(seen)
            found = [totals[j].splat(k.level.lanes) for j in range(n)]

            def advance(j: Value, mask: Value | None, before: Value, line: int) -> Value:
                more = k.fma(found[line], _get(k, b, j, mask), values[line] * _get(k, key, j, mask))
                new = _inside(k, k.fma(before, _get(k, w, j, mask), more), mask)
                read[line].set(k.fma(new, _get(k, r, j, mask), read[line].now))
                return new

            state.each(advance)
            state.close()
            k.store(state.totals(read), y + at + i * 4)


def gated_delta_net(k: Emitter, one_gate: bool, known: int) -> None:
    """`S = S exp(g)`, `S = S + beta (v - S k) k`, then `y = scale S q`, with the state `S[v, k]`.

    Arguments: `scale, y, states, q, nb1..3, k, nb1..3, v, nb1..3, g, beta, s, size, heads, heads of keys,
    tokens, sequences, kept`, scratch, the scratch per thread [bytes].

    Args:
        k: The emitted kernel.
        one_gate: Whether a head has one gate `g`; else one for each column of its state.
        known: `size`, if it is known when the kernel is compiled (`known_width`); else 0.
    """
    scale = k.float_arg()
    y, states, q, q1, q2, q3, key, k1, k2, k3, v, v1, v2, v3, gate, beta, s = k.ints(17)
    size, n_heads, n_keys, n_tokens, n_seqs, n_kept, scratch, stride = k.ints(8)
    decays = scratch + k.thread * stride
    with _each_head(k, s, states, size, n_heads, n_tokens, n_seqs, n_kept) as now:
        of_key = now.head % n_keys
        q_row = q + now.sequence * q3 + now.token * q2 + of_key * q1
        k_row = key + now.sequence * k3 + now.token * k2 + of_key * k1
        v_row = v + now.sequence * v3 + now.token * v2 + now.head * v1
        g_row = gate + now.row * (4 if one_gate else size * 4)
        same = exp(k, _splat(k, g_row)) if one_gate else None
        if not one_gate:
            each_vector(k, k.i64(0), size, lambda j, m: _put(k, decays, j, exp(k, _get(k, g_row, j, m)), m))
        part = _splat(k, beta + now.row * 4)
        n = lines_together(k.level, known)
        with k.loop(*now.lines, n) as i:
            line = (i - now.lines[0]) * size * 4
            state = _Lines(k, size, known, now.old + line, now.new + line, n)
            seen, read = state.sums(), state.sums()

            def decay(j: Value, mask: Value | None, before: Value, line: int) -> Value:
                kept = _inside(k, before * (_get(k, decays, j, mask) if same is None else same), mask)
                seen[line].set(k.fma(kept, _get(k, k_row, j, mask), seen[line].now))
                return kept

            state.each(decay)
            totals = state.totals(seen)
            changes = [
                (_splat(k, v_row + (i + j) * 4) - totals[j].splat(k.level.lanes)) * part for j in range(n)
            ]

            def advance(j: Value, mask: Value | None, before: Value, line: int) -> Value:
                new = _inside(k, k.fma(changes[line], _get(k, k_row, j, mask), before), mask)
                read[line].set(k.fma(new, _get(k, q_row, j, mask), read[line].now))
                return new

            state.each(advance)
            state.close()
            k.store(state.totals(read) * scale.splat(n), y + (now.row * size + i) * 4)
