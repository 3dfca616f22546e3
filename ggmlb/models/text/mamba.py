"""MambaGraph: the graph of one step of a recurrent language model, from tokens to logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb import DType, Tensor
from ggmlb.models.text.step import StepGraph

if TYPE_CHECKING:
    from ggmlb.models.text.changes import Changes
    from ggmlb.models.text.config import State, TextConfig
    from ggmlb.models.text.state_cache import StateCache


class MambaGraph(StepGraph):
    """The graph for `n_tokens` more tokens of each of `n_sequences` sequences.

    The slots of the sequences are inputs: one graph serves every step of its sizes.

    There are no padding tokens, because each token changes the states; sequences may be padded.

    Attributes:
        ids: Input: token numbers, one sequence after the other, i32 `[n_tokens * n_sequences]`.
        slots: Input: the slot of each sequence, i32 `[n_sequences]`.
        chosen: Input: tokens whose logits are computed, i32 `[n_out]`; `None` where all are, or none.
        logits: Output: f32 `[n_vocab, n_out]`; `None` where `n_out` is 0.
        hidden: Output: normalised hidden states, f32 `[n_embd, n_out]`; `None` where `n_out` is 0.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: StateCache,
        n_tokens: int,
        n_sequences: int,
        n_out: int,
        changes: Changes,
    ) -> None:
        super().__init__(config, weights, changes)
        assert config.state is not None
        self._state: State = config.state
        self._sizes = (n_tokens, n_sequences)
        ctx, n = self._ctx, n_tokens * n_sequences
        self.ids = self._input("ids", DType.I32, n)
        self.slots = self._input("slots", DType.I32, n_sequences)
        self.chosen = self._input("chosen", DType.I32, n_out) if 0 < n_out < n else None
        x = self._begin(self.ids)
        for layer in self.layers:
            y = self._mix(layer, self._norm(f"blk.{layer}.attn_norm", x), memory)
            if layer == config.n_layer - 1 and self.chosen is not None:
                y, x = ctx.get_rows(y, self.chosen), ctx.get_rows(x, self.chosen)
            x = self._end(layer, ctx.add(y, x))
        self.hidden: Tensor | None = None
        self.logits: Tensor | None = None
        if n_out:
            self.hidden, self.logits = self._head(x)

    def set_inputs(
        self, ids: npt.NDArray[np.int32], slots: npt.NDArray[np.int32], chosen: npt.NDArray[np.int32]
    ) -> None:
        """Write token ids, each sequence's state slot, and the indices `chosen` of tokens with outputs."""
        if self.layers.start == 0:
            self.write(self.ids, ids)
        self.write(self.slots, slots)
        if self.chosen is not None:
            self.write(self.chosen, chosen)

    def _mix(self, layer: int, x: Tensor, memory: StateCache) -> Tensor:
        """Mix each token with the earlier ones of its sequence, by way of the layer's states.

        Args:
            layer: The layer.
            x: Normalised hidden states, `[n_embd, n_tokens * n_sequences]`.
            memory: States, which are replaced by those after the last token.

        Returns:
            Of the shape of `x`.
        """
        ctx, w, s, at = self._ctx, self._weights, self._state, f"blk.{layer}."
        n_tokens, n_sequences = self._sizes
        both = ctx.reshape_3d(self._product(at + "ssm_in", x), 2 * s.n_inner, n_tokens, n_sequences)
        halves = (
            ctx.view_3d(
                both, s.n_inner, n_tokens, n_sequences, both.nb[1], both.nb[2], i * s.n_inner * both.nb[0]
            )
            for i in range(2)
        )
        x, gate = halves
        x = self._name(at + "ssm_conv", self._convolve(at, x, memory.convolved[layer]))
        y = ctx.add(self._scan(at, x, memory.scanned[layer]), ctx.mul(x, w[at + "ssm_d"]))
        y = ctx.swiglu_split(ctx.cont(gate), self._name(at + "ssm_scan", y))
        y = self._name(at + "ssm_act", y)
        return self._product(at + "ssm_out", ctx.reshape_2d(y, s.n_inner, n_tokens * n_sequences))

    def _convolve(self, at: str, x: Tensor, table: Tensor) -> Tensor:
        """The convolution over each channel's last inputs, then silu: `[n_inner, n_tokens, n_sequences]`."""
        ctx, w, s = self._ctx, self._weights, self._state
        n_tokens, n_sequences = self._sizes
        n_kept = s.n_conv - 1
        kept = ctx.reshape_3d(ctx.get_rows(table, self.slots), n_kept, s.n_inner, n_sequences)
        seen = ctx.concat(kept, ctx.cont(ctx.transpose(x)), 0)
        last = ctx.view_3d(
            seen, n_kept, s.n_inner, n_sequences, seen.nb[1], seen.nb[2], n_tokens * seen.nb[0]
        )
        self._keep(table, ctx.cont(last))
        y = ctx.ssm_conv(seen, w[at + "ssm_conv1d.weight"])
        return ctx.silu(ctx.add(y, w[at + "ssm_conv1d.bias"]))

    def _scan(self, at: str, x: Tensor, table: Tensor) -> Tensor:
        """The selective scan: `[n_inner, n_tokens, n_sequences]`."""
        ctx, w, s = self._ctx, self._weights, self._state
        n_tokens, n_sequences = self._sizes
        flat = ctx.reshape_2d(x, s.n_inner, n_tokens * n_sequences)
        found = self._product(at + "ssm_x", flat)
        start = 0
        parts = []
        for n in (s.n_dt, s.n_state, s.n_state):
            part = ctx.view_2d(found, n, found.ne[1], found.nb[1], start * found.nb[0])
            parts.append(ctx.rms_norm(part, self._config.eps) if s.normalizes else part)
            start += n
        dt = self._product(at + "ssm_dt", ctx.cont(parts[0]))
        dt = ctx.reshape_3d(dt, s.n_inner, n_tokens, n_sequences)
        b, c = (
            ctx.view_4d(
                part, s.n_state, 1, n_tokens, n_sequences,
                part.ne[0] * part.nb[0], part.nb[1], n_tokens * part.nb[1],
            )
            for part in parts[1:]
        )  # fmt: skip
        states = ctx.reshape_4d(table, s.n_state, 1, s.n_inner, table.ne[1])
        inputs = ctx.reshape_4d(x, 1, s.n_inner, n_tokens, n_sequences)
        packed = ctx.ssm_scan(states, inputs, dt, w[at + "ssm_a"], b, c, self.slots)
        n, element = s.n_inner * n_tokens * n_sequences, packed.nb[0]
        row = table.ne[0]
        self._keep(table, ctx.view_2d(packed, row, n_sequences, row * element, n * element))
        return ctx.reshape_3d(ctx.view_1d(packed, n), s.n_inner, n_tokens, n_sequences)

    def _keep(self, table: Tensor, states: Tensor) -> None:
        """Write states into the slots of their sequences; nothing of the graph reads them afterwards."""
        rows = self._ctx.reshape_2d(states, table.ne[0], self._sizes[1])
        self.graph.build_forward_expand(self._ctx.set_rows(table, rows, self.slots))
