"""Lowering of recurrent layers: state space models, the gated delta rule, RWKV-7."""

from __future__ import annotations

from ggmlb.backends.common.rules import F32, FLOATS, I32, RESULT, in_rows, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.llvm.kernels import recurrent
from ggmlb.backends.llvm.lowering.context import RULES, LoweringContext, name
from ggmlb.backends.llvm.lowering.elementwise import elementwise
from ggmlb.core.enums import Op
from ggmlb.core.tensor import Tensor

_TAP, _SOFTPLUS, _STATE = 0.15, 0.3, 0.2
"""Time on one thread of a tap of an element, of a softplus, and of a state's element for a token [ns]."""

LEAST_LINES = 16
"""Least number of lines of states (rows of `d_state` elements) computed together by SSM_SCAN."""


@RULES.rule(Op.SSM_CONV, operands(FLOATS, FLOATS), in_rows(0, 1, RESULT))
def _ssm_conv(node: Tensor, ctx: LoweringContext) -> None:
    x, c = node.operand(0), node.operand(1)
    channels, tokens, n_seqs = node.ne[:3]
    args = (
        ctx.address(node), *node.nb[1:3], ctx.address(x), *x.nb[1:3], ctx.address(c), c.nb[1],
        c.ne[0], channels, tokens, n_seqs,
    )  # fmt: skip
    most = -(-channels // ctx.level.lanes) * n_seqs
    chunks = ctx.chunks(node.n_elements * c.ne[0] * _TAP, most)
    ctx.launch(recurrent.ssm_conv, (name(node), name(x), name(c)), args, chunks)


@RULES.rule(Op.SSM_SCAN, operands(*[F32] * 6, I32, out=F32))
def _ssm_scan(node: Tensor, ctx: LoweringContext) -> None:
    s, x, dt, a, b, c, ids = (node.operand(i) for i in range(7))
    width, (dim, heads, tokens, n_seqs) = s.ne[0], x.ne
    times = Mem(None, ctx.scratch(dt.nbytes), dt.dtype, dt.ne, dt.nb)
    elementwise("softplus", (), [times, dt], _SOFTPLUS, ctx)
    together = max(1, LEAST_LINES // max(dim, 1))
    args = (
        ctx.address(node), ctx.address(node) + 4 * x.n_elements, ctx.address(s), ctx.address(ids), ids.nb[0],
        s.ne[3], *ctx.report, ctx.address(x), *x.nb[2:], ctx.address(times), ctx.address(a),
        *(n for t in (b, c) for n in (ctx.address(t), *t.nb[1:])),
        width, dim, heads, heads // b.ne[1], tokens, n_seqs, node.params["k"], together,
    )  # fmt: skip
    work = max(x.n_elements, dim * heads * n_seqs) * width * _STATE
    chunks = ctx.chunks(work, -(-heads // together) * n_seqs)
    params = a.ne[0] == 1, recurrent.known_width(ctx.level, width)
    ctx.launch(recurrent.ssm_scan, params, args, chunks)


def _chunks(ctx: LoweringContext, size: int, heads: int, tokens: int, n_seqs: int) -> int:
    """Number of chunks of a step with a square state per head and sequence."""
    work = size * size * heads * n_seqs * max(tokens, 1) * _STATE
    return ctx.chunks(work, -(-size // recurrent.BLOCK) * heads * n_seqs)


@RULES.rule(Op.RWKV_WKV7, operands(*[F32] * 7, out=F32))
def _rwkv_wkv7(node: Tensor, ctx: LoweringContext) -> None:
    r, state = node.operand(0), node.operand(6)
    (size, heads), n_seqs = r.ne[:2], state.ne[1]
    sizes = size, heads, r.ne[2] // max(n_seqs, 1), n_seqs
    at = ctx.address(node)
    args = (at, at + 4 * r.n_elements, *(ctx.address(node.operand(i)) for i in range(7)), *sizes)
    params = (recurrent.known_width(ctx.level, size),)
    ctx.launch(recurrent.rwkv_wkv7, params, args, _chunks(ctx, *sizes))


@RULES.rule(Op.GATED_DELTA_NET, operands(*[F32] * 6, out=F32))
def _gated_delta_net(node: Tensor, ctx: LoweringContext) -> None:
    q, k, v, g, beta, s = (node.operand(i) for i in range(6))
    size, heads, tokens, n_seqs = v.ne
    at, nbytes = ctx.address(node), -(-4 * size // 64) * 64
    args = (
        size**-0.5 if size else 0.0, at, at + 4 * v.n_elements,
        *(n for t in (q, k, v) for n in (ctx.address(t), *t.nb[1:])),
        *(ctx.address(t) for t in (g, beta, s)),
        size, heads, q.ne[1], tokens, n_seqs, node.params["k"], ctx.scratch(nbytes * ctx.n_threads), nbytes,
    )  # fmt: skip
    chunks = _chunks(ctx, size, heads, tokens, n_seqs)
    params = g.ne[0] == 1, recurrent.known_width(ctx.level, size)
    ctx.launch(recurrent.gated_delta_net, params, args, chunks)
