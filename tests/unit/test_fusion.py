"""Which nodes may be fused, told without a device: what the patterns are, and what forbids each."""

from __future__ import annotations

import pytest

from ggmlb import BufferUsage, Context, DType, Graph, GraphAllocator, alloc_ctx_tensors, cpu_buffer_type
from ggmlb.backends.common.fusion import Group, fuse, gather
from ggmlb.core.enums import Op
from ggmlb.core.placement import overlap
from ggmlb.core.tensor import Tensor


class Maker(Context):
    """Leafs in few letters."""

    def f32(self, *ne: int) -> Tensor:
        return self.new_tensor(DType.F32, ne)

    def normed(self, x: Tensor) -> Tensor:
        return self.mul(self.rms_norm(x, 1e-6), self.f32(64))


@pytest.fixture
def ctx() -> Maker:
    return Maker()


def groups(graph: Graph) -> list[Group]:
    return [item for item in fuse(graph, lambda _: True) if isinstance(item, Group)]


def found(*results: Tensor) -> list[tuple[str, ...]]:
    """The parts of the groups of a graph whose tensors have no place yet."""
    return [tuple(g.parts) for g in groups(Graph().build_forward_expand(*results))]


def placed(graph: Graph) -> Graph:
    GraphAllocator(cpu_buffer_type()).alloc_graph(graph)
    return graph


# -- patterns ----------------------------------------------------------------------------------


def test_norms(ctx: Maker) -> None:
    x, y, w = ctx.f32(64, 3), ctx.f32(64, 3), ctx.f32(64)
    normed = ctx.rms_norm(x, 1e-6)
    assert found(ctx.mul(normed, w)) == [("norm", "mul")]
    assert found(ctx.mul(w, ctx.rms_norm(ctx.f32(64), 1e-6))) == [("norm", "mul")]
    assert found(ctx.add(ctx.mul(ctx.norm(x, 1e-6), w), ctx.f32(64))) == [("norm", "mul", "shift")]
    assert found(ctx.rms_norm(ctx.add(x, y), 1e-6)) == [("add", "norm")]
    assert found(ctx.mul(ctx.l2_norm(x, 1e-6), w)) == []
    assert found(ctx.mul(normed, ctx.f32(32))) == []  # repeats more than one element


def test_a_sum_that_is_needed_is_kept(ctx: Maker) -> None:
    total = ctx.add(ctx.f32(64, 3), ctx.f32(64, 3))
    graph = Graph().build_forward_expand(ctx.normed(total))
    (group,) = groups(graph)
    assert (tuple(group.parts), group.kept) == (("add", "norm", "mul"), ())
    graph.build_forward_expand(ctx.silu(total))
    (group,) = groups(graph)
    assert group.kept == (total,)
    assert group.outside["add"] == total.src
    assert group.other("mul") is group["mul"].src[1]


def test_a_sum_that_the_group_reads_again_is_not_taken_for_an_operand(ctx: Maker) -> None:
    total = ctx.add(ctx.f32(64, 3), ctx.f32(64, 3))
    assert found(ctx.mul(ctx.rms_norm(total, 1e-6), total)) == [("norm", "mul")]


def decode_layer_head(ctx: Maker, *, view: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    positions, ids = ctx.new_tensor(DType.I32, (5,)), ctx.new_tensor(DType.I64, (5,))
    cache = ctx.new_tensor(DType.F16, (64, 32))
    roped = ctx.rope(ctx.f32(16, 4, 5), positions, 16, 0)
    rows = ctx.view_2d(roped, 64, 5, roped.nb[2], 0) if view else ctx.reshape_2d(roped, 64, 5)
    return roped, rows, ctx.set_rows(cache, rows, ids)


@pytest.mark.parametrize("view", [True, False])
def test_rope_into_a_cache(ctx: Maker, view: bool) -> None:
    roped, rows, put = decode_layer_head(ctx, view=view)
    (group,) = groups(Graph().build_forward_expand(put))
    assert group.nodes == (roped, put)
    assert group.views == (rows,)
    assert found(put, ctx.silu(rows)) == []


def test_a_part_of_rope_is_not_what_is_written(ctx: Maker) -> None:
    roped, _, _ = decode_layer_head(ctx)
    part = ctx.view_2d(roped, 64, 4, roped.nb[2], roped.nb[2])
    cache = ctx.new_tensor(DType.F16, (64, 32))
    assert found(ctx.set_rows(cache, part, ctx.new_tensor(DType.I64, (4,)))) == []


def routed(ctx: Maker, *, is_sorted: bool = False, clamp: str = "clamp", div: bool = True) -> Tensor:
    """The weights of the experts that tokens choose."""
    shares = ctx.soft_max(ctx.f32(8, 3))
    chosen = (ctx.argsort_top_k if is_sorted else ctx.top_k)(shares, 2)
    weights = ctx.get_rows(ctx.reshape_3d(shares, 1, 8, 3), chosen)
    if not div:
        return weights
    weights = ctx.reshape_2d(weights, 2, 3)
    total = ctx.sum_rows(weights)
    return ctx.div(weights, getattr(ctx, clamp)(total, 0.1, 1.0) if clamp else total)


@pytest.mark.parametrize("is_sorted", [False, True])
def test_routing(ctx: Maker, is_sorted: bool) -> None:
    first = ("shares", *(["sorted"] if is_sorted else []), "chosen", "weights")
    assert found(routed(ctx, is_sorted=is_sorted, div=False)) == [first]
    assert found(routed(ctx, is_sorted=is_sorted, clamp="")) == [(*first, "total", "div")]
    for clamp in ("clamp", "clamp_inplace"):
        weights = routed(ctx, is_sorted=is_sorted, clamp=clamp)
        assert found(weights) == [(*first, "total", "clamp", "div")]


@pytest.mark.parametrize("is_sorted", [False, True])
def test_routing_by_the_soft_max_of_chosen_logits(ctx: Maker, is_sorted: bool) -> None:
    """The view of the logits is moved before the first node, which is the choice."""
    logits = ctx.relu(ctx.f32(8, 3))
    chosen = (ctx.argsort_top_k if is_sorted else ctx.top_k)(logits, 2)
    product = ctx.mul_mat_id(ctx.f32(4, 4, 8), ctx.f32(4, 1, 3), chosen)
    picked = ctx.get_rows(ctx.reshape_3d(logits, 1, 8, 3), chosen)
    weights = ctx.soft_max(ctx.reshape_2d(picked, 2, 3))
    graph = Graph().build_forward_expand(product, weights)
    assert groups(graph) == []
    gather(graph, lambda group: group.pattern == "routing")
    group = graph.marks[weights]
    assert isinstance(group, Group)
    first = ("sorted", "chosen") if is_sorted else ("chosen",)
    assert tuple(group.parts) == (*first, "weights", "shares")
    assert graph.nodes.index(weights) < graph.nodes.index(product)
    places = {node: i for i, node in enumerate(graph.nodes)}
    assert all(places.get(s, -1) < places[node] for node in graph.nodes for s in node.src if s is not None)
    other = ctx.soft_max(ctx.reshape_2d(ctx.get_rows(ctx.f32(1, 8, 3), chosen), 2, 3))
    assert found(other) == []  # weights of something else


def test_experts_that_others_read_are_kept_and_shares_forbid_routing(ctx: Maker) -> None:
    weights = routed(ctx)
    chosen, shares = (next(n for n in Graph().build_forward_expand(weights).nodes if n.op is op)
                      for op in (Op.TOP_K, Op.SOFT_MAX))  # fmt: skip
    graph = Graph().build_forward_expand(weights, ctx.mul_mat_id(ctx.f32(4, 4, 8), ctx.f32(4, 1, 3), chosen))
    (group,) = groups(graph)
    assert group.kept == (chosen,)
    assert found(weights, ctx.silu(shares)) == []


def test_sorted_experts_that_others_read_forbid_routing(ctx: Maker) -> None:
    weights = routed(ctx, is_sorted=True)
    order = next(n for n in Graph().build_forward_expand(weights).nodes if n.op is Op.ARGSORT)
    assert found(weights, ctx.view_1d(order, 8)) == []


def test_the_sum_of_experts(ctx: Maker) -> None:
    def total(order: tuple[int, ...], n: int = 3) -> Tensor:
        parts = ctx.mul(ctx.f32(64, 3, n), ctx.f32(1, 3, n))
        first, *rest = (ctx.view_2d(parts, 64, n, parts.nb[2], i * parts.nb[1]) for i in order)
        for part in rest:
            first = ctx.add(first, part)
        return first

    assert found(total((0, 1, 2))) == [("weighted", "add1", "add")]
    assert found(ctx.add(total((0, 1, 2), 1), ctx.f32(64))) == [("weighted", "add1", "add")]
    for order in ((0, 2, 1), (0, 1), (0, 1, 1)):
        assert found(total(order)) == []


def test_gated_units_of_experts(ctx: Maker) -> None:
    x, ids, other = ctx.f32(32, 1, 3), ctx.new_tensor(DType.I32, (2, 3)), ctx.new_tensor(DType.I32, (2, 3))
    w, v = ctx.f32(32, 16, 4), ctx.f32(32, 16, 4)
    unit = ctx.swiglu_split(ctx.mul_mat_id(w, x, ids), ctx.mul_mat_id(v, x, ids))
    assert found(unit) == [("gate", "up", "glu")]
    assert found(ctx.swiglu_split(ctx.mul_mat_id(w, x, ids), ctx.mul_mat_id(v, x, other))) == []
    b, c = ctx.f32(16, 4), ctx.f32(16, 4)
    both = ctx.add_id(ctx.mul_mat_id(w, x, ids), b, ids), ctx.add_id(ctx.mul_mat_id(v, x, ids), c, ids)
    assert found(ctx.swiglu_split(*both)) == [("gate", "gate_add", "up", "up_add", "glu")]
    assert found(ctx.add_id(ctx.mul_mat_id(w, x, ids), b, ids)) == [("mul_mat", "add")]
    assert found(ctx.add_id(ctx.mul_mat_id(w, x, ids), b, other)) == []


def heads(ctx: Maker, n: int = 5, norms: bool = False) -> list[Tensor]:
    """Rotated queries, and the writes of keys and values to a cache, of products with one operand."""
    positions, ids = ctx.new_tensor(DType.I32, (n,)), ctx.new_tensor(DType.I64, (n,))
    x = ctx.f32(64, n)
    q, k, v = (ctx.mul_mat(ctx.f32(64, m), x) for m in (64, 32, 32))
    found = []
    for t in (q, k):
        t = ctx.reshape_3d(t, 16, t.ne[0] // 16, n)
        t = ctx.mul(ctx.rms_norm(t, 1e-6), ctx.f32(16)) if norms else t
        found.append(ctx.rope(t, positions, 16, 0))
    rows = ctx.reshape_2d(found[1], 32, n)
    caches = [ctx.new_tensor(DType.F16, (32, 9)) for _ in "kv"]
    return [found[0], *(ctx.set_rows(cache, t, ids) for cache, t in zip(caches, (rows, v), strict=True))]


@pytest.mark.parametrize("norms", [False, True])
def test_heads_and_the_products_before_them(ctx: Maker, norms: bool) -> None:
    """Products of one operand stand together at the first, though ropes read them in between."""
    query, *puts = heads(ctx, norms=norms)
    graph = Graph().build_forward_expand(query, *puts, ctx.silu(query))
    assert [g.pattern for g in groups(graph)] == ["rope_kv"]
    gather(graph, lambda _: True)
    products, group = (graph.marks[t] for t in (graph.nodes[2], puts[1]))
    assert isinstance(products, Group)
    assert isinstance(group, Group)
    assert [n.op for n in graph.nodes[:3]] == [Op.MUL_MAT] * 3
    assert (products.pattern, products.nodes) == ("mul_mats", tuple(graph.nodes[:3]))
    assert products.kept == products.nodes[:2]
    assert set(group.kept) == {query, puts[0]}
    placed(graph)
    assert [g.pattern for g in groups(graph)] == ["mul_mats", "rope_kv"]


def test_queries_that_come_later_are_not_rotated_before(ctx: Maker) -> None:
    query, *puts = heads(ctx)
    graph = Graph().build_forward_expand(*puts, query)
    assert "rope_kv" not in [g.pattern for g in groups(graph)]


def test_an_operand_that_is_written_in_between_keeps_products_apart(ctx: Maker) -> None:
    x, w = ctx.f32(64, 3), ctx.f32(64, 64)
    first, other = ctx.mul_mat(ctx.f32(64, 64), x), ctx.f32(64, 3)

    def graph(*between: Tensor) -> Graph:
        return Graph().build_forward_expand(ctx.silu(first), *between, ctx.silu(ctx.mul_mat(w, x)))

    def marks(graph: Graph) -> list[str]:
        gather(graph, lambda group: group.pattern == "mul_mats")
        return [group.pattern for group in graph.marks.values() if isinstance(group, Group)]

    assert marks(graph(ctx.scale_inplace(other, 2.0))) == ["mul_mats"]
    assert marks(graph(ctx.scale_inplace(x, 2.0))) == []
    assert marks(graph(ctx.scale_inplace(w, 2.0))) == []


def test_a_sum_of_two_products_is_no_bias(ctx: Maker) -> None:
    x = ctx.f32(64)
    first, second = (ctx.mul_mat(ctx.f32(64, 32), x) for _ in range(2))
    graph = Graph().build_forward_expand(ctx.add(first, second))
    gather(graph, lambda group: group.pattern == "mul_mats")
    assert graph.marks[second].nodes == (first, second)  # type: ignore[attr-defined]


def test_a_sum_of_experts_in_two_parts_of_a_graph_is_not_joined(ctx: Maker) -> None:
    parts = ctx.mul(ctx.f32(64, 3, 2), ctx.f32(1, 3, 2))
    views = [ctx.view_2d(parts, 64, 2, parts.nb[2], i * parts.nb[1]) for i in range(3)]
    graph = Graph().build_forward_expand(ctx.add(ctx.add(views[0], views[1]), views[2]))
    end = len(graph)
    first = next(i for i, node in enumerate(graph.nodes) if node.op is Op.ADD)
    for part in (graph.view(0, first + 1), graph.view(first + 1, end)):
        gather(part, lambda _: True)
        assert groups(part) == []


def test_products_of_a_gated_unit_stay_with_it(ctx: Maker) -> None:
    def graph() -> Graph:
        x = ctx.f32(64, 3)
        unit = ctx.swiglu_split(*(ctx.mul_mat(ctx.f32(64, 32), x) for _ in range(2)))
        return Graph().build_forward_expand(unit, ctx.scale(ctx.mul_mat(ctx.f32(64, 16), x), 2.0))

    for can, want in ((True, ["glu"]), (False, ["mul_mats"])):
        made = graph()
        gather(made, lambda group: can or group.pattern == "mul_mats")  # noqa: B023
        assert [g.pattern for g in made.marks.values() if isinstance(g, Group)] == want


def test_only_the_named_patterns_are_looked_for(ctx: Maker) -> None:
    graph = Graph().build_forward_expand(ctx.normed(ctx.f32(64, 3)))
    assert fuse(graph, lambda _: True, names=frozenset({"glu"})) == graph.nodes


def test_products(ctx: Maker) -> None:
    x, w, v = ctx.f32(32, 3), ctx.f32(32, 64), ctx.f32(32, 64)
    bias = ctx.f32(64)
    assert found(ctx.add(ctx.mul_mat(w, x), bias)) == [("mul_mat", "add")]
    assert found(ctx.add(ctx.f32(64, 3), ctx.mul_mat(w, x))) == [("mul_mat", "add")]
    assert found(ctx.add(ctx.f32(64, 3, 2), ctx.mul_mat(w, x))) == []  # the product is repeated
    assert found(ctx.swiglu_split(ctx.mul_mat(w, x), ctx.mul_mat(v, x))) == [("gate", "up", "glu")]
    assert found(ctx.swiglu(ctx.mul_mat(w, x))) == [("gate", "glu")]
    both = ctx.add(ctx.mul_mat(w, x), bias), ctx.add(ctx.mul_mat(v, x), bias)
    assert found(ctx.geglu_split(*both)) == [("gate", "gate_add", "up", "up_add", "glu")]
    other = ctx.mul_mat(v, ctx.f32(32, 3))
    assert found(ctx.swiglu_split(ctx.mul_mat(w, x), other)) == []
    for prec, groups_of in (("default", [("mul_mat", "add")]), ("f32", [])):
        assert found(ctx.add(ctx.prec_set_src(ctx.mul_mat(w, x), prec, 1), bias)) == groups_of


def test_the_last_node_has_the_choice(ctx: Maker) -> None:
    product = ctx.mul_mat(ctx.f32(32, 64), ctx.f32(32, 3))
    biased = ctx.add(product, ctx.f32(64))
    result = ctx.normed(ctx.add(biased, ctx.f32(64, 3)))
    assert found(result) == [("mul_mat", "add"), ("add", "norm", "mul")]


def test_a_shorter_pattern_is_asked_for_where_the_longer_is_not_taken(ctx: Maker) -> None:
    graph = Graph().build_forward_expand(ctx.normed(ctx.add(ctx.f32(64, 3), ctx.f32(64, 3))))
    items = fuse(graph, lambda group: "add" not in group)
    assert [tuple(i.parts) if isinstance(i, Group) else i.op.name for i in items] == ["ADD", ("norm", "mul")]


def test_fusion_can_be_turned_off(ctx: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph().build_forward_expand(ctx.normed(ctx.f32(64, 3)))
    monkeypatch.setenv("GGMLB_FUSE", "0")
    assert fuse(graph, lambda _: True) == graph.nodes


# -- what forbids it ---------------------------------------------------------------------------


def test_a_result_that_another_node_reads_is_not_dropped(ctx: Maker) -> None:
    normed = ctx.rms_norm(ctx.f32(64, 3), 1e-6)
    graph = Graph().build_forward_expand(ctx.mul(normed, ctx.f32(64)), ctx.silu(normed))
    assert groups(graph) == []


def test_a_result_that_another_part_of_the_graph_reads_is_not_dropped(ctx: Maker) -> None:
    normed = ctx.rms_norm(ctx.f32(64, 3), 1e-6)
    graph = Graph().build_forward_expand(ctx.mul(normed, ctx.f32(64)), ctx.silu(normed))
    part = graph.view(0, 2)
    assert [n.op.name for n in part.nodes] == ["RMS_NORM", "MUL"]
    assert groups(part) == []
    assert groups(part.view(0, 2)) == []
    assert len(groups(Graph(part.nodes))) == 1  # on its own, it would be


@pytest.mark.parametrize("flag", ["set_output", "set_input"])
def test_a_flagged_result_is_not_dropped(ctx: Maker, flag: str) -> None:
    normed = ctx.rms_norm(ctx.f32(64), 1e-6)
    getattr(ctx, flag)(normed)
    assert found(ctx.mul(normed, ctx.f32(64))) == []


def test_a_flagged_sum_is_kept(ctx: Maker) -> None:
    total = ctx.set_output(ctx.add(ctx.f32(64), ctx.f32(64)))
    (group,) = groups(Graph().build_forward_expand(ctx.rms_norm(total, 1e-6)))
    assert group.kept == (total,)


def test_what_a_user_placed_is_not_dropped(ctx: Maker) -> None:
    graph = Graph().build_forward_expand(ctx.normed(ctx.f32(64, 3)))
    with alloc_ctx_tensors(ctx, cpu_buffer_type()) as buffer:
        assert groups(graph) == []
        buffer.usage = BufferUsage.COMPUTE
        assert len(groups(graph)) == 1


def test_an_in_place_result_is_not_dropped(ctx: Maker) -> None:
    assert found(ctx.mul(ctx.rms_norm_inplace(ctx.f32(64), 1e-6), ctx.f32(64))) == []


def test_only_float32_passes_between_nodes(ctx: Maker) -> None:
    half = ctx.new_tensor(DType.F16, (64, 3))
    assert found(ctx.rms_norm(ctx.add(half, half), 1e-6)) == []


def test_an_exact_place_is_allowed_and_an_overlap_is_not(ctx: Maker) -> None:
    x = ctx.silu(ctx.f32(64, 3))
    result = ctx.normed(x)
    graph = placed(Graph().build_forward_expand(result))
    assert overlap(result, x)
    assert len(groups(graph)) == 1
    result.offset += 64
    assert groups(graph) == []
    result.offset = 1 << 20
    assert len(groups(graph)) == 1


def test_a_product_may_not_lie_over_its_operand(ctx: Maker) -> None:
    """The operand dies at the product, and the bias's result may be given its memory."""
    x = ctx.silu(ctx.f32(64, 3))
    result = ctx.add(ctx.mul_mat(ctx.f32(64, 64), x), ctx.f32(64))
    graph = placed(Graph().build_forward_expand(result))
    assert len(groups(graph)) == 1
    result.offset = x.offset
    assert groups(graph) == []


def test_results_may_not_overlap(ctx: Maker) -> None:
    total = ctx.add(ctx.f32(64, 3), ctx.f32(64, 3))
    result = ctx.normed(total)
    graph = placed(Graph().build_forward_expand(ctx.set_output(total), result))
    (group,) = groups(graph)
    result.offset = group["norm"].offset = total.offset
    assert [tuple(g.parts) for g in groups(graph)] == [("norm", "mul")]


@pytest.mark.parametrize("later", ["gate", "up"])
def test_an_operand_of_either_product_that_is_overwritten_forbids_it(ctx: Maker, later: str) -> None:
    """Whichever product comes first, what is added to it is written before the unit."""

    def graph(*, is_written: bool) -> Graph:
        x, bias = ctx.f32(64, 3), ctx.f32(64)
        first = ctx.add(ctx.mul_mat(ctx.f32(64, 64), x), bias)
        graph = Graph().build_forward_expand(first)
        if is_written:
            graph.build_forward_expand(ctx.scale_inplace(bias, 2.0))
        second = ctx.add(ctx.mul_mat(ctx.f32(64, 64), x), ctx.f32(64))
        gate, up = (second, first) if later == "gate" else (first, second)
        return graph.build_forward_expand(ctx.swiglu_split(gate, up))

    assert [group.pattern for group in groups(graph(is_written=False))] == ["glu"]
    assert "glu" not in [group.pattern for group in groups(graph(is_written=True))]


def test_an_operand_that_is_overwritten_in_between_forbids_it(ctx: Maker) -> None:
    x = ctx.f32(64, 3)
    normed = ctx.rms_norm(x, 1e-6)
    written = ctx.scale_inplace(x, 2.0)
    w = ctx.f32(64)
    graph = Graph().build_forward_expand(normed, written, ctx.mul(normed, w))
    assert groups(graph) == []
    graph = Graph().build_forward_expand(normed, ctx.scale(x, 2.0), ctx.mul(normed, w))
    assert len(groups(graph)) == 1


def test_a_kept_sum_that_is_read_in_between_forbids_it(ctx: Maker) -> None:
    total = ctx.add(ctx.f32(64), ctx.f32(64))
    normed = ctx.rms_norm(total, 1e-6)
    graph = Graph().build_forward_expand(normed, ctx.silu(total), ctx.mul(normed, ctx.f32(64)))
    assert [tuple(g.parts) for g in groups(graph)] == [("norm", "mul")]


# -- gathering ---------------------------------------------------------------------------------


def test_nodes_that_stand_apart_are_gathered(ctx: Maker) -> None:
    roped, rows, put = decode_layer_head(ctx)
    far = ctx.silu(ctx.f32(64))
    graph = Graph().build_forward_expand(rows, far, put)
    assert graph.nodes == [roped, rows, far, put]
    gather(graph, lambda _: True)
    assert graph.nodes[:4] == [far, roped, rows, put]
    # The allocator is told how long the operands are needed, by views that nobody computes.
    assert [(n.op, n.src) for n in graph.nodes[4:]] == [(Op.NONE, (s,)) for s in roped.src if s is not None]


def test_a_gathered_unit_is_not_placed_over_its_operand(ctx: Maker) -> None:
    def unit() -> Graph:
        x = ctx.silu(ctx.f32(32, 3))
        both = (ctx.mul_mat(ctx.f32(32, 32), x) for _ in range(2))
        return Graph().build_forward_expand(ctx.swiglu_split(*both))

    assert groups(placed(unit())) == []
    graph = unit()
    gather(graph, lambda _: True)
    assert len(groups(placed(graph))) == 1


def test_a_view_stays_behind_what_it_views(ctx: Maker) -> None:
    total = ctx.add(ctx.f32(64), ctx.f32(64))
    normed = ctx.rms_norm(total, 1e-6)
    view, far = ctx.view_1d(total, 32), ctx.silu(ctx.f32(64))
    result = ctx.mul(normed, ctx.f32(64))
    late = ctx.view_1d(total, 16)
    graph = Graph().build_forward_expand(normed, view, far, result, ctx.silu(late), ctx.silu(view))
    n = len(graph)
    gather(graph, lambda _: True)
    assert graph.nodes[:6] == [far, total, normed, view, result, late]
    assert len(graph) == n


def test_an_owner_s_plan_asks_marked_groups_whether_they_still_fit(ctx: Maker) -> None:
    asked = []

    def can_fuse(group: Group) -> bool:
        asked.append(group)
        return True

    x = ctx.normed(ctx.normed(ctx.f32(64, 3)))
    graph = Graph().build_forward_expand(x)
    gather(graph, can_fuse)
    graph.owner_checks = True
    assert len(graph.marks) == len(asked) == 2
    placed(graph)
    assert fuse(graph, can_fuse, by_place=False)[-1] is graph.marks[x]
    assert len(asked) == 2, "where tensors lie does not matter"
    fuse(graph, can_fuse)
    assert len(asked) == 4
    inner = x.src[0]
    assert inner is not None
    part = Graph(graph.nodes)
    part.whole, part.marks, part.owner_checks = Graph([*graph.nodes, ctx.silu(inner)]), graph.marks, True
    assert len([item for item in fuse(part, can_fuse, by_place=False) if isinstance(item, Group)]) == 1
