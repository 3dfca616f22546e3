"""TextConfig: the sizes of a language model, read from a GGUF file's metadata."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from ggmlb import RopeType
from ggmlb.core.errors import ModelError, did_you_mean, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ggmlb.models.gguf import GgufFile


@dataclass(frozen=True, slots=True)
class Architecture:
    """Properties of an architecture that the metadata of a file does not state.

    The rest is read off the file's tensors: biases, norms of queries and keys, norms after attention and
    feed-forward, fused products, experts, a separate output matrix.

    Attributes:
        rope: Type of RoPE.
        activation: Activation of the feed-forward part: `"swiglu"` or `"geglu"`.
        scales_embeddings: Whether embeddings are multiplied by the square root of `n_embd`.
        window_period: Default of `attention.sliding_window_pattern`: every layer of this many but the last
            has a sliding window; 0: the architecture has none.
        window: Default size of the window [tokens].
        window_rope: Default base and factor of the RoPE frequencies in layers with a window; `None`: those
            of the other layers.
        attn_softcap: Default soft cap of attention scores; `None`: none, whatever the file says.
        final_softcap: Default soft cap of logits; `None` likewise.
        many_layers: Number of layers of the variant that scales attention scores by `n_embd / n_head` instead
            of the head size; 0: no such variant.
        is_recurrent: Whether layers have recurrent states instead of a KV cache (Mamba).
    """

    rope: RopeType = RopeType.NEOX
    activation: str = "swiglu"
    scales_embeddings: bool = False
    window_period: int = 0
    window: int = 0
    window_rope: tuple[float, float] | None = None
    attn_softcap: float | None = None
    final_softcap: float | None = None
    many_layers: int = 0
    is_recurrent: bool = False


ARCHITECTURES = {
    "llama": Architecture(RopeType.NORMAL),
    "qwen2": Architecture(),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(),
    "phi3": Architecture(),
    "mamba": Architecture(is_recurrent=True),
    "gemma2": Architecture(
        activation="geglu", scales_embeddings=True, window_period=2, window=4096, attn_softcap=50.0,
        final_softcap=30.0, many_layers=46,
    ),
    "gemma3": Architecture(
        activation="geglu", scales_embeddings=True, window_period=6, window_rope=(10000.0, 1.0),
        final_softcap=0.0, many_layers=62,
    ),
}  # fmt: skip
"""By `general.architecture`; Mistral, Mixtral and SmolLM are `llama`."""

MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
"""Bounds on metadata, far beyond any model."""

MIN_BASE: Final = 1e-3
"""Smallest base of the RoPE frequencies."""

POOLINGS: Final = ("none", "mean", "cls", "last", "rank")
"""How hidden states become an embedding, by `pooling_type` (enum llama_pooling_type)."""

WITHOUT_EFFECT: Final = frozenset({
    "attention.head_count", "attention.head_count_kv",  # of recurrent models
    "classifier.activation", "classifier.output_labels", "classifier.pooling_type",  # of scores of texts
    "expert_feed_forward_length", "expert_group_used_count", "rope.scaling.finetuned", "tensor_data_layout",
    "vocab_size",
})  # fmt: skip
"""Keys that are not read: they have no effect here, or the tensors give the sizes."""

MAX_NAMED: Final = 8
"""Most keys that a warning names."""


class Keys:
    """Reads metadata keys `<architecture>.*`, named without that prefix, and remembers those read.

    Args:
        file: The model.
        arch: Its architecture.
    """

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._path = file.path
        self._meta = file.metadata
        self._arch = arch
        self._read: set[str] = set()

    def _name(self, key: str) -> str:
        self._read.add(key)
        return f"{self._arch}.{key}"

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH) -> int:
        """Return an integer, or `default` without the key; raise a ModelError outside `least` to `most`."""
        return self._meta.integer(self._name(key), default, least, most)

    def real(self, key: str, default: float | None = None, least: float = 0, most: float = 1e30) -> float:
        """Return a finite number, or `default` without the key; raise a ModelError outside the limits."""
        return self._meta.real(self._name(key), default, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or `default` if there is no such key."""
        return self._meta.flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        """Return a string, or `default` if there is no such key."""
        return self._meta.text(self._name(key), default)

    def by_layer(self, key: str, n_layer: int) -> tuple[bool, ...] | None:
        """Return a boolean for each layer from an array, false past its end; `None` if it is no array."""
        name = self._name(key)
        if name not in self._meta or self._meta.slot(name).length is None:
            return None
        found = self._meta.numbers(name)
        if found.ndim != 1 or found.dtype.kind not in "biu" or found.size > MAX_LAYERS:
            raise self.error(key, f"it is {self._meta.slot(name)}; it must be an array of bools or integers")
        return (*(found[:n_layer] != 0).tolist(), *(False,) * (n_layer - found.size))

    def error(self, key: str, found: str) -> ModelError:
        """Return (not raise) a ModelError that names the file and the key, and states the fault `found`."""
        return self._meta.error(self._name(key), found)

    def check_unread(self, neutral: Mapping[str, tuple[int, ...]]) -> None:
        """Raise a ModelError if an unread key differs from its `neutral` values; warn of other unread keys.

        Args:
            neutral: Unsupported keys, and their values that have no effect.

        Raises:
            ModelError: An unsupported key has another value.
        """
        start = f"{self._arch}."
        own = {key.removeprefix(start): key for key in self._meta if key.startswith(start)}
        values = {key: self._meta.first(own[key], 1) for key in sorted(own.keys() - self._read)}
        for key in values.keys() & neutral.keys():
            if values[key] not in neutral[key]:
                known = " and ".join(map(str, neutral[key]))
                raise self.error(key, f"it is {values[key]}; supported: {known}")
        ignored = WITHOUT_EFFECT | neutral.keys()
        unused = [shown(own[key]) for key, value in values.items() if value and key not in ignored]
        if unused:
            more = f" and {len(unused) - MAX_NAMED} others" if len(unused) > MAX_NAMED else ""
            warnings.warn(
                f"{self._path}: metadata without effect on this architecture, as in llama.cpp: "
                f"{', '.join(unused[:MAX_NAMED])}{more}",
                RuntimeWarning,
                stacklevel=4,
            )


@dataclass(frozen=True, slots=True)
class Rope:
    """Parameters of RoPE; names as in `Context.rope_ext`."""

    n_dims: int
    mode: RopeType
    n_ctx_orig: int
    freq_base: float
    freq_scale: float
    ext_factor: float
    attn_factor: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a mixture of experts.

    Attributes:
        n: Experts in a layer.
        n_used: Experts that each token uses.
    """

    n: int
    n_used: int


@dataclass(frozen=True, slots=True)
class State:
    """Sizes of a recurrent layer (Mamba): convolution, channels, state, time steps.

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


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Hyperparameters of a language model: layers, heads, widths, RoPE, experts.

    Attributes:
        name: The architecture's name.
        arch: Properties of the architecture.
        n_layer: Number of layers.
        n_embd: Elements of a token's hidden state.
        n_head: Attention heads.
        n_head_kv: KV heads, each shared by `n_head / n_head_kv` attention heads.
        n_key: Elements of a key in a head.
        n_value: Elements of a value in a head.
        n_ff: Hidden size of the feed-forward part.
        n_vocab: Size of the vocabulary.
        n_ctx_train: Context size of the training [tokens].
        eps: Added to the mean square in norms.
        rope: RoPE of layers without a sliding window.
        rope_window: RoPE of layers with a sliding window.
        attn_scale: Factor of attention scores.
        windowed: Whether each layer has a sliding window.
        window: Size of the sliding window [tokens]; 0: there is none.
        attn_softcap: Soft cap of attention scores; 0: none.
        final_softcap: Soft cap of logits; 0: none.
        experts: Sizes of the mixture of experts; `None` if there is none.
        state: Sizes of recurrent layers; `None` if there are none.
        pooling: A name of `POOLINGS`; the mean by default.
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
    windowed: tuple[bool, ...]
    window: int
    attn_softcap: float
    final_softcap: float
    experts: Experts | None
    state: State | None
    pooling: str

    @classmethod
    def from_file(cls, file: GgufFile) -> TextConfig:
        """Read the hyperparameters from a GGUF file's metadata.

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

        keys = Keys(file, name)
        n_embd = keys.count("embedding_length")
        n_layer = keys.count("block_count", most=MAX_LAYERS)
        if arch.is_recurrent:
            n_head = n_head_kv = 1
        else:
            n_head = keys.count("attention.head_count", most=n_embd)
            n_head_kv = keys.count("attention.head_count_kv", n_head, most=n_head)
        if n_head % n_head_kv:
            raise keys.error(
                "attention.head_count_kv", f"it is {n_head_kv}; it must divide the {n_head} heads"
            )
        n_key = keys.count("attention.key_length", max(1, n_embd // n_head))
        n_value = keys.count("attention.value_length", n_key)
        rope = _rope(keys, arch, n_key)
        windowed, window, rope_window = _windows(keys, arch, n_layer, rope)
        n_expert = keys.count("expert_count", 0, 0, 1 << 12)
        n_used = keys.count("expert_used_count", None if n_expert else 0, min(1, n_expert), n_expert)
        has_ff = not (arch.is_recurrent or n_expert)
        per_score = n_embd // n_head if n_layer == arch.many_layers else n_key
        config = cls(
            name=name,
            arch=arch,
            n_layer=n_layer,
            n_embd=n_embd,
            n_head=n_head,
            n_head_kv=n_head_kv,
            n_key=n_key,
            n_value=n_value,
            n_ff=keys.count("feed_forward_length", *(() if has_ff else (0, 0))),
            n_vocab=_n_vocab(file, n_embd),
            n_ctx_train=keys.count("context_length", most=1 << 30),
            eps=keys.real("attention.layer_norm_rms_epsilon", None, 0, 1),
            rope=rope,
            rope_window=rope_window,
            attn_scale=per_score**-0.5,
            windowed=windowed,
            window=window,
            attn_softcap=_softcap(keys, "attn_logit_softcapping", arch.attn_softcap),
            final_softcap=_softcap(keys, "final_logit_softcapping", arch.final_softcap),
            experts=Experts(n_expert, n_used) if n_expert else None,
            state=_state(keys) if arch.is_recurrent else None,
            pooling=POOLINGS[keys.count("pooling_type", POOLINGS.index("mean"), 0, len(POOLINGS) - 1)],
        )
        keys.check_unread(
            {
                "attention.causal": (True,),
                "attention.key_length_swa": (n_key,),
                "attention.value_length_swa": (n_value,),
                "embedding_length_out": (0, n_embd),
                "expert_group_count": (0, 1),
                "nextn_predict_layers": (0,),
                "rope.dimension_count_swa": (rope.n_dims,),
            }
        )
        return config

    def sees_window(self, layer: int) -> bool:
        """Whether a layer has a sliding window."""
        return self.windowed[layer]


def _windows(keys: Keys, arch: Architecture, n_layer: int, rope: Rope) -> tuple[tuple[bool, ...], int, Rope]:
    """Return which layers have a sliding window, its size, and their RoPE."""
    none = (False,) * n_layer, 0, rope
    if not arch.window_period or not (
        window := keys.count("attention.sliding_window", arch.window, 0, 1 << 30)
    ):
        return none
    windowed = keys.by_layer("attention.sliding_window_pattern", n_layer)
    if windowed is None:
        period = keys.count("attention.sliding_window_pattern", arch.window_period, 0, 1 << 30)
        windowed = tuple(period == 0 or i % period < period - 1 for i in range(n_layer))
    base, scale = arch.window_rope or (rope.freq_base, rope.freq_scale)
    base = keys.real("rope.freq_base_swa", base, MIN_BASE)
    return (windowed, window, replace(rope, freq_base=base, freq_scale=scale)) if any(windowed) else none


def _softcap(keys: Keys, key: str, default: float | None) -> float:
    return 0.0 if default is None else keys.real(key, default)


def _n_vocab(file: GgufFile, n_embd: int) -> int:
    table = file["token_embd.weight"]
    if len(table.ne) != 2 or table.ne[0] != n_embd or not table.ne[1]:
        raise ModelError(
            f"{file.path}: tensor 'token_embd.weight' has ne {list(table.ne)}; it must be [{n_embd}, n_vocab]"
        )
    return table.ne[1]


def _rope(keys: Keys, arch: Architecture, n_key: int) -> Rope:
    scaling = keys.text("rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn", "longrope"):
        raise keys.error(
            "rope.scaling.type", f"{scaling!r} is not known; known are linear, longrope, none, yarn"
        )
    older = keys.real("rope.scale_linear", 0.0)
    factor = keys.real("rope.scaling.factor", older)
    n_dims = keys.count("rope.dimension_count", n_key, most=n_key)
    if n_dims % 2:
        raise keys.error("rope.dimension_count", f"it is {n_dims}; it must be even")
    return Rope(
        n_dims=n_dims,
        mode=arch.rope,
        n_ctx_orig=keys.count(
            "rope.scaling.original_context_length", keys.count("context_length", most=1 << 30), most=1 << 30
        ),
        freq_base=keys.real("rope.freq_base", 10000.0, MIN_BASE),
        freq_scale=1.0 if scaling == "none" or not factor else 1.0 / factor,
        ext_factor=1.0 if scaling == "yarn" else 0.0,
        attn_factor=keys.real("rope.scaling.attn_factor", 1.0),
    )


def _state(keys: Keys) -> State:
    return State(
        n_conv=keys.count("ssm.conv_kernel", least=2),
        n_inner=keys.count("ssm.inner_size"),
        n_state=keys.count("ssm.state_size"),
        n_dt=keys.count("ssm.time_step_rank"),
        normalizes=keys.flag("ssm.dt_b_c_rms", False),
    )
