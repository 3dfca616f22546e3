"""Random programs over several devices, as data that ggmlb and ggml both build.

Only what `random.Random(seed).random()` gives is drawn on: it is the same in every version of Python.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

N_ROWS, WIDTH = 4, 8
ROW_NBYTES = 4 * WIDTH
DECLINABLE = (
    "ADD",
    "MUL",
    "UNARY",
    "SCALE",
    "SOFT_MAX",
    "RMS_NORM",
    "CONT",
    "CONCAT",
    "ROPE",
    "MUL_MAT",
    "GET_ROWS",
)
LAYOUTS = ((0,), (0, 1), (0, 1), (0, 1, 2), (0, 0), (0, 0, 1), (0, 1, 0))


@dataclass(frozen=True)
class Recipe:
    """A program over fake devices and the CPU, as numbers.

    Attributes:
        streams: The device of each backend before the last, which is the CPU's.
        declined: The ops that each device does not run.
        reads_host: The devices that use host memory in place.
        op_offload: Whether devices take products whose weights lie in host memory.
        weights: Where each pair of a matrix and a vector lies, as a backend, and whether as weights.
        n_inputs: Number of inputs that the user sets.
        steps: A name in `STEPS`, two operands among the results before it, and a weight.
        requests: An input or a later result, and the backend that the user asks for, which runs it.
        each: Whether each result is expanded into the graph, or only the last.
    """

    streams: tuple[int, ...]
    declined: tuple[tuple[str, ...], ...]
    reads_host: tuple[int, ...]
    op_offload: bool
    weights: tuple[tuple[int, bool], ...]
    n_inputs: int
    steps: tuple[tuple[str, int, int, int], ...]
    requests: tuple[tuple[int, int], ...]
    each: bool

    @property
    def n_devices(self) -> int:
        """Number of fake devices."""
        return len(self.declined)

    @property
    def digest(self) -> str:
        """Names the recipe: of another one nothing is known."""
        return hashlib.sha256(repr(astuple(self)).encode()).hexdigest()[:12]

    def declines(self, backend: int, op: str) -> bool:
        """Whether the device of a backend does not run an op; the CPU runs all."""
        return backend < len(self.streams) and op in self.declined[self.streams[backend]]


def recipe(seed: int, *, writes: bool = False) -> Recipe:
    """The recipe of a number; its steps may write into earlier results if `writes`."""
    source = random.Random(seed)

    def below(n: int) -> int:
        return int(source.random() * n)

    def chance(p: float) -> bool:
        return source.random() < p

    def pick(items: Sequence[Any]) -> Any:
        return items[below(len(items))]

    streams = pick(LAYOUTS)
    n_devices, n_backends = max(streams) + 1, len(streams) + 1
    names = [name for name in STEPS if writes or name not in WRITES]
    drawn = Recipe(
        streams=streams,
        declined=tuple(tuple(op for op in DECLINABLE if chance(0.2)) for _ in range(n_devices)),
        reads_host=tuple(d for d in range(n_devices) if chance(0.15)),
        op_offload=chance(0.3),
        weights=tuple((below(n_backends), chance(0.8)) for _ in range(1 + below(5))),
        n_inputs=1 + below(3),
        steps=tuple((pick(names), below(100), below(100), below(100)) for _ in range(3 + below(38))),
        requests=(),
        each=chance(0.5),
    )
    ops = ["NONE"] * drawn.n_inputs + [STEPS[step[0]][0] for step in drawn.steps]
    requests = [(below(len(ops)), below(n_backends)) for _ in range(below(6))]
    return replace(
        drawn, requests=tuple({i: b for i, b in requests if not drawn.declines(b, ops[i])}.items())
    )


Step = tuple[str, "Callable[..., Any]"]

STEPS: dict[str, Step] = {
    "add": ("ADD", lambda c, x, y, w, v, ids: c.add(x, y)),
    "mul": ("MUL", lambda c, x, y, w, v, ids: c.mul(x, y)),
    "bias": ("ADD", lambda c, x, y, w, v, ids: c.add(x, v)),
    "silu": ("UNARY", lambda c, x, y, w, v, ids: c.silu(x)),
    "scale": ("SCALE", lambda c, x, y, w, v, ids: c.scale(x, 0.5)),
    "soft_max": ("SOFT_MAX", lambda c, x, y, w, v, ids: c.soft_max(x)),
    "norm": ("RMS_NORM", lambda c, x, y, w, v, ids: c.rms_norm(x, 1e-5)),
    "mul_mat": ("MUL_MAT", lambda c, x, y, w, v, ids: c.mul_mat(w, x)),
    "product": ("MUL_MAT", lambda c, x, y, w, v, ids: c.mul_mat(w, x)),
    "get_rows": ("GET_ROWS", lambda c, x, y, w, v, ids: c.get_rows(w, ids)),
    "part_rows": ("CONT", lambda c, x, y, w, v, ids: c.cont(c.view_2d(x, WIDTH, N_ROWS, ROW_NBYTES, 0))),
    "turn": ("CONT", lambda c, x, y, w, v, ids: c.reshape_2d(c.cont(c.transpose(x)), WIDTH, N_ROWS)),
    "view": ("VIEW", lambda c, x, y, w, v, ids: c.view_2d(x, WIDTH, N_ROWS, ROW_NBYTES, 0)),
    "halves": ("CONCAT", lambda c, x, y, w, v, ids: c.concat(_half(c, x), _half(c, y), 0)),
    "in_place": ("SCALE", lambda c, x, y, w, v, ids: c.scale_inplace(x, 0.5)),
    "write": ("CPY", lambda c, x, y, w, v, ids: c.cpy(x, y)),
    "rope": ("ROPE", lambda c, x, y, w, v, ids: c.reshape_2d(_rope(c, x, v, ids), WIDTH, N_ROWS)),
}
"""The op of each step, that a device may decline, and what builds it."""

WRITES = ("in_place", "write")


def _half(c: Any, x: Any) -> Any:
    return c.view_2d(x, WIDTH // 2, N_ROWS, ROW_NBYTES, 0)


def _rope(c: Any, x: Any, v: Any, ids: Any) -> Any:
    x = c.reshape_3d(x, WIDTH, 1, N_ROWS)
    return c.rope_ext(x, ids, v, WIDTH, 0, 0, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)


def build(
    recipe: Recipe, c: Any, weights: Sequence[tuple[Any, Any]], inputs: Sequence[Any], ids: Any
) -> tuple[list[Any], list[Any]]:
    """Build a program in a context of either library.

    Args:
        recipe: What to build.
        c: Has ggmlb's methods for ops.
        weights: A matrix ne `[WIDTH, WIDTH]` and a vector ne `[WIDTH]` for each of the recipe's.
        inputs: The recipe's inputs, ne `[WIDTH, N_ROWS]`.
        ids: Row numbers, i32 ne `[N_ROWS]`.

    Returns:
        The inputs with the result of each step, and what to expand into the graph, in order.
    """
    made = list(inputs)
    for name, a, b, k in recipe.steps:
        w, v = weights[k % len(weights)]
        made.append(STEPS[name][1](c, made[_recent(a, made)], made[_recent(b, made)], w, v, ids))
    return made, made[len(inputs) :] if recipe.each else made[-1:]


def _recent(number: int, made: Sequence[Any]) -> int:
    """An operand: half of them are among the last three, so that programs are deep."""
    return len(made) - 1 - (number // 2) % min(3, len(made)) if number % 2 else (number // 2) % len(made)
