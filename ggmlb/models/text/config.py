"""TextConfig: the sizes of a language model, read from a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggmlb import RopeType
from ggmlb.core.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile, Metadata


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of a family of models that its metadata does not state.

    What a layer has beside this is seen from the file's tensors: biases, norms of queries and keys, norms
    after attention and feed-forward, fused products, experts, an output matrix of its own.

    Attributes:
        rope: Which elements of a head are rotated together.
        activation: Of the feed-forward part: `"swiglu"` or `"geglu"`.
        scales_embeddings: Embeddings are multiplied by the square root of their length.
        window_period: Of so many layers, the last sees all earlier tokens, the others a window; 0: none.
        window_rope_base: Base of the rotation in layers with a window; `None`: that of the others.
        many_layers: Number of layers of the variant that divides attention scores by the square root of
            `n_embd / n_head` instead of a head's length; 0: no such variant.
        is_recurrent: Layers keep a state instead of keys and values (Mamba).
    """

    rope: RopeType = RopeType.NEOX
    activation: str = "swiglu"
    scales_embeddings: bool = False
    window_period: int = 0
    window_rope_base: float | None = None
    many_layers: int = 0
    is_recurrent: bool = False


ARCHITECTURES = {
    "llama": Architecture(RopeType.NORMAL),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(),
    "phi3": Architecture(),
    "mamba": Architecture(is_recurrent=True),
    "gemma2": Architecture(activation="geglu", scales_embeddings=True, window_period=2, many_layers=46),
    "gemma3": Architecture(
        activation="geglu", scales_embeddings=True, window_period=6, window_rope_base=10000.0, many_layers=62
    ),
}
"""By `general.architecture`; Mistral, Mixtral and SmolLM are `llama`."""

MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
"""Bounds on what metadata may ask for: far beyond any model."""


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotation of queries and keys by position; names as in `Context.rope_ext`."""

    n_dims: int
    mode: RopeType
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float


@dataclass(frozen=True, slots=True)
class Experts:
    """How the feed-forward part chooses among experts.

    Attributes:
        n: Experts in a layer.
        n_used: Experts that each token uses.
    """

    n: int
    n_used: int


@dataclass(frozen=True, slots=True)
class State:
    """The sizes of a recurrent layer (Mamba).

    Attributes:
        n_conv: Tokens that the convolution sees.
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


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The sizes of a language model.

    Attributes:
        name: The architecture's name.
        arch: What the family has.
        n_layer: Layers.
        n_embd: Elements of a token's hidden state.
        n_head: Attention heads.
        n_head_kv: Heads of keys and values, each shared by `n_head / n_head_kv` heads.
        n_key: Elements of a key in a head.
        n_value: Elements of a value in a head.
        n_ff: Elements between the products of the feed-forward part.
        n_vocab: Tokens.
        n_ctx_train: Longest sequence that the model was trained for.
        eps: Added to the mean square in norms.
        rope: The rotation in layers that see all tokens.
        rope_window: The rotation in layers with a window.
        attn_scale: Factor of attention scores.
        window: Tokens that layers with a window see; 0 where there are none.
        attn_softcap: Bound of attention scores; 0: none.
        final_softcap: Bound of logits; 0: none.
        experts: How experts are chosen; `None` where there are none.
        state: Sizes of recurrent layers; `None` where there are none.
    """

    name: str
    arch: Architecture
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_key: int
    n_value: int
    n_ff: int
    n_vocab: int
    n_ctx_train: int
    eps: float
    rope: Rope
    rope_window: Rope
    attn_scale: float
    window: int
    attn_softcap: float
    final_softcap: float
    experts: Experts | None
    state: State | None

    @classmethod
    def from_file(cls, file: GgufFile) -> TextConfig:
        """Read the sizes of a GGUF model.

        Raises:
            ModelError: The architecture is unknown, or metadata is missing, wrong or contradictory.
        """
        meta = file.metadata
        name = meta.text("general.architecture")
        arch = ARCHITECTURES.get(name)
        if arch is None:
            raise ModelError(
                f"{file.path}: the architecture {name!r} is not known{did_you_mean(name, ARCHITECTURES)}; "
                f"known are {', '.join(sorted(ARCHITECTURES))}"
            )

        def count(key: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH) -> int:
            return meta.integer(f"{name}.{key}", default, least, most)

        n_embd = count("embedding_length")
        n_layer = count("block_count", most=MAX_LAYERS)
        if arch.is_recurrent:
            n_head = n_head_kv = 1
        else:
            n_head = count("attention.head_count", most=n_embd)
            n_head_kv = count("attention.head_count_kv", n_head, most=n_head)
        if n_head % n_head_kv:
            raise meta.error(
                f"{name}.attention.head_count_kv", f"it is {n_head_kv}; it must divide the {n_head} heads"
            )
        n_key = count("attention.key_length", max(1, n_embd // n_head))
        window = count("attention.sliding_window", 0, 0, 1 << 30) if arch.window_period else 0
        rope = _rope(meta, name, arch, n_key)
        local = (
            Rope(rope.n_dims, rope.mode, rope.n_ctx_orig, arch.window_rope_base, 1.0, 0.0, 1.0)
            if arch.window_rope_base
            else rope
        )
        n_expert = count("expert_count", 0, 0, 1 << 12)
        per_score = n_embd // n_head if n_layer == arch.many_layers else n_key
        return cls(
            name=name,
            arch=arch,
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            n_key=n_key,
            n_value=count("attention.value_length", n_key),
            n_ff=count("feed_forward_length", 0, 0),
            n_vocab=_n_vocab(file, n_embd),
            n_ctx_train=count("context_length", most=1 << 30),
            eps=meta.real(f"{name}.attention.layer_norm_rms_epsilon", None, 0, 1),
            rope=rope,
            rope_window=local,
            attn_scale=meta.real(f"{name}.attention.scale", per_score**-0.5, 0, 1e6) or per_score**-0.5,
            window=window,
            attn_softcap=meta.real(f"{name}.attn_logit_softcapping", 50.0 if name == "gemma2" else 0.0, 0),
            final_softcap=meta.real(f"{name}.final_logit_softcapping", 30.0 if name == "gemma2" else 0.0, 0),
            experts=Experts(n_expert, count("expert_used_count", most=n_expert)) if n_expert else None,
            state=_state(meta, name) if arch.is_recurrent else None,
        )

    def sees_window(self, layer: int) -> bool:
        """Whether a layer sees a window of earlier tokens, instead of all."""
        period = self.arch.window_period
        return bool(self.window and period) and layer % period < period - 1


def _n_vocab(file: GgufFile, n_embd: int) -> int:
    table = file["token_embd.weight"]
    if len(table.ne) != 2 or table.ne[0] != n_embd:
        raise ModelError(
            f"{file.path}: tensor 'token_embd.weight' has ne {list(table.ne)}; it must be [{n_embd}, n_vocab]"
        )
    return table.ne[1]


def _rope(meta: Metadata, name: str, arch: Architecture, n_key: int) -> Rope:
    scaling = meta.text(f"{name}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise meta.error(
            f"{name}.rope.scaling.type", f"{scaling!r} is not known; known are linear, longrope, none, yarn"
        )
    factor = meta.real(f"{name}.rope.scaling.factor", 0.0, 0) or meta.real(
        f"{name}.rope.scale_linear", 1.0, 0
    )
    n_dims = meta.integer(f"{name}.rope.dimension_count", n_key, 0, n_key)
    if n_dims % 2:
        raise meta.error(f"{name}.rope.dimension_count", f"it is {n_dims}; it must be even")
    n_ctx = meta.integer(f"{name}.context_length")
    return Rope(
        n_dims=n_dims,
        mode=arch.rope,
        n_ctx_orig=meta.integer(f"{name}.rope.scaling.original_context_length", n_ctx),
        freq_base=meta.real(f"{name}.rope.freq_base", 10000.0, 0),
        freq_scale=1.0 if scaling == "none" or not factor else 1.0 / factor,
        ext_factor=1.0 if scaling == "yarn" else 0.0,
        attn_factor=meta.real(f"{name}.rope.scaling.attn_factor", 1.0, 0),
    )


def _state(meta: Metadata, name: str) -> State:
    def count(key: str, least: int = 1) -> int:
        return meta.integer(f"{name}.ssm.{key}", None, least, MAX_WIDTH)

    return State(
        n_conv=count("conv_kernel", 2),
        n_inner=count("inner_size"),
        n_state=count("state_size"),
        n_dt=count("time_step_rank"),
        normalizes=meta.flag(f"{name}.ssm.dt_b_c_rms", False),
    )
