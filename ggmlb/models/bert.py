"""BERT encoders: configuration, weights, and the graph from tokens to embeddings.

The graph uses the public API only: any device that runs its ops runs the model, and the scheduler
sends each layer to the device that holds the layer's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ModelError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.models.weights import Source
from ggmlb.parallel.meta import SplitAxis, SplitState, split_evenly

if TYPE_CHECKING:
    from ggmlb.models.folder import ModelFolder
    from ggmlb.models.tensor_file import TensorFile
    from ggmlb.models.tokens import Tokens

ACTIVATIONS: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "gelu": Context.gelu_erf,
    "gelu_new": Context.gelu,
    "gelu_pytorch_tanh": Context.gelu,
    "relu": Context.relu,
    "silu": Context.silu,
}
"""Op by `hidden_act` in config.json; BERT's "gelu" is the exact GELU."""

QUANTUM = 32
"""Block size of ggml's smaller quantised types."""

L2_EPS = 1e-12
"""Smallest norm that an embedding is divided by."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Hyperparameters of a BERT encoder: numbers of layers and heads, widths, pooling.

    Attributes:
        n_layer: Encoder layers.
        n_embd: Elements of a token's hidden state, and of an embedding.
        n_head: Attention heads.
        n_ff: Hidden size of the feed-forward part.
        n_vocab: Tokens.
        n_ctx: Number of position embeddings: the longest possible sequence.
        n_type: Segment types; texts have type 0.
        norm_eps: Added to the variance in layer norms.
        activation: Key of `ACTIVATIONS`.
        n_max: Longest sequence used; longer texts are truncated.
        pooling: `"mean"` of all tokens, or `"cls"`, the first.
    """

    n_layer: int
    n_embd: int
    n_head: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    n_type: int
    norm_eps: float
    activation: str
    n_max: int
    pooling: str

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> BertConfig:
        """Read the hyperparameters from the JSON files of a model folder.

        Raises:
            ModelError: A file is missing or invalid, or describes another kind of model.
        """
        config = folder.json("config.json")
        where = folder.path / "config.json"

        def fail(key: str, right: str) -> NoReturn:
            found = f"{key} is {config[key]!r}" if key in config else f"it lacks {key!r}"
            raise ModelError(f"{where}: {found}; it must be {right}")

        def one_of(key: str, *known: str, default: str = "") -> str:
            value: str = config.get(key, default)
            return value if value in known else fail(key, " or ".join(map(repr, known)))

        def count(key: str, least: int = 0) -> int:
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > least:
                return value
            fail(key, f"a whole number above {least}")

        one_of("model_type", "bert")
        one_of("position_embedding_type", "absolute", default="absolute")
        eps = config.get("layer_norm_eps")
        if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps <= 1:
            fail("layer_norm_eps", "a number from 0 to 1")
        n_embd, n_head = map(count, ("hidden_size", "num_attention_heads"))
        n_ctx = count("max_position_embeddings", 2)  # two are for special tokens
        if n_embd % n_head:
            fail("num_attention_heads", f"a divisor of hidden_size, {n_embd}")
        return cls(
            n_layer=count("num_hidden_layers"),
            n_embd=n_embd,
            n_head=n_head,
            n_ff=count("intermediate_size"),
            n_vocab=count("vocab_size"),
            n_ctx=n_ctx,
            n_type=count("type_vocab_size"),
            norm_eps=eps,
            activation=one_of("hidden_act", *ACTIVATIONS),
            n_max=min(_limit(folder) or n_ctx, n_ctx),
            pooling=_pooling(folder),
        )

    def check_file(self, file: TensorFile) -> str:
        """Check that the file has all weights, in the right shapes; return the prefix of their names.

        Returns:
            The prefix of the names of its weights.

        Raises:
            ModelError: It lacks one, or has it in another shape, or not in floating point.
        """
        # Some checkpoints hold the encoder inside a larger model.
        prefix = "bert." if any(name.startswith("bert.") for name in file) else ""
        layers = (self.layer_sources(prefix, layer) for layer in range(self.n_layer))
        for sources in chain([self.embedding_sources(prefix)], layers):
            for source in sources.values():
                for name in source.names:
                    file.entry(name, source.shape)
        return prefix

    def embedding_sources(self, prefix: str) -> dict[str, Source]:
        """Return the file's tensors that make each embedding weight; `prefix` begins the tensors' names."""
        n = self.n_embd
        return {
            "tokens": _matrix(n, self.n_vocab, prefix + "embeddings.word_embeddings")._replace(
                is_multiplied=False
            ),
            "positions": _vectors((self.n_ctx, n), prefix + "embeddings.position_embeddings.weight"),
            "types": _vectors((self.n_type, n), prefix + "embeddings.token_type_embeddings.weight"),
            **_norm("norm", n, prefix + "embeddings.LayerNorm"),
        }

    def split_state(self, weight: Tensor, n_devices: int) -> SplitState:
        """Return how a weight is split over a meta device (tensor parallelism).

        Each device has whole heads, and a slice of the feed-forward hidden state. A layer therefore needs
        two sums over the devices: after the last products of attention and of the feed-forward part.
        """
        part = weight.name.rpartition("layer.")[2].partition(".")[2]
        axis, n_parts, size = {
            "qkv.weight": (1, 3, self.n_embd // self.n_head),
            "qkv.bias": (0, 3, self.n_embd // self.n_head),
            "attn_out.weight": (0, 1, self.n_embd // self.n_head),
            "ff_up.weight": (1, 1, 1),
            "ff_up.bias": (0, 1, 1),
            "ff_down.weight": (0, 1, 1),
        }.get(part, (0, 0, 1))
        # Slices of rows are whole blocks, on the device that has the same rows of the preceding product.
        size = math.lcm(size, QUANTUM)
        n = weight.ne[axis] // max(n_parts, 1)
        if not n_parts or n % size:
            return SplitState(SplitAxis.MIRRORED)
        return SplitState(SplitAxis(axis), (split_evenly(n, n_devices, size),) * n_parts)

    def layer_sources(self, prefix: str, layer: int) -> dict[str, Source]:
        """Return the file's tensors that make each weight of `layer`; `prefix` begins the tensors' names."""
        n = self.n_embd
        at = f"{prefix}encoder.layer.{layer}."
        here = f"layer.{layer}."
        # One product for queries, keys and values reads the hidden states once.
        qkv = [f"{at}attention.self.{part}" for part in ("query", "key", "value")]
        return {
            **_linear(here + "qkv", n, n, *qkv),
            **_linear(here + "attn_out", n, n, at + "attention.output.dense"),
            **_norm(here + "attn_norm", n, at + "attention.output.LayerNorm"),
            **_linear(here + "ff_up", n, self.n_ff, at + "intermediate.dense"),
            **_linear(here + "ff_down", self.n_ff, n, at + "output.dense"),
            **_norm(here + "ff_norm", n, at + "output.LayerNorm"),
        }


def _limit(folder: ModelFolder) -> int | None:
    """Return the longest sequence in training, if the folder specifies it."""
    file = "sentence_bert_config.json"
    limit = folder.optional_json(file).get("max_seq_length")
    if limit is not None and not (isinstance(limit, int) and limit > 2):
        raise ModelError(
            f"{folder.path / file}: max_seq_length is {limit!r}; it must be a whole number above 2"
        )
    return limit


def _pooling(folder: ModelFolder) -> str:
    file = "1_Pooling/config.json"
    config = folder.optional_json(file)
    modes = sorted(key for key, value in config.items() if key.startswith("pooling_mode") and value is True)
    known = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    if not modes:
        return "mean"
    if len(modes) > 1 or modes[0] not in known:
        raise ModelError(
            f"{folder.path / file} asks for {', '.join(modes)}; supported is one of {', '.join(known)}"
        )
    return known[modes[0]]


def _matrix(n_in: int, n_out: int, *parts: str) -> Source:
    return Source(tuple(p + ".weight" for p in parts), (n_out, n_in), is_matrix=True, is_multiplied=True)


def _vectors(shape: tuple[int, ...], *names: str) -> Source:
    return Source(names, shape, is_matrix=False)


def _linear(name: str, n_in: int, n_out: int, *parts: str) -> dict[str, Source]:
    return {
        name + ".weight": _matrix(n_in, n_out, *parts),
        name + ".bias": _vectors((n_out,), *(p + ".bias" for p in parts)),
    }


def _norm(name: str, n: int, at: str) -> dict[str, Source]:
    return {name + ".weight": _vectors((n,), at + ".weight"), name + ".bias": _vectors((n,), at + ".bias")}


class BertGraph:
    """The graph for a batch of texts of one padded length.

    Attributes:
        graph: The graph to compute.
        ids: Input: token numbers, i32 `[n_tokens * n_batch]`, text after text.
        mask: Input: added to attention scores; 0, or -inf for padding; f32 `[n_tokens, n_tokens, 1,
            n_batch]`: by key, query and text.
        pool: Input: the weight of each token in the embedding, f32 `[n_tokens, 1, n_batch]`.
        embeddings: Output: of length 1, f32 `[n_embd, n_batch]`.
    """

    def __init__(
        self, config: BertConfig, weights: Mapping[str, Tensor], n_tokens: int, n_batch: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._n_tokens = n_tokens
        self._n_batch = n_batch
        self._ctx = ctx = Context()
        self.ids = self._input("ids", DType.I32, (n_tokens * n_batch,))
        self.mask = self._input("mask", DType.F32, (n_tokens, n_tokens, 1, n_batch))
        self.pool = self._input("pool", DType.F32, (n_tokens, 1, n_batch))
        x = self._embed()
        for layer in range(config.n_layer):
            at = f"layer.{layer}."
            x = self._norm(at + "attn_norm", ctx.add(self._attend(at, x), x))
            x = self._norm(at + "ff_norm", ctx.add(self._feed_forward(at, x), x))
            x.name = f"hidden_{layer + 1}"
        self.embeddings = ctx.set_output(self._pool(x))
        self.embeddings.name = "embeddings"
        self.graph = Graph().build_forward_expand(self.embeddings)

    def _input(self, name: str, dtype: DType, ne: tuple[int, ...]) -> Tensor:
        return self._ctx.set_input(self._ctx.new_tensor(dtype, ne, name))

    def set_inputs(self, sequences: Sequence[Tokens]) -> None:
        """Write the token ids of `sequences` (padded), their masks and pooling weights into the inputs."""
        ids = np.zeros((self._n_batch, self._n_tokens), np.int32)
        mask = np.zeros(self.mask.ne[::-1], np.float32)
        pool = np.zeros(ids.shape, np.float32)
        for i, tokens in enumerate(sequences):
            ids[i, : tokens.size] = tokens
            mask[i, ..., tokens.size :] = -np.inf
            n_pooled = tokens.size if self._config.pooling == "mean" else 1
            pool[i, :n_pooled] = 1 / n_pooled
        self.ids.set(ids)
        self.mask.set(mask)
        self.pool.set(pool)

    # Hidden states are `[n_embd, n_tokens * n_batch]` throughout.

    def _linear(self, name: str, x: Tensor) -> Tensor:
        w = self._weights
        return self._ctx.add(self._ctx.mul_mat(w[name + ".weight"], x), w[name + ".bias"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        ctx, w = self._ctx, self._weights
        scaled = ctx.mul(ctx.norm(x, self._config.norm_eps), w[name + ".weight"])
        return ctx.add(scaled, w[name + ".bias"])

    def _embed(self) -> Tensor:
        ctx, w, n = self._ctx, self._weights, self._config.n_embd
        tokens = ctx.get_rows(w["tokens"], self.ids)
        # All texts have the positions 0, 1, ... and type 0: views of the first rows.
        positions = ctx.view_2d(w["positions"], n, self._n_tokens, w["positions"].nb[1])
        places = ctx.add(positions, ctx.view_1d(w["types"], n))
        x = ctx.add(ctx.reshape_3d(tokens, n, self._n_tokens, self._n_batch), places)
        x = self._norm("norm", ctx.reshape_2d(x, n, self._n_tokens * self._n_batch))
        x.name = "hidden_0"
        return x

    def _attend(self, at: str, x: Tensor) -> Tensor:
        ctx, config = self._ctx, self._config
        n, heads = config.n_embd, config.n_head
        n_dim = n // heads
        qkv = self._linear(at + "qkv", x)
        row, element = qkv.nb[1], qkv.nb[0]

        def part(i: int) -> Tensor:
            """View a third of each row as `[n_dim, n_tokens, n_head, n_batch]`."""
            return ctx.view_4d(
                qkv, n_dim, self._n_tokens, heads, self._n_batch,
                row, n_dim * element, self._n_tokens * row, i * n * element,
            )  # fmt: skip

        query, key, value = part(0), part(1), part(2)
        scores = ctx.mul_mat(key, query)
        probs = ctx.soft_max_ext(scores, self.mask, 1 / math.sqrt(n_dim), 0.0)
        mixed = ctx.mul_mat(ctx.cont(ctx.transpose(value)), probs)
        joined = ctx.cont(ctx.permute(mixed, 0, 2, 1, 3))
        return self._linear(at + "attn_out", ctx.reshape_2d(joined, n, self._n_tokens * self._n_batch))

    def _feed_forward(self, at: str, x: Tensor) -> Tensor:
        activation = ACTIVATIONS[self._config.activation]
        return self._linear(at + "ff_down", activation(self._ctx, self._linear(at + "ff_up", x)))

    def _pool(self, x: Tensor) -> Tensor:
        ctx, n = self._ctx, self._config.n_embd
        by_text = ctx.reshape_3d(x, n, self._n_tokens, self._n_batch)
        pooled = ctx.mul_mat(ctx.cont(ctx.transpose(by_text)), self.pool)
        return ctx.l2_norm(ctx.reshape_2d(pooled, n, self._n_batch), L2_EPS)
