"""Mamba and Mamba2: the selective scan over the tokens of a sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb import Tensor
from ggmlb.models.text.blocks.block import Recurrent, Weight, split_heads
from ggmlb.models.text.blocks.convolution import convolve

if TYPE_CHECKING:
    from ggmlb.models.text.graph import LayersGraph
    from ggmlb.models.text.keys import Keys


@dataclass(frozen=True)
class Mamba(Recurrent):
    """A recurrent block: a convolution, and the selective scan.

    Attributes:
        n_conv: Width of the convolution [tokens].
        n_inner: Channels.
        n_state: Elements of a channel's state.
        n_dt: Rank of the time steps.
        normalizes: Time step, B and C are normalised (FalconMamba).
    """

    n_conv: int
    n_inner: int
    n_state: int
    n_dt: int
    normalizes: bool

    @classmethod
    def read(cls, keys: Keys) -> Mamba:
        """Read the sizes of all layers; raise a ModelError if metadata is missing or wrong."""
        return cls(
            n_conv=keys.count("ssm.conv_kernel", least=2),
            n_inner=keys.count("ssm.inner_size"),
            n_state=keys.count("ssm.state_size"),
            n_dt=keys.count("ssm.time_step_rank"),
            normalizes=keys.flag("ssm.dt_b_c_rms", False),
        )

    @property
    def states(self) -> Mapping[str, int]:
        """Elements of the convolution's last inputs, and of the scan's states."""
        return {"state_conv": (self.n_conv - 1) * self.n_inner, "state_scan": self.n_state * self.n_inner}

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the products, the convolution and the scan."""
        return [
            Weight("ssm_in.weight", (2 * self.n_inner, n_embd), "product"),
            Weight("ssm_conv1d.weight", (self.n_inner, self.n_conv)),
            Weight("ssm_conv1d.bias", (self.n_inner,)),
            Weight("ssm_x.weight", (self.n_dt + 2 * self.n_state, self.n_inner), "product"),
            Weight("ssm_dt.weight", (self.n_inner, self.n_dt), "product"),
            Weight("ssm_dt.bias", (self.n_inner,)),
            Weight("ssm_a", (self.n_inner, self.n_state)),
            Weight("ssm_d", (self.n_inner,)),
            Weight("ssm_out.weight", (n_embd, self.n_inner), "product"),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of a layer to a graph: each token is mixed with the earlier ones of its sequence."""
        ctx, w, at, sizes = graph.ctx, graph.weights, f"blk.{layer}.", graph.sizes
        both = ctx.reshape_3d(graph.product(at + "ssm_in", x), 2 * self.n_inner, *sizes)
        x, gate = both[..., : self.n_inner], both[..., self.n_inner :]
        x = graph.label(at + "ssm_conv", ctx.silu(convolve(graph, layer, x, "ssm_conv1d")))
        y = ctx.add(self._scan(graph, layer, x), ctx.mul(x, w[at + "ssm_d"]))
        return _output(graph, layer, y, gate)

    def _scan(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """The selective scan: `[n_inner, n_tokens, n_sequences]`."""
        ctx, w, at, (n_tokens, n_sequences) = graph.ctx, graph.weights, f"blk.{layer}.", graph.sizes
        found = graph.product(at + "ssm_x", ctx.reshape_2d(x, self.n_inner, n_tokens * n_sequences))
        found = ctx.reshape_3d(found, found.ne[0], n_tokens, n_sequences)
        dt, b, c = split_heads(ctx, found, ((self.n_dt, 1), (self.n_state, 1), (self.n_state, 1)))
        if self.normalizes:
            dt, b, c = (ctx.rms_norm(part, graph.config.eps) for part in (dt, b, c))
        dt = graph.product(at + "ssm_dt", ctx.reshape_2d(ctx.cont(dt), self.n_dt, n_tokens * n_sequences))
        dt = ctx.reshape_3d(dt, self.n_inner, n_tokens, n_sequences)
        table = graph.states(layer, "state_scan")
        states = ctx.reshape_4d(table, self.n_state, 1, self.n_inner, table.ne[1])
        inputs = ctx.reshape_4d(x, 1, self.n_inner, n_tokens, n_sequences)
        packed = ctx.ssm_scan(states, inputs, dt, w[at + "ssm_a"], b, c, graph.slots)
        return graph.unpack(table, packed, x.ne)


@dataclass(frozen=True)
class Mamba2(Recurrent):
    """A recurrent block: a convolution, and the selective scan of heads, each with one decay.

    Attributes:
        n_conv: Width of the convolution [tokens].
        n_inner: Channels of all heads.
        n_state: Elements of a channel's state.
        n_head: Heads.
        n_group: Groups of heads that share B and C.
    """

    output = "mamba_out"

    n_conv: int
    n_inner: int
    n_state: int
    n_head: int
    n_group: int

    @classmethod
    def read(cls, keys: Keys) -> Mamba2:
        """Read the sizes of all layers; raise a ModelError if metadata is missing or wrong."""
        n_inner, n_head = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank")
        n_group = keys.count("ssm.group_count")
        for key, n, of in (
            ("ssm.time_step_rank", n_head, n_inner),
            ("ssm.group_count", n_group, n_inner),
            ("ssm.group_count", n_group, n_head),
        ):
            if of % n:
                raise keys.error(key, f"it is {n}; it must divide {of}")
        n_conv, n_state = keys.count("ssm.conv_kernel", least=2), keys.count("ssm.state_size")
        return cls(n_conv, n_inner, n_state, n_head, n_group)

    @property
    def n_channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.n_inner + 2 * self.n_group * self.n_state

    @property
    def states(self) -> Mapping[str, int]:
        """Elements of the convolution's last inputs, and of the scan's states."""
        return {"state_conv": (self.n_conv - 1) * self.n_channels, "state_scan": self.n_state * self.n_inner}

    def weights(self, n_embd: int) -> Sequence[Weight]:
        """Return the weights of the products, the convolution, the scan and the norm."""
        return [
            Weight("ssm_in.weight", (self.n_inner + self.n_channels + self.n_head, n_embd), "product"),
            Weight("ssm_conv1d.weight", (self.n_channels, self.n_conv)),
            Weight("ssm_conv1d.bias", (self.n_channels,), is_optional=True),
            Weight("ssm_dt.bias", (self.n_head,)),
            Weight("ssm_a", (self.n_head, 1)),
            Weight("ssm_d", (self.n_head, 1)),
            Weight("ssm_norm.weight", (self.n_group, self.n_inner // self.n_group), is_optional=True),
            Weight("ssm_out.weight", (n_embd, self.n_inner), "product"),
        ]

    def apply(self, graph: LayersGraph, layer: int, x: Tensor) -> Tensor:
        """Add the nodes of a layer to a graph: each token is mixed with the earlier ones of its sequence."""
        ctx, w, at, sizes = graph.ctx, graph.weights, f"blk.{layer}.", graph.sizes
        found = graph.product(at + "ssm_in", x)
        found = ctx.reshape_3d(found, found.ne[0], *sizes)
        end = self.n_inner + self.n_channels
        gate, x, dt = found[..., : self.n_inner], found[..., self.n_inner : end], found[..., end:]
        x = graph.label(at + "ssm_conv", ctx.silu(convolve(graph, layer, x, "ssm_conv1d")))
        y = self._scan(graph, layer, x, ctx.add(ctx.cont(dt), w[at + "ssm_dt.bias"]))
        return _output(graph, layer, y, gate)

    def _scan(self, graph: LayersGraph, layer: int, x: Tensor, dt: Tensor) -> Tensor:
        """The selective scan, `[n_inner, n_tokens, n_sequences]`; rows of `x` are the inputs, B and C."""
        ctx, w, at, sizes = graph.ctx, graph.weights, f"blk.{layer}.", graph.sizes
        size, shared = self.n_inner // self.n_head, (self.n_state, self.n_group)
        inputs, b, c = split_heads(ctx, x, ((size, self.n_head), shared, shared))
        table = graph.states(layer, "state_scan")
        states = ctx.reshape_4d(table, self.n_state, size, self.n_head, table.ne[1])
        packed = ctx.ssm_scan(states, inputs, dt, w[at + "ssm_a"], b, c, graph.slots)
        y = graph.unpack(table, packed, inputs.ne)
        y = ctx.add(y, ctx.mul(inputs, w[at + "ssm_d"]))
        return ctx.reshape_3d(y, self.n_inner, *sizes)


def _output(graph: LayersGraph, layer: int, y: Tensor, gate: Tensor) -> Tensor:
    """Return the product of a scan, times its gate and normalised if there is a norm, with `ssm_out`."""
    ctx, at, norm = graph.ctx, f"blk.{layer}.", graph.weights.get(f"blk.{layer}.ssm_norm.weight")
    y = ctx.swiglu_split(ctx.cont(gate), graph.label(at + "ssm_scan", y))
    y = graph.label(at + "ssm_act", y)
    n_inner, n_tokens, n_sequences, _ = y.ne
    if norm is not None:
        n, n_group = norm.ne[:2]
        y = graph.norm(at + "ssm_norm", ctx.reshape_4d(y, n, n_group, n_tokens, n_sequences), n_group, n)
    y = graph.product(at + "ssm_out", ctx.reshape_2d(y, n_inner, n_tokens * n_sequences))
    return graph.outputs_of(layer, y)
