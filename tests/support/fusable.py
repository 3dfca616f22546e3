"""Random small graphs with and without instances of the fusion patterns; a llama-like layer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from ggmlb import Context, DType, Graph
from ggmlb.core.enums import NO_OPS, TensorFlag
from ggmlb.core.tensor import Tensor

ROW, HEADS, CACHE_ROWS = 64, 4, 16


class RandomGraph:
    """A graph drawn from a seed; the same seed gives the same graph and the same data.

    Attributes:
        leafs: The tensors to be set, with their values.
        graph: The graph.
        nodes: Its nodes, in the order in which they were drawn.
        outputs: Tensors whose data must come out right, however the graph is computed.
    """

    def __init__(self, seed: int, *, in_place: bool, experts: bool = True) -> None:
        self._random = random.Random(seed)
        self._rng = np.random.default_rng(seed)
        self.ctx = Context()
        self.leafs: list[tuple[Tensor, np.ndarray]] = []
        self._n = self._random.choice((1, 3, 12))
        self._values = [self._leaf(ROW, self._n) for _ in range(2)]
        self._in_place = in_place
        self.outputs: list[Tensor] = []
        self._map()
        for _ in range(self._random.randint(2, 5)):
            self._random.choice(_STEPS if experts else _STEPS[:-1])(self)
        self._map()
        last = self._values[-1]
        results = [*self.outputs, last]
        self.graph = Graph().build_forward_expand(*results)
        self.nodes = tuple(self.graph.nodes)
        for t in (last, *self._random.sample(self.nodes, 1)):
            if t.op not in NO_OPS and not self._is_overwritten(t):
                self.ctx.set_output(t)
        self.outputs = [t for t in self.graph.nodes if t.flags & TensorFlag.OUTPUT]

    def _is_overwritten(self, t: Tensor) -> bool:
        root = t.view_src or t
        return any(n.view_src is root and n is not t for n in self.graph.nodes)

    def _leaf(self, *ne: int, dtype: DType = DType.F32, below: int = 0) -> Tensor:
        t = self.ctx.set_input(self.ctx.new_tensor(dtype, ne))
        shape = tuple(reversed(ne))
        if below:
            data = self._rng.permutation(below)[: ne[0]].astype(np.int32).reshape(shape)
        else:
            data = self._rng.standard_normal(shape).astype(np.float32)
        self.leafs.append((t, data))
        return t

    def _any(self) -> Tensor:
        return self._random.choice(self._values[-3:])

    def _maybe(self, part: float = 0.5) -> bool:
        return self._random.random() < part

    def _put(self, *chain: Tensor) -> None:
        """Note the last value of a chain, and now and then an inner one, which is then used again."""
        for inner in chain[:-1]:
            if inner.ne == (ROW, self._n, 1, 1) and self._maybe(0.15):
                self._values.append(inner)
        self._values.append(chain[-1])

    def _norms(self) -> None:
        ctx, chain = self.ctx, [self._any()]
        if self._maybe():
            chain.append(ctx.add(chain[-1], self._any()))
        chain.append((ctx.rms_norm if self._maybe(0.7) else ctx.norm)(chain[-1], 1e-5))
        for op, wanted in ((ctx.mul, 0.9), (ctx.add, 0.4)):
            if self._maybe(wanted):
                other = (
                    self._any() if self._maybe(0.2) else self._leaf(ROW, self._random.choice((1, self._n)))
                )
                chain.append(op(chain[-1], other))
        self._put(*chain[1:])

    def _bias(self) -> None:
        ctx = self.ctx
        product = ctx.mul_mat(self._leaf(ROW, ROW), self._any())
        other = self._any() if self._maybe() else self._leaf(ROW)
        self._put(product, ctx.add(product, other))

    def _glu(self) -> None:
        ctx, x = self.ctx, self._any()
        add = self._maybe(0.3)
        if self._maybe():
            product = ctx.mul_mat(self._leaf(ROW, 2 * ROW), x)
            if add:
                product = ctx.add(product, self._leaf(2 * ROW))
            self._put(product, (ctx.geglu_swapped if self._maybe(0.3) else ctx.swiglu)(product))
        else:
            both = [ctx.mul_mat(self._leaf(ROW, ROW), x) for _ in range(2)]
            sums = [ctx.add(p, self._leaf(ROW)) for p in both] if add else both
            self._put(*both, *sums, ctx.swiglu_split(*sums))

    def _cache(self) -> None:
        ctx, n, size = self.ctx, self._n, ROW // HEADS
        positions = self._leaf(n, dtype=DType.I32, below=50)
        ids = self._leaf(n, dtype=DType.I32, below=CACHE_ROWS)
        mode, normed, whole, x = self._random.choice((0, 2)), self._maybe(), self._maybe(), self._any()

        def rotated(x: Tensor) -> Tensor:
            heads = ctx.reshape_3d(x, size, HEADS, n)
            if normed:
                heads = ctx.mul(ctx.rms_norm(heads, 1e-5), self._leaf(size))
            roped = ctx.rope(heads, positions, size, mode)
            return ctx.view_2d(roped, ROW, n, roped.nb[2], 0)

        def product() -> Tensor:
            return ctx.mul_mat(self._leaf(ROW, ROW), x)

        rows = rotated(product() if whole else x)
        put = [ctx.set_rows(self._leaf(ROW, CACHE_ROWS), rows, ids)]
        if whole:
            self.outputs.append(ctx.silu(rotated(product())))
            put.append(ctx.set_rows(self._leaf(ROW, CACHE_ROWS), product(), ids))
        if self._maybe(0.2):
            self._put(ctx.silu(rows))
        self.outputs += put
        for t in put:
            ctx.set_output(t)

    def _experts(self) -> None:
        """Experts in the order of their weights: that of top-k, and so of slots, is undefined."""
        x = self._any()
        router, gate, up, down = self._leaf(ROW, 6), *[self._leaf(ROW, ROW, 6) for _ in range(3)]
        n_used, clamp, div = self._random.choice((2, 3)), self._maybe(), self._maybe(0.8)
        sums = mixture(
            self.ctx, x, router, gate, up, down, n_used=n_used, is_sorted=True, clamp=clamp, div=div
        )  # fmt: skip
        self._put(sums)

    def _map(self) -> None:
        self._put(self.ctx.silu(self._any()))

    def _overwrite(self) -> None:
        if self._in_place:
            self._put(self.ctx.scale_inplace(self._values[-1], 0.5))


_STEPS: list[Callable[[RandomGraph], None]] = [
    RandomGraph._norms,
    RandomGraph._norms,
    RandomGraph._bias,
    RandomGraph._glu,
    RandomGraph._cache,
    RandomGraph._map,
    RandomGraph._overwrite,
    RandomGraph._experts,
]


def mixture(
    ctx: Context,
    x: Tensor,
    router: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    n_used: int,
    is_sorted: bool = False,
    clamp: bool = True,
    div: bool = True,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """Return the outputs of a mixture of experts, as models and llama.cpp build it.

    Args:
        ctx: Where nodes are made.
        x: Tokens.
        router: The weights of the experts' logits.
        gate: The experts' weights; so are `up` and `down`.
        up: See `gate`.
        down: See `gate`.
        n_used: Experts per token.
        is_sorted: Whether they are the first of all, sorted; else by `top_k`.
        clamp: Whether the sum of weights has a least value.
        div: Whether weights are divided by their sum.
        biases: Of gate, up and down, for each expert.
    """
    n_embd, n = x.ne[:2]
    shares = ctx.soft_max(ctx.mul_mat(router, x))
    chosen = (ctx.argsort_top_k if is_sorted else ctx.top_k)(shares, n_used)
    weights = ctx.get_rows(ctx.reshape_3d(shares, 1, shares.ne[0], n), chosen)
    if div:
        weights = ctx.reshape_2d(weights, n_used, n)
        total = ctx.sum_rows(weights)
        weights = ctx.div(weights, ctx.clamp(total, 2.0**-14, np.inf) if clamp else total)
        weights = ctx.reshape_3d(weights, 1, n_used, n)
    rows = ctx.reshape_3d(x, n_embd, 1, n)

    def product(i: int, w: Tensor, x: Tensor) -> Tensor:
        y = ctx.mul_mat_id(w, x, chosen)
        return ctx.add_id(y, biases[i], chosen) if biases else y

    y = ctx.swiglu_split(product(0, gate, rows), product(1, up, rows))
    parts = ctx.mul(product(2, down, y), weights)
    total, *rest = (ctx.view_2d(parts, n_embd, n, parts.nb[2], i * parts.nb[1]) for i in range(n_used))
    for part in rest:
        total = ctx.add(total, part)
    return total


class DecodeLayer:
    """A layer of a llama-like model at work on `n` new tokens, its cache written in place.

    Args:
        n: New tokens.
        n_embd: Sizes of the model, and so on.
        n_ff: See `n_embd`.
        n_head: See `n_embd`.
        n_ctx: See `n_embd`.
        n_layer: See `n_embd`.
        weights: Type of matrices.
        norms: Whether queries and keys are normalised.
        n_expert: Experts, of which each token uses two; 0: none.

    Attributes:
        leafs: The tensors to be set, with their values.
        graph: The graph.
        result: ne `[n_embd, n]`.
    """

    def __init__(
        self,
        n: int = 1,
        *,
        n_embd: int = 128,
        n_ff: int = 256,
        n_head: int = 4,
        n_ctx: int = 32,
        n_layer: int = 1,
        weights: DType = DType.F32,
        norms: bool = False,
        n_expert: int = 0,
    ) -> None:
        ctx = self.ctx = Context()
        rng = np.random.default_rng(0)
        self.leafs: list[tuple[Tensor, np.ndarray]] = []
        self.graph = Graph()

        def leaf(dtype: DType, data: np.ndarray) -> Tensor:
            t = ctx.set_input(ctx.new_tensor(dtype, data.shape[::-1]))
            self.leafs.append((t, data))
            return t

        def matrix(n_in: int, *n_out: int, dtype: DType = weights) -> Tensor:
            return leaf(dtype, rng.standard_normal((*n_out, n_in), np.float32) / np.float32(n_in) ** 0.5)

        def scale(n: int = n_embd) -> Tensor:
            return leaf(DType.F32, rng.uniform(0.5, 1.5, n).astype(np.float32))

        x = leaf(DType.F32, rng.standard_normal((n, n_embd), np.float32))
        positions = leaf(DType.I32, np.arange(n, dtype=np.int32))
        ids = leaf(DType.I64, np.arange(n, dtype=np.int64))
        mask = np.full((n, n_ctx), -np.inf, np.float32)
        mask[np.tri(n, n_ctx, dtype=bool)] = 0
        mask_t = leaf(DType.F16, mask.astype(np.float16))
        d = n_embd // n_head
        for _ in range(n_layer):
            normed = ctx.mul(ctx.rms_norm(x, 1e-5), scale())
            q, k, v = (ctx.mul_mat(matrix(n_embd, n_embd), normed) for _ in range(3))
            q, k = (ctx.reshape_3d(t, d, n_head, n) for t in (q, k))
            if norms:
                q, k = (ctx.mul(ctx.rms_norm(t, 1e-5), scale(d)) for t in (q, k))
            q, k = (ctx.rope(t, positions, d, 0) for t in (q, k))
            self.graph.build_forward_expand(q, v, k)
            caches = [leaf(DType.F16, np.zeros((n_ctx, n_embd), np.float16)) for _ in range(2)]
            rows = ctx.view_2d(k, n_embd, n, k.nb[2], 0)
            put = [ctx.set_rows(cache, t, ids) for cache, t in zip(caches, (rows, v), strict=True)]
            self.graph.build_forward_expand(*put)
            size = 2 * d
            keys, values = (ctx.view_3d(t, d, n_ctx, n_head, size * n_head, size, 0) for t in put)
            out = ctx.flash_attn_ext(ctx.permute(q, 0, 2, 1, 3), keys, values, mask_t, d**-0.5, 0.0, 0.0)
            attended = ctx.mul_mat(matrix(n_embd, n_embd), ctx.reshape_2d(out, n_embd, n))
            x = ctx.add(attended, x)
            normed = ctx.mul(ctx.rms_norm(x, 1e-5), scale())
            if n_expert:
                router = matrix(n_embd, n_expert, dtype=DType.F32)
                gates, ups = (matrix(n_embd, n_expert, n_ff) for _ in range(2))
                down = matrix(n_ff, n_expert, n_embd)
                x = ctx.add(mixture(ctx, normed, router, gates, ups, down, n_used=2), x)
                continue
            gate, up = (ctx.mul_mat(matrix(n_embd, n_ff), normed) for _ in range(2))
            x = ctx.add(ctx.mul_mat(matrix(n_ff, n_embd), ctx.swiglu_split(gate, up)), x)
        self.result = ctx.set_output(ctx.mul(ctx.rms_norm(x, 1e-5), scale()))
        self.graph.build_forward_expand(self.result)
