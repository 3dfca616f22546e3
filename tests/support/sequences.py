"""Random sequences of graphs on one scheduler, beside the same graphs elsewhere.

Graphs are built, computed, grown, computed again with inputs set anew or kept, and dropped, in any order;
requests are made and withdrawn, and weights move. After each computation all results are compared: of plain
weights with those of the CPU alone; of quantised ones, where devices differ because they round activations,
with those of a new scheduler on the same devices; so are the nodes that a callback watches. The users' graphs
stay as they were, no node is on a device that declines it, and nothing is copied twice.
"""

from __future__ import annotations

import gc
import random
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from ggmlb import (
    Backend,
    BufferUsage,
    Context,
    Device,
    DType,
    Graph,
    Scheduler,
    Tensor,
    alloc_ctx_tensors,
    init_by_name,
)
from ggmlb.core.enums import NO_OPS, Op

WIDTH, ROWS = 64, 6
PLAIN, QUANTISED = ("f32", "f16", "f32"), ("f32", "q8_0", "q4_0")
"""Types of the weights; all else is f32."""
TOLERANCE = 5e-3
"""Largest error, as a part of the largest value."""
DECLINABLE = (Op.ADD, Op.MUL_MAT, Op.MUL, Op.UNARY, Op.CONT, Op.SOFT_MAX, Op.RMS_NORM, Op.CONCAT)
"""Ops that a device may decline: none that writes into memory, where nobody else could."""


def limit(device: Device, draw: random.Random) -> None:
    """Let a fake device decline some ops, and perhaps read host memory in place."""
    declined = draw.sample(DECLINABLE, draw.randrange(4))
    device._declines = lambda op: "declined by the test" if op.op in declined else None  # type: ignore[attr-defined]
    if draw.random() < 0.3:
        own = device.buffer_type
        device.supports_buft = lambda buft: buft.is_host or buft is own  # type: ignore[method-assign]


def run_sequence(seed: int, devices: Sequence[Device], n_steps: int, tolerance: float = TOLERANCE) -> None:
    """Do the steps of a seed on a scheduler over these devices, with that error at most."""
    draw = random.Random(seed)
    options = {"parallel": draw.random() < 0.3, "keep_graphs": draw.random() < 0.3}
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # requests that cannot be followed
        backends = [stack.enter_context(device.init_backend()) for device in devices]
        steps = Steps(seed, backends, stack, tolerance, **options)
        for _ in range(n_steps):
            steps.step()


def needless_copies(sched: Scheduler) -> list[str]:
    """The tensors that are copied to a device again, though nothing was written into their memory."""
    fresh: set[tuple[Tensor, str]] = set()
    found = []
    for split in sched.splits:
        there = {(item.tensor, f"{split.backend_id} {split.backend.name}") for item in split.inputs}
        found += [f"{tensor.name} to {name}" for tensor, name in there & fresh]
        written = {node.view_src for node in split.nodes if node.op not in NO_OPS}
        fresh = {(t, name) for t, name in fresh | there if (t.view_src or t) not in written}
    return found


class Watch:
    """An eval callback that is asked for each node of a graph once, and keeps the values of some."""

    def __init__(self, graph: Graph, seed: int, part: float) -> None:
        draw = random.Random(seed)
        self._number = {node: i for i, node in enumerate(graph.nodes)}
        self._watched = {i for i in range(len(graph.nodes)) if draw.random() < part}
        self._asked: list[int] = []
        self.seen: dict[int, np.ndarray] = {}

    def __call__(self, node: Tensor, ask: bool) -> bool:
        number = self._number[node]
        if ask:
            self._asked.append(number)
            return number in self._watched
        assert number not in self.seen
        self.seen[number] = node.to_numpy()
        return True

    def check(self) -> None:
        assert sorted(self._asked) == list(range(len(self._number))), "it is asked for each node once"
        assert self.seen.keys() == self._watched


class World:
    """Weights, caches (which graphs write) and a table of ids in the memory of some backends."""

    def __init__(self, draw: random.Random, homes: Sequence[Backend], types: Sequence[str]) -> None:
        self._homes, self._stacks = homes, dict[int, ExitStack]()
        where = [draw.randrange(len(homes)) for _ in range(2 * len(types))]
        self.tensors: list[Tensor] = []
        for dtype in types:
            for kind, ne in ((dtype, (WIDTH, WIDTH)), ("f32", (WIDTH, ROWS))):
                self.tensors.append(Context().new_tensor(kind, ne, name=f"t{len(self.tensors)}"))
        for i in range(len(self.tensors)):
            self.place(i, where[i])

    @property
    def weights(self) -> list[Tensor]:
        return self.tensors[::2]

    @property
    def caches(self) -> list[Tensor]:
        return self.tensors[1::2]

    def place(self, i: int, where: int) -> None:
        """Move a tensor, whose data is the same."""
        tensor, stack = self.tensors[i], self._stacks.pop(i, None)
        if stack is None:
            shape = tensor.ne[1::-1]
            data = np.random.default_rng(i).standard_normal(shape).astype(np.float32) / np.sqrt(WIDTH)
        else:
            blocks = tensor.get()
            stack.close()
            tensor.buffer = None
        self._stacks[i] = ExitStack()
        ctx = Context()
        ctx.tensors.append(tensor)
        buffer = self._stacks[i].enter_context(alloc_ctx_tensors(ctx, self._homes[where % len(self._homes)]))
        buffer.usage = BufferUsage.ANY if i % 2 else BufferUsage.WEIGHTS
        tensor.set_array(data) if stack is None else tensor.set(blocks)

    def free(self) -> None:
        for stack in self._stacks.values():
            stack.close()


class Program:
    """A graph that grows by random steps, drawn from its seed, and its inputs."""

    def __init__(self, seed: int, world: World) -> None:
        self._draw, self._world = random.Random(seed), world
        self.ctx, self.graph = Context(), Graph()
        n_rows = self._draw.choice([1, ROWS])
        self._ne = (WIDTH, n_rows)
        self.inputs = [
            self.ctx.set_input(self.ctx.new_tensor(DType.F32, self._ne, name=f"x{i}"))
            for i in range(self._draw.randint(1, 3))
        ]
        self.made = list(self.inputs)
        self.outputs: list[Tensor] = []
        self.requests: dict[int, Backend | None] = {}
        self.is_written = False

    def grow(self, n: int) -> None:
        """Append steps to the graph; each may read what was computed before, or written since."""
        draw, c = self._draw, self.ctx
        for _ in range(n):
            x, y = (draw.choice(self.made[-4:] if draw.random() < 0.7 else self.made) for _ in range(2))
            w, cache = draw.choice(self._world.weights), draw.choice(self._world.caches)
            t = self._step(draw.randrange(16), x, y, w, cache)
            c.set_name(t, f"n{len(self.made)}")
            if draw.random() < 0.4 and t.view_src is None:
                self.outputs.append(c.set_output(t))
            self.made.append(t)
            self.graph.build_forward_expand(t)
        last = self.made[-1]
        if last.view_src is None and last not in self.outputs and last not in self.inputs:
            self.outputs.append(c.set_output(last))

    def _step(self, kind: int, x: Tensor, y: Tensor, w: Tensor, cache: Tensor) -> Tensor:
        c = self.ctx
        if kind < 4:
            return c.mul_mat(w, c.rms_norm(x, 1e-5))
        if kind == 4:
            return c.add(x, y)
        if kind == 5:
            return c.mul(c.rms_norm(x, 1e-5), c.silu(y))
        if kind == 6:
            return c.soft_max(x)
        if kind == 7:
            return c.view_2d(x, *self._ne, x.nb[1], 0)
        if kind == 8:
            half = c.view_2d(y, WIDTH // 2, self._ne[1], y.nb[1], 4 * (WIDTH // 2))
            return c.concat(c.view_2d(x, WIDTH // 2, self._ne[1], x.nb[1], 0), half, 0)
        if kind == 9:
            return c.reshape_2d(c.cont(c.transpose(x)), *self._ne)
        rows = c.view_2d(cache, *self._ne, cache.nb[1], 0)
        if kind == 10:
            return c.cpy(c.rms_norm(x, 1e-5), rows)
        if kind == 11:
            return c.add(x, rows)
        self.is_written |= kind in (12, 13, 14) and (x.view_src or x) in self.inputs
        if kind == 12:
            return c.scale_inplace(x, 0.5)
        if kind == 13:
            return c.cpy(c.rms_norm(y, 1e-5), x)
        if kind == 14:
            half = c.view_2d(x, WIDTH // 2, self._ne[1], x.nb[1], 0)
            other = c.tanh(c.view_2d(y, WIDTH // 2, self._ne[1], y.nb[1], 0))
            self.graph.build_forward_expand(c.cpy(other, half))
            return c.scale(x, 1.0)
        return c.scale(x, 0.9)


class Steps:
    """A scheduler with some programs, and their twins.

    Args:
        seed: Of all that is drawn.
        backends: The scheduler's.
        stack: Frees what is made.
        tolerance: Largest error.
        options: Of the scheduler.
    """

    def __init__(
        self, seed: int, backends: Iterable[Backend], stack: ExitStack, tolerance: float, **options: Any
    ) -> None:
        draw = self._draw = random.Random(seed)
        self._tolerance = tolerance
        self._backends = list(backends)
        self._is_plain = draw.random() < 0.5
        self._others = [stack.enter_context(init_by_name("CPU"))] if self._is_plain else self._backends
        self._options = options
        types = PLAIN if self._is_plain else QUANTISED
        self._worlds = [World(random.Random(seed), homes, types) for homes in (self._backends, self._others)]
        for world in self._worlds:
            stack.callback(world.free)
        self.sched = stack.enter_context(Scheduler(self._backends, **options))
        self._pairs: list[tuple[Program, Program]] = []
        self.log: list[str] = []

    def step(self) -> None:
        """Do something to one of the programs, and compute it."""
        draw, sched = self._draw, self.sched
        if not self._pairs or (len(self._pairs) < 4 and draw.random() < 0.3):
            seed, n = draw.randrange(1 << 30), draw.randint(1, 12)
            pair = Program(seed, self._worlds[0]), Program(seed, self._worlds[1])
            for program in pair:
                program.grow(n)
            self._pairs.append(pair)
            self.log.append(f"new {seed} {n}")
            self._compute(*pair)
            return
        pair = draw.choice(self._pairs)
        split, twin = pair
        action = draw.choice(
            ("drop", "grow", "request", "move", "reset", "reserve", "split", "keep", "again")
        )
        self.log.append(f"{self._pairs.index(pair)} {action}")
        if action == "drop" and len(self._pairs) > 1:
            self._pairs.remove(pair)
            del pair, split, twin
            gc.collect()
            return
        if action == "grow":
            n = draw.randint(1, 5)
            for program in pair:
                program.grow(n)
        elif action == "request":
            for _ in range(draw.randint(1, 4)):
                i, backend = draw.randrange(len(split.made)), draw.choice([None, *self._backends])
                sched.set_tensor_backend(split.made[i], backend)
                twin.requests[i] = backend
        elif action == "move":
            i, where = draw.randrange(len(self._worlds[0].tensors)), draw.randrange(len(self._backends))
            for world in self._worlds:
                world.place(i, where)
        elif action == "reset":
            sched.reset()
        elif action == "reserve":
            sched.reserve(draw.choice(self._pairs)[0].graph)
        elif action == "split":
            sched.split_graph(draw.choice(self._pairs)[0].graph)
        keeps = action == "keep" and self._last is split and not split.is_written
        self._compute(*pair, data=self._data if keeps else None)

    def _compute(self, split: Program, twin: Program, data: int | None = None) -> None:
        """Compute a program and its twin; with `data`, the first has these inputs already."""
        sched = self.sched
        with Scheduler(self._others, **self._options) as other:
            for i, backend in {} if self._is_plain else twin.requests.items():
                other.set_tensor_backend(twin.made[i], backend)
            if data is None:
                sched.alloc_graph(split.graph)
            other.alloc_graph(twin.graph)
            self._last, self._data = split, self._draw.randrange(1 << 30) if data is None else data
            values = np.random.default_rng(self._data)
            for pair in zip(split.inputs, twin.inputs, strict=True):
                array = values.standard_normal(pair[0].shape).astype(np.float32)
                for tensor in pair[data is not None :]:
                    if tensor.buffer is not None:
                        tensor.set_array(array)
            sources = [node.src for node in split.graph.nodes]
            is_watched, part = self._draw.random() < 0.2, self._draw.choice((0.3, 1))
            watches = [Watch(program.graph, self._data, part) for program in (split, twin)]
            for scheduler, program, watch in zip((sched, other), (split, twin), watches, strict=True):
                scheduler.set_eval_callback(watch if is_watched else None)
                scheduler.graph_compute(program.graph)
                scheduler.set_eval_callback(None)
            if is_watched:
                watches[0].check()
            assert [node.src for node in split.graph.nodes] == sources
            assert not any(record.device in record.rejected for record in sched.placement)
            assert needless_copies(sched) == [], sched
            mine, theirs = (
                [t.to_numpy() for t in (*p.outputs, *w.caches)]
                for p, w in zip((split, twin), self._worlds, strict=True)
            )
        seen = [watch.seen for watch in watches]
        tensors = (*split.outputs, *self._worlds[0].caches, *(split.graph.nodes[i] for i in seen[0]))
        mine, theirs = [*mine, *seen[0].values()], [*theirs, *(seen[1][i] for i in seen[0])]
        for tensor, got, expected in zip(tensors, mine, theirs, strict=True):
            error = float(np.abs(got - expected).max() / max(1.0, np.abs(expected).max()))
            assert error <= self._tolerance, f"{tensor.describe()} is off by {error:.3g}; {self.log}\n{sched}"
