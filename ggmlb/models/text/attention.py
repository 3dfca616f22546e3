"""AttentionGraph: attention weights, which fused attention does not store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb import Context, DType, Graph, Tensor
from ggmlb.models.text.graph import heads_of

if TYPE_CHECKING:
    from ggmlb.models.text.config import TextConfig
    from ggmlb.models.text.kv_cache import KvCache


class AttentionGraph:
    """The graph that computes attention weights of layers from rotated queries and cached keys.

    Attributes:
        graph: The graph to compute.
        weights: Output: for each layer f32 `[n_kv, n_tokens, n_head]`; they sum to 1 over `n_kv`.
    """

    def __init__(
        self, config: TextConfig, memory: KvCache, layers: Sequence[int], n_tokens: int, n_kv: int
    ) -> None:
        self._ctx = ctx = Context()
        self.graph = Graph()
        self._queries: dict[int, Tensor] = {}
        self._masks: dict[bool, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        for layer in layers:
            query = self._queries[layer] = self._input(DType.F32, config.n_key, config.n_head, n_tokens)
            keys = heads_of(ctx, memory.keys[layer], config.n_key, n_kv, config.n_head_kv)
            scores = ctx.mul_mat(keys, ctx.permute(query, 0, 2, 1, 3))
            scale, cap = config.attn_scale, config.attn_softcap
            if cap:
                scores, scale = ctx.scale(ctx.tanh(ctx.scale(scores, scale / cap)), cap), 1.0
            is_local = config.sees_window(layer)
            if is_local not in self._masks:
                self._masks[is_local] = self._input(DType.F16, n_kv, n_tokens)
            mask = self._masks[is_local]
            self.weights[layer] = ctx.set_output(ctx.soft_max_ext(scores, mask, scale, 0.0))
            self.graph.build_forward_expand(self.weights[layer])

    def _input(self, dtype: DType, *ne: int) -> Tensor:
        return self._ctx.set_input(self._ctx.new_tensor(dtype, ne))

    def set_inputs(
        self, queries: Mapping[int, npt.NDArray[Any]], masks: Sequence[npt.NDArray[np.float16]]
    ) -> None:
        """Write the rotated queries of each layer, and the attention masks (full, then sliding window)."""
        for layer, query in self._queries.items():
            query.set(queries[layer])
        for is_local, tensor in self._masks.items():
            tensor.set(masks[is_local])
