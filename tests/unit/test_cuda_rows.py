"""Kernels that have rows, or stretches of them, in registers: how these are shared; that no element is amiss.

On the PTX machine, which tells of accesses beyond a tensor, of misaligned vectors, and of races.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ggmlb import Context, DType, Graph
from ggmlb.backends.common.fusion import Group, fuse
from ggmlb.backends.gpu import RULES, Launch, lower
from ggmlb.core.enums import RopeType
from tests.support.ptx.machine import why_not
from tests.support.ptx.programs import CARD, FEW, beside_cpu, close, fill, in_both_orders, on_cpu
from tests.support.ptx.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggmlb.core.tensor import Tensor

F32, F16, BF16, I32 = DType.F32, DType.F16, DType.BF16, DType.I32
runs_ptx = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def shared(node: Tensor) -> tuple[int, ...]:
    """Return work-items of a group and of a row, and elements of each of these, in all and at once."""
    (launch,) = lower(node, CARD)
    macros = dict(launch.defines)
    return launch.wg, *(
        int(macros.get(key, n)) for key, n in (("LANES", launch.wg), ("PER_LANE", 0), ("VEC", 0))
    )


def check(
    make: Callable[[Context], Tensor], prepare: Callable[[Context], None] | None = None
) -> list[Launch]:
    """Compare what the portable kernels make of a node with the CPU backend."""
    ctx = Context()
    node = make(ctx)
    steps = beside_cpu(node, ctx, (lambda: prepare(ctx)) if prepare else None, own=False)
    return [step for step in steps if isinstance(step, Launch)]


# -- how rows are shared ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "n_rows", "want"),
    [
        (32, 4096, (128, 8, 4, 4)),
        (128, 4096, (128, 8, 16, 4)),
        (132, 4096, (128, 32, 8, 4)),
        (131, 4096, (128, 32, 6, 1)),
        (384, 4096, (128, 32, 12, 4)),
        (512, 4096, (128, 32, 16, 4)),
        (516, 4096, (128, 128, 8, 4)),
        (4096, 4096, (128, 128, 32, 4)),
        (4097, 4096, (256, 256, 24, 1)),
        (16384, 4096, (512, 512, 32, 4)),
        (16388, 4096, (512, 512, 0, 0)),
        (1024, 8, (128, 128, 8, 4)),
        (4096, 8, (512, 512, 8, 4)),
        (16384, 8, (512, 512, 32, 4)),
    ],
)  # fmt: skip
def test_a_row_is_shared_by_as_few_as_have_room(n: int, n_rows: int, want: tuple[int, ...]) -> None:
    ctx = Context()
    assert shared(ctx.soft_max(ctx.new_tensor(F32, (n, n_rows)))) == want


@pytest.mark.parametrize(
    ("ne", "dtype", "want"),
    [
        ((4096, 8192), F32, (128, 128, 8, 4)),
        ((4096, 8192), F16, (128, 128, 16, 8)),
        ((4096,), F32, (128, 128, 4, 4)),
        ((4097,), F32, (128, 128, 4, 1)),
        ((1 << 20 | 1,), BF16, (128, 128, 8, 1)),
    ],
)
def test_elements_are_mapped_in_vectors(ne: tuple[int, ...], dtype: DType, want: tuple[int, ...]) -> None:
    ctx = Context()
    assert shared(ctx.silu(ctx.new_tensor(dtype, ne))) == want


# -- that no element is amiss ----------------------------------------------------------------------


@runs_ptx
@pytest.mark.parametrize("n", [1, 7, 32, 100, 128, 130, 384, 1024, 1030, 4096, 5000, 16388])
def test_soft_max_of_rows_of_every_length(n: int) -> None:
    """With a mask, slopes and sinks; the last group has fewer rows than it could."""
    masks = F16 if n % 8 else F32

    def make(c: Context) -> Tensor:
        x = c.new_tensor(F32, (n, 3 if n < 2000 else 1, 2, 3 if 32 < n < 2000 else 1))
        y = c.soft_max_ext(x, c.new_tensor(masks, (n, x.ne[1])), 0.7, 4.0)
        c.soft_max_add_sinks(y, c.new_tensor(F32, (2,)))
        return y

    check(make)


@runs_ptx
@pytest.mark.parametrize(
    ("n", "n_rows"), [(3, 5), (64, 21), (200, 7), (1024, 140), (1100, 2), (4100, 2), (17000, 1)]
)
@pytest.mark.parametrize("norm", ["norm", "rms_norm", "l2_norm", "mean"])
def test_norms_of_rows_of_every_length(norm: str, n: int, n_rows: int) -> None:
    numbers = () if norm == "mean" else (1e-5,)
    check(lambda c: getattr(c, norm)(c.new_tensor(F32, (n, n_rows)), *numbers))


@runs_ptx
@pytest.mark.parametrize(("dtype", "n"), [(F32, 96), (F32, 384), (F32, 1022)])
def test_norms_with_their_neighbours(dtype: DType, n: int) -> None:
    """A sum that is kept, in place, and a scale and a shift behind the norm."""
    ctx = Context()
    x, y = (ctx.new_tensor(dtype, (n, 5)) for _ in "xy")
    total = ctx.add_inplace(x, y)
    scaled = ctx.mul(ctx.norm(total, 1e-5), ctx.new_tensor(F32, (n,)))
    result = ctx.add(scaled, ctx.new_tensor(dtype, (n,)))
    graph = Graph().build_forward_expand(result, total)
    (group,) = (g for g in fuse(graph, lambda g: RULES.find(g, CARD) is not None) if isinstance(g, Group))
    assert {"add", "mul", "shift"} <= {part for part in ("add", "mul", "shift") if part in group}
    fill(ctx)
    before = x.to_numpy().copy()
    want, added = on_cpu(result).copy(), total.to_numpy().copy()
    for order in (1, 7):
        x.set_array(before)
        Runner().run(lower(group, CARD), order=order)
        close(result.to_numpy(), want)
        close(total.to_numpy(), added)


@runs_ptx
@pytest.mark.parametrize("op", ["soft_max_inplace", "rms_norm_inplace", "silu_inplace", "add_inplace"])
def test_rows_in_place(op: str) -> None:
    ctx = Context()
    x = ctx.new_tensor(F32, (136, 9))
    rest: tuple[Any, ...] = {"rms_norm_inplace": (1e-5,), "add_inplace": (ctx.new_tensor(F32, (136,)),)}.get(
        op, ()
    )
    y = getattr(ctx, op)(x, *rest)
    fill(ctx)
    before = x.to_numpy().copy()
    want = on_cpu_from(y, x, before)
    for order in (1, 7):
        x.set_array(before)
        Runner().run(lower(y, CARD), order=order)
        close(y.to_numpy(), want)


def on_cpu_from(y: Tensor, x: Tensor, before: np.ndarray) -> np.ndarray:
    """Return what the CPU backend makes of x in place."""
    from ggmlb import init_by_name

    x.set_array(before)
    with init_by_name("CPU") as cpu:
        cpu.graph_compute(Graph().build_forward_expand(y))
    return y.to_numpy().copy()


@runs_ptx
@pytest.mark.parametrize("types", [(F32, F32, F32), (F16, F16, F16), (F16, F32, F32), (BF16, BF16, BF16)])
@pytest.mark.parametrize("ne", [(1030,), (1032,), (100, 3, 2), (24, 5, 3), (5, 3, 2), (1, 40, 2)])
def test_elements_of_every_type_and_length(types: tuple[DType, ...], ne: tuple[int, ...]) -> None:
    """Rows with gaps between them, so that they stay rows."""
    a, b, _ = types
    wide = (ne[0] + 8, *ne[1:])

    def make(c: Context) -> Tensor:
        whole = c.new_tensor(a, wide)
        x = c.view_4d(whole, *(*ne, 1, 1, 1)[:4], *whole.nb[1:], 0)
        return c.mul(x, c.new_tensor(b, ne))

    check(make)


@runs_ptx
@pytest.mark.parametrize("offset", [0, 4, 16])
def test_views_that_no_vector_fits(offset: int) -> None:
    def view(c: Context, gap: int = 8) -> Tensor:
        return c.view_2d(c.new_tensor(F32, (72, 6)), 64, 5, 4 * (64 + gap), offset)

    check(lambda c: c.soft_max(view(c, 0)))
    check(lambda c: c.norm(view(c), 1e-5))
    check(lambda c: c.gelu(view(c)))
    check(lambda c: c.cast(view(c), F16))


@runs_ptx
@pytest.mark.parametrize("b", [(32, 1), (64, 2), (16, 1), (1, 1), (1, 4)])
def test_what_is_tiled(b: tuple[int, int]) -> None:
    check(lambda c: c.add(c.new_tensor(F32, (64, 4, 3)), c.new_tensor(F32, b)))


@runs_ptx
@pytest.mark.parametrize("dtype", [F32, F16, BF16, DType.Q8_0, DType.Q4_K, DType.Q6_K])
@pytest.mark.parametrize("n", [256, 2304])
def test_rows_taken_by_number(dtype: DType, n: int) -> None:
    def numbers(ctx: Context) -> None:
        for t in ctx.tensors:
            if t.dtype is I32:
                t.set_array(np.array([[4, 0, 4], [2, 1, 3]], np.int32))

    check(lambda c: c.get_rows(c.new_tensor(dtype, (n, 5, 2)), c.new_tensor(I32, (3, 2))), numbers)


@runs_ptx
@pytest.mark.parametrize("to", [F32, F16])
@pytest.mark.parametrize("offset", [0, 4])
def test_quantised_rows_become_plain(to: DType, offset: int) -> None:
    def make(c: Context) -> Tensor:
        whole = c.new_tensor(to, (1200, 4))
        return c.cpy(c.new_tensor(DType.Q8_0, (1120, 3)), c.view_2d(whole, 1120, 3, whole.nb[1], offset))

    check(make)


@runs_ptx
def test_rows_are_copied_as_words() -> None:
    """Of odd sizes and places, quantised or not: bits stay what they are."""
    for dtype, n, offset in ((F16, 66, 2), (F16, 66, 4), (F16, 65, 0), (DType.Q8_0, 96, 34), (F32, 33, 4)):
        ctx = Context()
        whole = ctx.new_tensor(dtype, (n + 2 * dtype.block_size, 3))
        view = ctx.view_2d(whole, n, 3, whole.nb[1], offset)
        result = ctx.new_tensor(dtype, (n, 3))
        y = ctx.cpy(view, result)
        fill(ctx)
        want = on_cpu(y).copy()
        np.testing.assert_array_equal(in_both_orders(lower(y, CARD), y), want)


@runs_ptx
@pytest.mark.parametrize("mode", [RopeType.NORMAL, RopeType.NEOX])
@pytest.mark.parametrize(
    ("dtype", "head", "n_dims", "heads", "tokens"),
    [
        (F32, 64, 64, 6, 3), (F32, 64, 32, 6, 3), (F32, 30, 30, 5, 2), (F16, 128, 128, 12, 2),
        (F32, 512, 512, 2, 3), (F32, 24, 20, 3, 2),
    ],
)  # fmt: skip
def test_rope_of_every_size(
    mode: RopeType, dtype: DType, head: int, n_dims: int, heads: int, tokens: int
) -> None:
    def positions(ctx: Context) -> None:
        for t in ctx.tensors:
            if t.dtype is I32:
                t.set_array(np.arange(tokens, dtype=np.int32) * 7 + 2)

    check(
        lambda c: c.rope(
            c.new_tensor(dtype, (head, heads, tokens)), c.new_tensor(I32, (tokens,)), n_dims, mode
        ),
        positions,
    )


@runs_ptx
def test_rope_of_heads_that_no_group_fits() -> None:
    """A head has 15 pieces, of which a group turns 8 at once, in several rounds."""
    ctx = Context()
    x, positions = ctx.new_tensor(F32, (30, 16, 24)), ctx.new_tensor(I32, (24,))
    y = ctx.rope(x, positions, 30, RopeType.NEOX)
    beside_cpu(y, ctx, lambda: positions.set_array(np.arange(24, dtype=np.int32)), FEW, own=False)
