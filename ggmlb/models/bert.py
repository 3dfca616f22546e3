"""BERT and later encoders: configuration, weights, and the graph from tokens to embeddings or scores.

The graph uses the public API only: any device that runs its ops runs the model, and the scheduler
sends each layer to the device that holds the layer's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import RopeType
from ggmlb.core.errors import ModelError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.models.weights import Source
from ggmlb.parallel.meta import SplitAxis, SplitState, split_evenly

if TYPE_CHECKING:
    from ggmlb.models.folder import ModelFolder
    from ggmlb.models.gguf import GgufFile
    from ggmlb.models.tensor_file import TensorFile
    from ggmlb.models.tokens import Tokens

ACTIVATIONS: dict[str, Callable[[Context, Tensor], Tensor]] = {
    "gelu": Context.gelu_erf,
    "gelu_new": Context.gelu,
    "gelu_pytorch_tanh": Context.gelu,
    "relu": Context.relu,
    "silu": Context.silu,
    "swiglu": Context.swiglu,
    "geglu": Context.geglu,
    "geglu_erf": Context.geglu_erf,
    "tanh": Context.tanh,
}
"""Activations; names as `hidden_act` in config.json. BERT's "gelu" is the exact GELU.

The gated ones read a product of twice the size, whose first half is activated.
"""

OF_FOLDERS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
GATED = ("swiglu", "geglu", "geglu_erf")
SEPARATE = ("query", "key", "value")

QUANTUM = 32
"""Block size of ggml's smaller quantised types."""

_KINDS = (("weight", 1), ("bias", 0))

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
        pooling: `"mean"` of all tokens, or `"cls"`, the first, or `"last"`.
        ropes: RoPE's base in each layer; empty: positions have embeddings.
        windows: Tokens of each layer's window, half before a token and half after it; 0, or empty: all.
        norms_first: Whether norms are of the inputs of attention and feed-forward part, not of the sums.
        n_score: Scores of a text (of a reranker); 0: it has an embedding.
        score_activation: Key of `ACTIVATIONS`, of the hidden state that scores are made of.
        name: The architecture's name.
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
    ropes: tuple[float, ...] = ()
    windows: tuple[int, ...] = ()
    norms_first: bool = False
    n_score: int = 0
    score_activation: str = "tanh"
    name: str = "bert"

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
            activation=one_of("hidden_act", *OF_FOLDERS),
            n_max=min(_limit(folder) or n_ctx, n_ctx),
            pooling=_pooling(folder),
        )

    def split_state(self, weight: Tensor, n_devices: int) -> SplitState:
        """Return how a weight is split over a meta device (tensor parallelism).

        Each device has whole heads, and a slice of the feed-forward hidden state. A layer therefore needs
        two sums over the devices: after the last products of attention and of the feed-forward part.
        """
        part = weight.name.rpartition("layer.")[2].partition(".")[2]
        head, n_up = self.n_embd // self.n_head, 1 + (self.activation in GATED)
        separate = {f"{name}.{kind}": (axis, 1, head) for name in SEPARATE for kind, axis in _KINDS}
        axis, n_parts, size = {
            **separate,
            "qkv.weight": (1, 3, head),
            "qkv.bias": (0, 3, head),
            "attn_out.weight": (0, 1, head),
            "ff_up.weight": (1, n_up, 1),
            "ff_up.bias": (0, n_up, 1),
            "ff_down.weight": (0, 1, 1),
        }.get(part, (0, 0, 1))
        # Slices of rows are whole blocks, on the device that has the same rows of the preceding product.
        size = math.lcm(size, QUANTUM)
        n = weight.ne[axis] // max(n_parts, 1)
        if not n_parts or n % size:
            return SplitState(SplitAxis.MIRRORED)
        return SplitState(SplitAxis(axis), (split_evenly(n, n_devices, size),) * n_parts)

    def window(self, layer: int) -> int:
        """Return the window of a layer; 0: it has none."""
        return self.windows[layer] if self.windows else 0


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


class BertLayout(NamedTuple):
    """The tensors of the file that make each weight of the graph, by parts of the model.

    Attributes:
        embeddings: Those before the first layer.
        layers: Those of each layer; the last one has also those that follow it.
    """

    embeddings: dict[str, Source]
    layers: list[dict[str, Source]]

    @classmethod
    def read(
        cls,
        config: BertConfig,
        file: TensorFile | GgufFile,
        names: Mapping[str, Sequence[str]],
        may_lack: Callable[[str], bool] = lambda _: False,
    ) -> BertLayout:
        """Find the weights in a file.

        Args:
            config: The model's sizes.
            file: The file.
            names: For each weight of the graph one or more tensors, without `.weight` and `.bias`; `{}` is
                the layer. Several are stacked along rows. Biases may have entries of their own.
            may_lack: Whether a tensor may be missing, by its name in the file.

        Raises:
            ModelError: The file lacks one, or has it in another shape.
        """
        n, n_ff = config.n_embd, config.n_ff
        n_up = n_ff * (1 + (config.activation in GATED))

        def find(name: str, shape: tuple[int, ...], kind: str, layer: int | None = None) -> dict[str, Source]:
            of = names.get(f"{name}.{kind}", names.get(name, ()))
            parts = [f"{at.format(layer)}.{kind}" for at in of]
            if not parts or (parts[0] not in file and may_lack(parts[0])):
                return {}
            each = (shape[0] // len(parts), *shape[1:])
            for part in parts:
                file.weight(part, each)
            is_product = len(shape) == 2 and name not in _TABLES
            full = name if name in _TABLES else f"{name}.{kind}"
            full = full if layer is None else f"layer.{layer}.{full}"
            return {full: Source(tuple(parts), each, is_product or name == "tokens", is_product)}

        def with_biases(shapes: Mapping[str, tuple[int, ...]], layer: int | None = None) -> dict[str, Source]:
            found: dict[str, Source] = {}
            for name, shape in shapes.items():
                found |= find(name, shape, "weight", layer) | find(name, shape[:1], "bias", layer)
            return found

        embeddings = {
            **find("tokens", (config.n_vocab, n), "weight"),
            **find("positions", (config.n_ctx, n), "weight"),
            **find("types", (config.n_type, n), "weight"),
            **with_biases({"norm": (n,)}),
        }
        of_layer = {
            "qkv": (3 * n, n), **dict.fromkeys(SEPARATE, (n, n)), "attn_out": (n, n), "attn_norm": (n,),
            "ff_up": (n_up, n), "ff_down": (n, n_ff), "ff_norm": (n,),
        }  # fmt: skip
        layers = [with_biases(of_layer, layer) for layer in range(config.n_layer)]
        layers[-1] |= with_biases({"output_norm": (n,)})
        if config.n_score:
            scores = {"score_in": (n, n), "score_norm": (n,), "score": (config.n_score, n)}
            layers[-1] |= with_biases(scores)
        return cls(embeddings, layers)


_TABLES = ("tokens", "positions", "types")

_LAYER = "encoder.layer.{}."

NAMES = {
    "tokens": ["embeddings.word_embeddings"],
    "positions": ["embeddings.position_embeddings"],
    "types": ["embeddings.token_type_embeddings"],
    "norm": ["embeddings.LayerNorm"],
    # One product for queries, keys and values reads the hidden states once.
    "qkv": [f"{_LAYER}attention.self.{part}" for part in SEPARATE],
    "attn_out": [f"{_LAYER}attention.output.dense"],
    "attn_norm": [f"{_LAYER}attention.output.LayerNorm"],
    "ff_up": [f"{_LAYER}intermediate.dense"],
    "ff_down": [f"{_LAYER}output.dense"],
    "ff_norm": [f"{_LAYER}output.LayerNorm"],
}
"""The weights of BERT in files of Hugging Face's layout."""


def layout_of_folder(config: BertConfig, file: TensorFile) -> BertLayout:
    """Return the weights of a model folder.

    Raises:
        ModelError: The file lacks one, or has it in another shape, or not in floating point.
    """
    # Some checkpoints hold the encoder inside a larger model.
    prefix = "bert." if any(name.startswith("bert.") for name in file) else ""
    return BertLayout.read(config, file, {name: [prefix + p for p in parts] for name, parts in NAMES.items()})


class BertGraph:
    """The graph for a batch of texts of one padded length.

    Attributes:
        graph: The graph to compute.
        ids: Input: token numbers, i32 `[n_tokens * n_batch]`, text after text.
        masks: Inputs by window: added to attention scores; 0, or -inf for padding and outside the window; f32
            `[n_tokens, n_tokens, 1, n_batch]`: by key, query and text.
        pool: Input: the weight of each token in the embedding, f32 `[n_tokens, 1, n_batch]`.
        positions: Input: positions for RoPE, i32 `[n_tokens * n_batch]`; `None` without.
        types: Input of a reranker with segment types: the type of each token, like `ids`; else `None`.
        embeddings: Output: of length 1, f32 `[n_embd, n_batch]`; of a reranker scores, `[n_score, n_batch]`.
    """

    def __init__(
        self, config: BertConfig, weights: Mapping[str, Tensor], n_tokens: int, n_batch: int
    ) -> None:
        self._config = config
        self._weights = weights
        self._n_tokens = n_tokens
        self._n_batch = n_batch
        self._ctx = ctx = Context()
        n = n_tokens * n_batch
        self.ids = self._input("ids", DType.I32, (n,))
        self.masks = {
            window: self._input(
                f"mask_{window}" if window else "mask", DType.F32, (n_tokens, n_tokens, 1, n_batch)
            )
            for window in sorted({config.window(layer) for layer in range(config.n_layer)})
        }
        self.pool = self._input("pool", DType.F32, (n_tokens, 1, n_batch))
        self.positions = self._input("positions", DType.I32, (n,)) if config.ropes else None
        has_types = config.n_score and config.n_type > 1 and "types" in weights
        self.types = self._input("types", DType.I32, (n,)) if has_types else None
        x = self._embed()
        for layer in range(config.n_layer):
            at = f"layer.{layer}."
            if config.norms_first:
                x = ctx.add(self._attend(layer, self._norm(at + "attn_norm", x)), x)
                x = ctx.add(self._feed_forward(at, self._norm(at + "ff_norm", x)), x)
            else:
                x = self._norm(at + "attn_norm", ctx.add(self._attend(layer, x), x))
                x = self._norm(at + "ff_norm", ctx.add(self._feed_forward(at, x), x))
            x.name = f"hidden_{layer + 1}"
        pooled = self._pool(self._norm("output_norm", x))
        found = self._scores(pooled) if config.n_score else ctx.l2_norm(pooled, L2_EPS)
        self.embeddings = ctx.set_output(found)
        self.embeddings.name = "embeddings"
        self.graph = Graph().build_forward_expand(self.embeddings)

    def _input(self, name: str, dtype: DType, ne: tuple[int, ...]) -> Tensor:
        return self._ctx.set_input(self._ctx.new_tensor(dtype, ne, name))

    def set_inputs(self, sequences: Sequence[Tokens], n_first: Sequence[int] = ()) -> None:
        """Write the token ids of `sequences` (padded), their masks and pooling weights into the inputs.

        Args:
            sequences: Tokens of each text.
            n_first: Number of each text's first tokens that have type 0; the others have type 1. Empty: all.
        """
        ids, types = np.zeros((2, self._n_batch, self._n_tokens), np.int32)
        pool = np.zeros(ids.shape, np.float32)
        for i, tokens in enumerate(sequences):
            ids[i, : tokens.size] = tokens
            if n_first:
                types[i, n_first[i] : tokens.size] = 1
            pooled = {"mean": slice(tokens.size), "cls": slice(1)}.get(
                self._config.pooling, slice(tokens.size - 1, tokens.size)
            )
            pool[i, pooled] = 1 / (pooled.stop - (pooled.start or 0))
        self.ids.set(ids)
        self.pool.set(pool)
        places = np.arange(self._n_tokens, dtype=np.int32)
        for window, tensor in self.masks.items():
            mask = np.zeros(tensor.ne[::-1], np.float32)
            if window:
                mask[..., abs(places - places[:, None]) > window // 2] = -np.inf
            for i, tokens in enumerate(sequences):
                mask[i, ..., tokens.size :] = -np.inf
                if window:
                    mask[i, :, tokens.size :, : tokens.size] = 0  # padding sees the text: no row is all -inf
            tensor.set(mask)
        if self.positions is not None:
            self.positions.set(np.tile(places, self._n_batch))
        if self.types is not None:
            self.types.set(types)

    # Hidden states are `[n_embd, n_tokens * n_batch]` throughout.

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = self._ctx.mul_mat(self._weights[name + ".weight"], x)
        bias = self._weights.get(name + ".bias")
        return y if bias is None else self._ctx.add(y, bias)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        """Return a norm with its weight and bias; `x` itself if the model has no norm there."""
        ctx, w = self._ctx, self._weights
        if name + ".weight" not in w:
            return x
        scaled = ctx.mul(ctx.norm(x, self._config.norm_eps), w[name + ".weight"])
        bias = w.get(name + ".bias")
        return scaled if bias is None else ctx.add(scaled, bias)

    def _embed(self) -> Tensor:
        ctx, w, n = self._ctx, self._weights, self._config.n_embd
        x = ctx.reshape_3d(ctx.get_rows(w["tokens"], self.ids), n, self._n_tokens, self._n_batch)
        # All texts have the positions 0, 1, ... and, but for pairs, type 0: views of the first rows.
        places = []
        if "positions" in w:
            places.append(ctx.view_2d(w["positions"], n, self._n_tokens, w["positions"].nb[1]))
        if self.types is not None:
            x = ctx.add(x, ctx.reshape_3d(ctx.get_rows(w["types"], self.types), *x.ne[:3]))
        elif "types" in w:
            places.append(ctx.view_1d(w["types"], n))
        if places:
            x = ctx.add(x, ctx.add(*places) if len(places) > 1 else places[0])
        x = self._norm("norm", ctx.reshape_2d(x, n, self._n_tokens * self._n_batch))
        x.name = "hidden_0"
        return x

    def _attend(self, layer: int, x: Tensor) -> Tensor:
        ctx, config = self._ctx, self._config
        n, heads, at = config.n_embd, config.n_head, f"layer.{layer}."
        n_dim = n // heads
        if at + "qkv.weight" in self._weights:
            qkv = self._linear(at + "qkv", x)
            parts = [(qkv, i * n * qkv.nb[0]) for i in range(3)]
        else:
            parts = [(self._linear(at + name, x), 0) for name in SEPARATE]

        def by_head(i: int) -> Tensor:
            """Return queries, keys or values as `[n_dim, n_tokens, n_head, n_batch]`."""
            y, start = parts[i]
            row, head = y.nb[1], n_dim * y.nb[0]
            if self.positions is not None and i < 2:
                y = ctx.view_3d(y, n_dim, heads, y.ne[1], head, row, start)
                y = ctx.rope_ext(y, self.positions, None, n_dim, RopeType.NEOX, 0, config.ropes[layer])
                (_, head, row, _), start = y.nb, 0
            return ctx.view_4d(
                y, n_dim, self._n_tokens, heads, self._n_batch, row, head, self._n_tokens * row, start
            )

        query, key, value = by_head(0), by_head(1), by_head(2)
        scores = ctx.mul_mat(key, query)
        mask = self.masks[config.window(layer)]
        probs = ctx.soft_max_ext(scores, mask, 1 / math.sqrt(n_dim), 0.0)
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
        return ctx.reshape_2d(pooled, n, self._n_batch)

    def _scores(self, x: Tensor) -> Tensor:
        if "score_in.weight" in self._weights:
            x = ACTIVATIONS[self._config.score_activation](self._ctx, self._linear("score_in", x))
            x = self._norm("score_norm", x)
        return self._linear("score", x) if "score.weight" in self._weights else x
