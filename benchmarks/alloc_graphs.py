"""Graphs of the kinds that people run, for benchmarks of the allocators.

Each function builds on a context with one method per ggml function: `ggmlb.Context`, or ggml itself
behind the same names. `ctx.weight(dtype, *ne)` gives a leaf that lies in a buffer already.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from ggmlb.core.dtypes import DType

F32, F16, I32, Q4_0 = DType.F32, DType.F16, DType.I32, DType.Q4_0
SIZE = {F32: 4, F16: 2}
KINDS = ["add", "mul", "scale", "gelu", "norm", "mul_mat", "concat", "view", "reshape", "soft_max", "cont"]


def bert(ctx: Any, n_layer: int, n_embd: int, n_head: int, n_tokens: int, n_batch: int) -> list[Any]:
    """A BERT encoder over `n_batch` texts of `n_tokens`, with mean pooling."""
    n, d = n_tokens * n_batch, n_embd // n_head
    tokens = ctx.set_input(ctx.new_tensor(I32, (n,)))
    positions = ctx.set_input(ctx.new_tensor(I32, (n,)))
    mask = ctx.set_input(ctx.new_tensor(F32, (n_tokens, n_tokens, 1, n_batch)))
    pool = ctx.set_input(ctx.new_tensor(F32, (n, n_batch)))

    def linear(x: Any, n_in: int, n_out: int) -> Any:
        return ctx.add(ctx.mul_mat(ctx.weight(F16, n_in, n_out), x), ctx.weight(F32, n_out))

    def layer_norm(x: Any) -> Any:
        return ctx.add(ctx.mul(ctx.norm(x, 1e-12), ctx.weight(F32, n_embd)), ctx.weight(F32, n_embd))

    def heads(x: Any) -> Any:
        return ctx.permute(ctx.reshape_4d(x, d, n_head, n_tokens, n_batch), 0, 2, 1, 3)

    x = ctx.get_rows(ctx.weight(F32, n_embd, 30000), tokens)
    x = layer_norm(ctx.add(x, ctx.get_rows(ctx.weight(F32, n_embd, 512), positions)))
    for _ in range(n_layer):
        q = heads(linear(x, n_embd, n_embd))
        k = heads(linear(x, n_embd, n_embd))
        v = ctx.reshape_4d(linear(x, n_embd, n_embd), d, n_head, n_tokens, n_batch)
        v = ctx.cont(ctx.permute(v, 1, 2, 0, 3))
        scores = ctx.soft_max_ext(ctx.mul_mat(k, q), mask, 1 / math.sqrt(d), 0.0)
        y = ctx.cont(ctx.permute(ctx.mul_mat(v, scores), 0, 2, 1, 3))
        y = linear(ctx.reshape_2d(y, n_embd, n), n_embd, n_embd)
        x = layer_norm(ctx.add(y, x))
        y = linear(ctx.gelu(linear(x, n_embd, 4 * n_embd)), 4 * n_embd, n_embd)
        x = layer_norm(ctx.add(y, x))
    return [ctx.mul_mat(ctx.cont(ctx.transpose(x)), pool)]


def llama(
    ctx: Any,
    n_layer: int,
    n_embd: int,
    n_head: int,
    n_head_kv: int,
    n_ff: int,
    n_tokens: int,
    n_kv: int,
    n_vocab: int = 32000,
    n_expert: int = 0,
) -> list[Any]:
    """A LLaMA decoder with a cache of keys and values; a mixture of experts if `n_expert`."""
    d = n_embd // n_head
    n_embd_kv = d * n_head_kv
    tokens = ctx.set_input(ctx.new_tensor(I32, (n_tokens,)))
    positions = ctx.set_input(ctx.new_tensor(I32, (n_tokens,)))
    mask = ctx.set_input(ctx.new_tensor(F32, (n_kv, n_tokens)))

    def norm(x: Any) -> Any:
        return ctx.mul(ctx.rms_norm(x, 1e-5), ctx.weight(F32, n_embd))

    def rope(x: Any, heads: int) -> Any:
        x = ctx.reshape_3d(x, d, heads, n_tokens)
        return ctx.rope_ext(x, positions, None, d, 0, 4096, 10000.0, 1.0, 0.0, 1.0, 32.0, 1.0)

    def feed_forward(x: Any) -> Any:
        up = ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_ff), x)
        gate = ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_ff), x)
        return ctx.mul_mat(ctx.weight(Q4_0, n_ff, n_embd), ctx.mul(ctx.silu(gate), up))

    def experts(x: Any) -> Any:
        used = 2
        logits = ctx.mul_mat(ctx.weight(F32, n_embd, n_expert), x)
        probs = ctx.soft_max(logits)
        chosen = ctx.argsort_top_k(probs, used)
        weights = ctx.get_rows(ctx.reshape_3d(probs, 1, n_expert, n_tokens), chosen)
        x = ctx.reshape_3d(x, n_embd, 1, n_tokens)
        up = ctx.mul_mat_id(ctx.weight(Q4_0, n_embd, n_ff, n_expert), x, chosen)
        gate = ctx.mul_mat_id(ctx.weight(Q4_0, n_embd, n_ff, n_expert), x, chosen)
        y = ctx.mul_mat_id(ctx.weight(Q4_0, n_ff, n_embd, n_expert), ctx.mul(ctx.silu(gate), up), chosen)
        y = ctx.mul(y, weights)
        row = n_embd * used * 4
        parts = [ctx.view_2d(y, n_embd, n_tokens, row, i * n_embd * 4) for i in range(used)]
        return ctx.add(parts[0], parts[1])

    x = ctx.get_rows(ctx.weight(Q4_0, n_embd, n_vocab), tokens)
    row = SIZE[F16] * n_embd_kv
    stored = []
    for _layer in range(n_layer):
        y = norm(x)
        q = rope(ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_embd), y), n_head)
        k = rope(ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_embd_kv), y), n_head_kv)
        v = ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_embd_kv), y)
        keys, values = ctx.weight(F16, n_embd_kv * n_kv), ctx.weight(F16, n_embd_kv * n_kv)
        first = (n_kv - n_tokens) * row
        k_store = ctx.cpy(k, ctx.view_1d(keys, n_embd_kv * n_tokens, first))
        v_rows = ctx.view_2d(values, n_tokens, n_embd_kv, 2 * n_kv, 2 * (n_kv - n_tokens))
        v_store = ctx.cpy(ctx.transpose(v), v_rows)
        stored += [k_store, v_store]
        q = ctx.permute(q, 0, 2, 1, 3)
        k = ctx.permute(ctx.view_3d(keys, d, n_head_kv, n_kv, 2 * d, row, 0), 0, 2, 1, 3)
        v = ctx.view_3d(values, n_kv, d, n_head_kv, 2 * n_kv, 2 * n_kv * d, 0)
        scores = ctx.soft_max_ext(ctx.mul_mat(k, q), mask, 1 / math.sqrt(d), 0.0)
        y = ctx.cont_2d(ctx.permute(ctx.mul_mat(v, scores), 0, 2, 1, 3), n_embd, n_tokens)
        x = ctx.add(ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_embd), y), x)
        x = ctx.add((experts if n_expert else feed_forward)(norm(x)), x)
    logits = ctx.set_output(ctx.mul_mat(ctx.weight(Q4_0, n_embd, n_vocab), norm(x)))
    return [*stored, logits]


def unet(ctx: Any, size: int, channels: int, depth: int, n_batch: int) -> list[Any]:
    """A U-Net of convolutions as in diffusion models: the way up reads what the way down made."""
    x = ctx.set_input(ctx.new_tensor(F32, (size, size, 4, n_batch)))

    def conv(x: Any, n_in: int, n_out: int, stride: int = 1) -> Any:
        y = ctx.conv_2d(ctx.weight(F16, 3, 3, n_in, n_out), x, stride, stride, 1, 1, 1, 1)
        return ctx.add(y, ctx.weight(F32, 1, 1, n_out))

    def block(x: Any, n_in: int, n_out: int) -> Any:
        y = conv(ctx.silu(ctx.group_norm(x, 32, 1e-6)), n_in, n_out)
        y = conv(ctx.silu(ctx.group_norm(y, 32, 1e-6)), n_out, n_out)
        if n_in != n_out:
            x = ctx.conv_2d(ctx.weight(F16, 1, 1, n_in, n_out), x, 1, 1, 0, 0, 1, 1)
        return ctx.add(x, y)

    x = conv(x, 4, channels)
    skips, c = [], channels
    for level in range(depth):
        x = block(x, c, channels << level)
        c = channels << level
        skips.append((x, c))
        x = conv(x, c, c, stride=2)
    x = block(block(x, c, c), c, c)
    for skip, n_skip in reversed(skips):
        x = conv(ctx.upscale(x, 2, 0), c, c)
        x = block(ctx.concat(x, skip, 2), c + n_skip, n_skip)
        c = n_skip
    return [ctx.set_output(conv(ctx.silu(ctx.group_norm(x, 32, 1e-6)), c, 4))]


def random_graph(ctx: Any, seed: int) -> list[Any]:
    """A random graph of matrices with rows of 64: element-wise ops, products, views, joins and outputs."""
    rng = random.Random(seed)
    n_nodes = 20 + 3 * seed % 400
    n = 64
    pool: list[tuple[Any, int]] = []  # tensors with their number of rows
    for _ in range(rng.randint(1, 4)):
        rows = rng.randint(1, 64)
        pool.append((ctx.set_input(ctx.new_tensor(F32, (n, rows))), rows))
    outputs = []
    for _ in range(n_nodes):
        # Recent tensors more often: as in a model, with a few long edges.
        a, rows = pool[-1 - min(int(rng.expovariate(0.3)), len(pool) - 1)]
        same = [t for t, r in pool if r == rows]
        kind = rng.choice(KINDS)
        if kind in ("add", "mul"):
            new = getattr(ctx, kind)(a, rng.choice(same)), rows
        elif kind == "scale":
            new = ctx.scale(a, 0.5), rows
        elif kind == "gelu":
            new = ctx.gelu(a), rows
        elif kind == "norm":
            new = ctx.rms_norm(a, 1e-5), rows
        elif kind == "mul_mat":
            new = ctx.mul_mat(ctx.weight(F32, n, n), a), rows
        elif kind == "concat" and rows < 512:
            b, more = rng.choice(pool)
            new = ctx.concat(a, b, 1), rows + more
        elif kind == "view" and rows > 1:
            few = rng.randint(1, rows - 1)
            new = ctx.view_2d(a, n, few, n * 4, rng.randint(0, rows - few) * n * 4), few
        elif kind == "reshape":
            # Rows are contiguous here, so a view of them can always be reshaped.
            new = ctx.reshape_2d(ctx.reshape_1d(a, n * rows), n, rows), rows
        elif kind == "soft_max":
            new = ctx.soft_max(a), rows
        else:
            new = ctx.cont(a), rows
        # ggml overwrites an output that is a view, if a node reads it; so no view is an output here.
        if kind not in ("view", "reshape") and rng.random() < 0.03:
            outputs.append(ctx.set_output(new[0]))
        pool.append(new)
    return [*outputs, pool[-1][0]]


llama_7b = partial(llama, n_layer=32, n_embd=4096, n_head=32, n_head_kv=32, n_ff=11008)
llama_8b = partial(llama, n_layer=32, n_embd=4096, n_head=32, n_head_kv=8, n_ff=14336)

GRAPHS: dict[str, Callable[[Any], list[Any]]] = {
    "BERT, MiniLM-L6: 1 text of 128": partial(
        bert, n_layer=6, n_embd=384, n_head=12, n_tokens=128, n_batch=1
    ),
    "BERT, MiniLM-L6: 32 texts of 128": partial(
        bert, n_layer=6, n_embd=384, n_head=12, n_tokens=128, n_batch=32
    ),
    "BERT, base: 8 texts of 512": partial(bert, n_layer=12, n_embd=768, n_head=12, n_tokens=512, n_batch=8),
    "LLaMA 7B: 1 token of 2048": partial(llama_7b, n_tokens=1, n_kv=2048),
    "LLaMA 7B: 512 tokens": partial(llama_7b, n_tokens=512, n_kv=512),
    "LLaMA 3 8B (grouped queries): 512 tokens of 4096": partial(
        llama_8b, n_tokens=512, n_kv=4096, n_vocab=128256
    ),
    "Mixtral (8 experts): 128 tokens": partial(llama_8b, n_tokens=128, n_kv=512, n_expert=8),
    "U-Net, 64 x 64, 320 channels, 3 levels": partial(unet, size=64, channels=320, depth=3, n_batch=1),
    "U-Net, 256 x 256, 64 channels, 4 levels, batch 2": partial(
        unet, size=256, channels=64, depth=4, n_batch=2
    ),
}
