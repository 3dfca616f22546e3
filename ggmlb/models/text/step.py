"""StepGraph: the base class of language models' graphs, with the names of their nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb import Buffer, Context, DType, Graph, Op, Tensor
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from ggmlb.models.text.adapter import Adapter
    from ggmlb.models.text.changes import Changes
    from ggmlb.models.text.config import TextConfig


class NamedNode(NamedTuple):
    """A named node of a graph, with the shape of its values for one token.

    Attributes:
        tensor: The node; tokens are its outermost dimension.
        row: The shape of its values of one token, NumPy order.
    """

    tensor: Tensor
    row: tuple[int, ...]


class StepGraph:
    """Base class of the graphs of one step of a language model.

    A product or norm with the weight `NAME.weight` has the name `NAME`: `blk.0.attn_q`, `output_norm`. The
    other names are in `docs/text-models.md`.

    Args:
        config: The model's sizes.
        weights: By the names of the file.
        changes: Steering vectors and adapters.

    Attributes:
        config, weights: As given.
        ctx: Where nodes are made.
        graph: The graph to compute.
        named: Nodes by name, in the order in which they are computed.
        layers: The layers that are computed.
    """

    def __init__(self, config: TextConfig, weights: Mapping[str, Tensor], changes: Changes) -> None:
        self.config = config
        self.weights = weights
        self.ctx = Context()
        self.graph = Graph()
        self.named: dict[str, NamedNode] = {}
        self._steering = {
            layer: self._input(f"steering_{layer}", DType.F32, config.n_embd) for layer in changes.steered
        }
        self._states: Tensor | None = None
        self._rows: Tensor | None = None
        self._table: npt.NDArray[np.uint8] | None = None
        start = changes.resumed[0] + 1 if changes.resumed else 0
        self.layers = range(start, config.n_layer)
        self._adapters = changes.active
        self._multipliers: dict[tuple[Adapter, int], Tensor] = {}
        self._views: dict[Tensor, tuple[Buffer, int, npt.NDArray[Any], memoryview]] = {}

    # Inputs in host memory are reached by cached views: in a step of a small model, the checks of
    # `Tensor.set` take longer than some layers.

    def write(self, tensor: Tensor, values: npt.NDArray[Any] | memoryview) -> None:
        """Write all bytes of an input tensor; converts arrays to its type, copies memoryviews unchanged."""
        view = self._view(tensor)
        if isinstance(values, memoryview):
            if view is None:
                tensor.set(values)
            else:
                view[3][:] = values
        elif view is None:
            tensor.set(values.astype(tensor.dtype.numpy, copy=False))
        else:
            view[2][:] = values.reshape(-1)

    def write_ids(self, tensor: Tensor, ids: npt.NDArray[np.int32]) -> None:
        """Write token numbers, and the rows of embeddings that are looked up here (`_embed`).

        Raises:
            ArgumentError: A number is not in the vocabulary.
        """
        if tensor.buffer is not None:  # unplaced where no node reads it
            self.write(tensor, ids)
        if self._rows is not None:
            table = self._embeddings()
            if ids.view(np.uint32).max() >= len(table):
                raise ArgumentError(f"token numbers must be 0 to {len(table) - 1}; found {ids.tolist()}")
            self.write(self._rows, table.take(ids, 0).reshape(-1).data)

    def _embeddings(self) -> npt.NDArray[np.uint8]:
        """The rows of the table of embeddings, in host memory, as bytes."""
        if self._table is None:
            weight = self.weights["token_embd.weight"]
            buffer = weight.placed("embed")
            rows = buffer.base[weight.offset : weight.offset + weight.nbytes]
            self._table = rows.reshape(weight.ne[1], weight.nb[1])
        return self._table

    def write_one(self, tensor: Tensor, value: int) -> None:
        """Write `value` to an input tensor of one element."""
        view = self._view(tensor)
        if view is None:
            tensor.set(np.array([value], tensor.dtype.numpy))
        else:
            view[2][0] = value

    def _view(self, tensor: Tensor) -> tuple[Buffer, int, npt.NDArray[Any], memoryview] | None:
        """Return buffer, offset, elements and bytes of a tensor in host memory; `None` elsewhere."""
        buffer, offset = tensor.buffer, tensor.offset
        view = self._views.get(tensor)
        if view is None or view[0] is not buffer or view[1] != offset:
            if buffer is None or not buffer.is_host:
                return None
            raw = buffer.base[offset : offset + tensor.nbytes]
            array = raw if tensor.dtype.is_quantized else raw.view(tensor.dtype.numpy)
            view = self._views[tensor] = buffer, offset, array, raw.data
        return view

    def set_changes(self, changes: Changes, positions: npt.NDArray[np.int32] | list[int]) -> None:
        """Write steering vectors, adapter scales and hidden states (of `positions`) into the graph's inputs.

        Args:
            changes: Their values.
            positions: Positions of the graph's tokens in their sequences.
        """
        if self._states is not None and changes.resumed is not None:
            self._states.set(changes.resumed[1][positions])
        for layer, tensor in self._steering.items():
            if tensor.buffer is not None:  # unplaced where no node reads it
                tensor.set(changes.steered[layer])
        for (adapter, rank), tensor in self._multipliers.items():
            if tensor.buffer is not None:
                tensor.set(np.array([adapter.multiplier(rank)], np.float32))

    # Hidden states are `[n_embd, n_tokens]` throughout.

    def _input(self, name: str, dtype: DType, *ne: int) -> Tensor:
        return self.ctx.set_input(self.ctx.new_tensor(dtype, ne, name))

    def label(self, name: str, x: Tensor, *row: int) -> Tensor:
        """Give a node a name, and a shape to its values of one token other than `(ne[0],)`."""
        x.name = name
        self.named[name] = NamedNode(x, row or (x.ne[0],))
        return x

    def _begin(self, ids: Tensor) -> Tensor:
        """Return the hidden states before the first computed layer."""
        if not self.layers.start:
            return self._embed(ids)
        self._states = self._input("states", DType.F32, self.config.n_embd, ids.ne[0])
        return self._states

    def _embed(self, ids: Tensor) -> Tensor:
        """Return the embeddings of tokens.

        If the table is in host memory, and the first layer is not, the host looks up the rows as they are
        stored, and the layer's device dequantises them: an upload of few bytes, and no node on the host.
        """
        ctx, weight = self.ctx, "token_embd.weight"
        table = self.weights[weight]
        vectors = (w for name, w in self.weights.items() if name.startswith("blk.0.") and w.ne[1] == 1)
        if ids.op is Op.NONE and _is_plain(table) and not _is_plain(next(vectors, table)):
            self._rows = self._input("rows", table.dtype, *table.ne[:1], ids.ne[0])
            x = ctx.cast(self._rows, DType.F32)
        else:
            x = ctx.get_rows(table, ids)
        for adapter in self._adapters:
            if weight in adapter.factors:
                a, b = adapter.factors[weight]
                x = ctx.add(x, self._scaled(adapter, ctx.mul_mat(b, ctx.get_rows(a, ids)), a.ne[0]))
        if self.config.embedding_scale != 1:
            x = ctx.scale(x, self.config.embedding_scale)
        x = self.label("token_embd", x)
        if self.config.n_layer_input:
            self._embed_for_layers(ids, x)
        return self.norm("token_embd_norm", x) if self.config.has_embedding_norm else x

    def _embed_for_layers(self, ids: Tensor, x: Tensor) -> None:
        """Make the embeddings of tokens that each layer has: of a table, and a product of the others."""
        ctx, c = self.ctx, self.config
        shape = c.n_layer_input, c.n_layer, ids.ne[0]
        own = ctx.reshape_3d(ctx.get_rows(self.weights["per_layer_token_embd.weight"], ids), *shape)
        self.graph.build_forward_expand(own)  # first, as the table may be in host memory
        y = ctx.scale(self.product("per_layer_model_proj", x), c.n_embd**-0.5)
        y = self.norm("per_layer_proj_norm", ctx.reshape_3d(y, *shape), *shape[1::-1])
        y = ctx.scale(ctx.add(y, ctx.scale(own, c.n_layer_input**0.5)), 2**-0.5)
        self.label("per_layer_inputs", y, *shape[1::-1])

    def norm(self, name: str, x: Tensor, *row: int) -> Tensor:
        """Return a norm of the model's kind, times its weight, and with its bias, if there is one."""
        normed = (self.ctx.rms_norm if self.config.norm == "rms" else self.ctx.norm)(x, self.config.eps)
        y = self.ctx.mul(normed, self.weights[name + ".weight"])
        bias = self.weights.get(name + ".bias")
        return self.label(name, y if bias is None else self.ctx.add(y, bias), *row)

    def product(self, name: str, x: Tensor) -> Tensor:
        """Return the product with a weight, with adapters and the bias, if there is one."""
        y = self.ctx.mul_mat(self.weights[name + ".weight"], x)
        y = self._adapted(name + ".weight", y, self.ctx.mul_mat, x)
        bias = self.weights.get(name + ".bias")
        return self.label(name, y if bias is None else self.ctx.add(y, bias))

    def _adapted(
        self, weight: str, y: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], x: Tensor
    ) -> Tensor:
        """Add the products of a weight's factors to a product of it."""
        for adapter in self._adapters:
            if weight in adapter.factors:
                a, b = adapter.factors[weight]
                y = self.ctx.add(y, self._scaled(adapter, multiply(b, multiply(a, x)), a.ne[1]))
        return y

    def _scaled(self, adapter: Adapter, y: Tensor, rank: int) -> Tensor:
        key = adapter, rank
        if key not in self._multipliers:
            self._multipliers[key] = self._input(f"scale of rank {rank}", DType.F32, 1)
        return self.ctx.mul(y, self._multipliers[key])

    def _end(self, layer: int, x: Tensor) -> Tensor:
        """Return the hidden states after a layer, with its steering vector."""
        if layer in self._steering:
            x = self.ctx.add(x, self._steering[layer])
        return self.label(f"blk.{layer}.out", x)

    def _head(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the graph: normalised hidden states, and logits."""
        ctx, cap = self.ctx, self.config.final_softcap
        hidden = ctx.set_output(self.norm("output_norm", x))
        logits = self.product("output", hidden)
        if self.config.logit_scale != 1:
            logits = ctx.scale(logits, self.config.logit_scale)
        if cap:
            logits = ctx.scale(ctx.tanh(ctx.scale(logits, 1 / cap)), cap)
        self.label("logits", ctx.set_output(logits))
        self.graph.build_forward_expand(logits)
        return hidden, logits


def _is_plain(weight: Tensor) -> bool:
    """Whether a weight is in host memory, in ggml's layout."""
    buffer = weight.buffer
    return buffer is not None and buffer.is_host and not buffer.packing(weight)


class LensGraph(StepGraph):
    """The graph from hidden states to logits: the model's output norm and output matrix.

    Attributes:
        states: Input: f32 `[n_embd, n]`.
        logits: Output: f32 `[n_vocab, n]`.
    """

    def __init__(self, config: TextConfig, weights: Mapping[str, Tensor], n: int, changes: Changes) -> None:
        super().__init__(config, weights, changes)
        self.states = self._input("states", DType.F32, config.n_embd, n)
        self.logits = self._head(self.states)[1]
