"""AttentionGraph: attention weights, which fused attention does not store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb import Context, DType, Graph, Tensor
from ggmlb.models.text.blocks.attention import attention_weights
from ggmlb.models.text.graph import heads_of

if TYPE_CHECKING:
    from ggmlb.models.text.config import TextConfig
    from ggmlb.models.text.kv_cache import KvCache


class AttentionGraph:
    """The graph that computes attention weights of layers from rotated queries and cached keys.

    Attributes:
        graph: The graph to compute.
        weights: Output: for each layer f32 `[n_kv, n_tokens, n_head]`; over `n_kv` they sum
            to 1, with a sink to less.
    """

    def __init__(
        self,
        config: TextConfig,
        weights: Mapping[str, Tensor],
        memory: KvCache,
        layers: Sequence[int],
        n_tokens: int,
        n_kv: int,
    ) -> None:
        self._ctx = ctx = Context()
        self.graph = Graph()
        self._queries: dict[int, Tensor] = {}
        self._masks: dict[int, Tensor] = {}
        self.weights: dict[int, Tensor] = {}
        for layer in layers:
            a = config.attentions[layer]
            assert a is not None
            query = self._queries[layer] = self._input(DType.F32, a.n_key, a.n_head, n_tokens)
            keys = heads_of(ctx, memory.keys[layer], a.n_key, n_kv, a.n_head_kv)
            window = config.windows.index(a.window)
            if window not in self._masks:
                self._masks[window] = self._input(DType.F16, n_kv, n_tokens)
            query, sinks = ctx.permute(query, 0, 2, 1, 3), a.sinks(weights, layer)
            found = attention_weights(ctx, a, query, keys, self._masks[window], sinks)
            self.weights[layer] = ctx.set_output(found)
            self.graph.build_forward_expand(found)

    def _input(self, dtype: DType, *ne: int) -> Tensor:
        return self._ctx.set_input(self._ctx.new_tensor(dtype, ne))

    def set_inputs(
        self, queries: Mapping[int, npt.NDArray[Any]], masks: Sequence[npt.NDArray[np.float16]]
    ) -> None:
        """Write the rotated queries of each layer, and the attention masks (one for each window)."""
        for layer, query in self._queries.items():
            query.set(queries[layer])
        for window, tensor in self._masks.items():
            tensor.set(masks[window])
