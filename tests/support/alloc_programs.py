"""Random graphs for the graph allocator, and a check of their lifetimes and places."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import strategies as st

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor, contiguous_nb
from ggmlb.interface import BufferType
from ggmlb.runtime.alloc import TensorAllocator

SHAPES = [(4, 4), (2, 4), (4, 2), (8, 4), (0, 4), (1, 1)]
KINDS = [
    *("add", "sub", "mul", "scale", "sqr", "neg", "soft_max", "soft_max_ext"),
    *("mul_mat", "concat", "cont", "sum_rows"),
    *("view", "reshape", "transpose"),
    *("scale_inplace", "cpy"),
    "split input",
]
CAN_SHARE = {Op.ADD: 2, Op.SUB: 2, Op.MUL: 2, Op.SCALE: 1, Op.SQR: 1, Op.UNARY: 1, Op.SOFT_MAX: 1}
"""How many of its first operands may lie where the result of an op does."""


class Program:
    """A random graph, with the memory of its tensors.

    Attributes:
        graph: All tensors are listed, in the order in which they were made.
        node_ids: Index of a buffer type for each node.
        leaf_ids: And for each leaf.
        copies: What the scheduler would copy into a node without an op.
        weights: Leafs that lie in a buffer of their own.
    """

    def __init__(self) -> None:
        self.ctx = Context()
        self.graph = Graph()
        self.node_ids: list[int] = []
        self.leaf_ids: list[int] = []
        self.copies: dict[Tensor, Tensor] = {}
        self.weights: list[Tensor] = []

    def __repr__(self) -> str:
        """One tensor per line, for the report of a failure."""
        ids = {t: i for i, t in enumerate(self.graph)}
        return "Program" + "".join(
            f"\n  {i}: {t.op.value} {list(t.ne[:2])} of {[ids[s] for s in t.src if s is not None]}"
            f"{'' if t.view_src is None else f' in {ids[t.view_src]}+{t.view_offs}'} flags {t.flags}"
            f"{f' copy of {ids[self.copies[t]]}' if t in self.copies else ''}"
            f"{' weight' if t in self.weights else ''} at {t.offset}"
            for t, i in ids.items()
        )


@st.composite
def programs(draw: st.DrawFn, n_bufts: int, max_nodes: int = 24, *, splits: bool = True) -> Program:
    """Draw a program of float32 matrices; with `splits` it has copies as the scheduler makes them."""
    program = Program()
    ctx, graph = program.ctx, program.graph
    pool: list[Tensor] = []

    def leaf() -> Tensor:
        t = ctx.new_tensor(DType.F32, draw(st.sampled_from(SHAPES)))
        graph.leafs.append(t)
        program.leaf_ids.append(draw(st.integers(0, n_bufts - 1)))
        match draw(st.sampled_from(["plain", "input", "weight"])):
            case "input":
                ctx.set_input(t)
            case "weight":
                program.weights.append(t)
        return t

    pool += [leaf() for _ in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, max_nodes))):
        known = len(ctx.tensors)
        a = pool[-1 - draw(st.integers(0, min(7, len(pool) - 1)))]
        new = _apply(draw, program, draw(st.sampled_from(KINDS if splits else KINDS[:-1])), a, pool)
        nodes = [*ctx.tensors[known:], *([] if new in ctx.tensors[known:] else [new])]
        if new in program.copies:
            nodes.append(_dependency(program.copies[new]))
        for node in nodes:
            graph.nodes.append(node)
            program.node_ids.append(draw(st.integers(0, n_bufts - 1)))
        match draw(st.integers(0, 12)):
            case 0:
                ctx.set_output(new)
            case 1 if new.op in CAN_SHARE or new.op is Op.MUL_MAT:
                ctx.set_input(new)  # allowed of any tensor: placed first, though it is computed
        pool.append(new)
        if draw(st.integers(0, 9)) == 0:
            pool.append(leaf())
    return program


def _apply(draw: st.DrawFn, program: Program, kind: str, a: Tensor, pool: list[Tensor]) -> Tensor:
    """Make a tensor of `a` and perhaps another; another kind where the shapes do not allow it."""
    ctx = program.ctx
    alike = [t for t in pool if t.ne == a.ne]
    b = alike[draw(st.integers(0, len(alike) - 1))]
    plain = a.nb == contiguous_nb(a.dtype, a.ne)
    match kind:
        case "add" | "sub" | "mul":
            made: Tensor = getattr(ctx, kind)(a, b)
        case "soft_max_ext" if plain and b.is_contiguous() and a.ne[0]:
            made = ctx.soft_max_ext(a, b, 0.5, 0.0)
        case "soft_max" if plain and a.ne[0]:
            made = ctx.soft_max(a)
        case "mul_mat" if not b.is_transposed() and not a.is_transposed():
            made = ctx.mul_mat(b, a)
        case "concat" if plain and b.is_contiguous() and a.ne[1] < 32:
            made = ctx.concat(a, b, 1)
        case "sum_rows":
            made = ctx.sum_rows(a)
        case "view" if a.ne[1] > 1 and not a.is_transposed():
            first = draw(st.integers(0, a.ne[1] - 1))
            n = draw(st.integers(1, a.ne[1] - first))
            made = ctx.view_2d(a, a.ne[0], n, a.nb[1], first * a.nb[1])
        case "reshape" if plain:
            made = ctx.reshape_1d(a, a.n_elements)
        case "transpose":
            made = ctx.transpose(a)
        case "scale_inplace" if plain:
            made = ctx.scale_inplace(a, 0.5)
        case "cpy":
            made = ctx.cpy(a, b)
        case "split input":
            made = Tensor(a.dtype, a.ne, a.nb)
            program.copies[made] = a
        case "sqr" | "neg" | "cont" if plain:
            made = getattr(ctx, kind)(a)
        case _:
            made = ctx.scale(a, 0.5) if plain else ctx.cont(a)
    return made


def _dependency(source: Tensor) -> Tensor:
    """What the scheduler lists with a copy, so that what is copied is not overwritten until then."""
    return Tensor(source.dtype, source.ne, source.nb, src=(source,), view_src=source)


# -- what may not overlap --------------------------------------------------------------------------


def check_places(program: Program) -> None:
    """Check, from lifetimes computed here, that what lives at the same time shares no byte."""
    graph = program.graph
    life = lifetimes(graph)
    position = {t: i for i, t in enumerate(graph.nodes)}
    for t in graph:
        assert t.buffer is not None and not t.buffer.is_freed
        if t.view_src is not None:
            assert t.buffer is t.view_src.buffer
            assert t.offset == t.view_src.offset + t.view_offs
    roots = [t for t in graph if t.view_src is None and t not in program.weights]
    for t in roots:
        assert t.buffer is not None
        assert t.offset % t.buffer.alignment == 0
        assert t.offset >= 0 and t.offset + t.nbytes <= t.buffer.size <= t.buffer.max_size
    for i, a in enumerate(roots):
        for b in roots[:i]:
            if not overlap(a, b):
                continue
            first, second = sorted((a, b), key=lambda t: life[t])
            if life[first][1] >= life[second][0]:
                # The one exception: the second is computed where its dying operand lies.
                assert life[first][1] == life[second][0] == position[second]
                assert _lies_on_operand(second, first), f"{first!r} {life[first]}, {second!r} {life[second]}"


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share a byte."""
    if a.buffer is not b.buffer or not a.nbytes or not b.nbytes:
        return False
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


def lifetimes(graph: Graph) -> dict[Tensor, tuple[float, float]]:
    """For each tensor that is no view, the positions of the nodes from which and until which it is needed."""
    read = {s for n in graph.nodes for s in n.src}
    life: dict[Tensor, tuple[float, float]] = {}
    for t in graph:
        if t.view_src is not None:
            continue
        users = [i for i, n in enumerate(graph.nodes) if any(_root(s) is t for s in n.src if s is not None)]
        members = [m for m in graph if _root(m) is t]
        stays = any(m.flags & TensorFlag.OUTPUT or (m.op is not Op.NONE and m not in read) for m in members)
        begins = -1 if t in graph.leafs or t.flags & TensorFlag.INPUT else graph.nodes.index(t)
        life[t] = begins, inf if stays or not users else users[-1]
    return life


def _root(t: Tensor) -> Tensor:
    return t if t.view_src is None else t.view_src


def _lies_on_operand(node: Tensor, operand: Tensor) -> bool:
    mine = [s for s in node.src if s is not None and _root(s) is operand]
    return (
        mine == [operand]
        and operand in node.src[: CAN_SHARE.get(node.op, 0)]
        and (operand.buffer, operand.offset) == (node.buffer, node.offset)
        and (operand.dtype, operand.ne, operand.nb) == (node.dtype, node.ne, node.nb)
    )


# -- what it computes ------------------------------------------------------------------------------


def place_without_reuse(program: Program, kind: BufferType) -> None:
    """Place every tensor in bytes of its own."""
    roots = [t for t in program.graph if t.view_src is None and t.buffer is None]
    buffer = kind.alloc_buffer(sum(t.nbytes + kind.alignment for t in roots))
    allocator = TensorAllocator(buffer)
    for t in roots:
        allocator.alloc(t)
    for t in program.graph:
        if t.view_src is not None:
            t.buffer = t.view_src.buffer
            t.offset = t.view_src.offset + t.view_offs


def set_leafs(program: Program) -> None:
    """Set all leafs, and check that none disturbs another."""
    leafs = program.graph.leafs
    values = [
        np.random.default_rng(i).uniform(0.5, 1.5, t.n_elements).astype(np.float32)
        for i, t in enumerate(leafs)
    ]
    for t, value in zip(leafs, values, strict=True):
        t.set(value)
    assert all((t.get().view(np.float32) == value).all() for t, value in zip(leafs, values, strict=True))


def results(graph: Graph) -> list[Tensor]:
    """The tensors whose data is there when the graph was computed."""
    life = lifetimes(graph)
    return [t for t in graph if life[_root(t)][1] == inf]
