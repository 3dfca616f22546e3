"""TextConfig: the sizes and the layers of a language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from ggmlb.core.errors import ModelError
from ggmlb.models.text.blocks import Attention, Experts, Layer, Recurrent

if TYPE_CHECKING:
    from ggmlb.models.text.keys import Keys

POOLINGS: Final = ("none", "mean", "cls", "last", "rank")
"""How hidden states become an embedding, by `pooling_type` (enum llama_pooling_type)."""

EPS_KEYS: Final = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
"""The key of the number that is added to the mean square, or variance, in norms of each kind."""


@dataclass(frozen=True)
class TextConfig:
    """Hyperparameters of a language model, and its layers.

    Attributes:
        name: The architecture's name.
        layers: The layers, each of which may have its own sizes.
        n_embd: Elements of a token's hidden state.
        n_vocab: Size of the vocabulary.
        n_ctx_train: Context size of the training [tokens].
        norm: Kind of the norms: `"rms"`, or `"layer"`.
        eps: Added to the mean square, or variance, in norms.
        pooling: A name of `POOLINGS`; the mean by default.
        embedding_scale: Factor of the embeddings.
        logit_scale: Factor of the logits.
        final_softcap: Soft cap of the logits; 0: none.
        output_norm: Name of the last norm in the file.
        n_predictors: Layers in the file after these, which predict further tokens and are not computed.
        has_embedding_norm: Whether the embeddings are normalised, by `token_embd_norm`.
        n_layer_input: Elements of the embedding that each layer has of a token; 0: layers have none.
    """

    name: str
    layers: tuple[Layer, ...]
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    norm: str
    eps: float
    pooling: str
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_softcap: float = 0.0
    output_norm: str = "output_norm"
    n_predictors: int = 0
    has_embedding_norm: bool = False
    n_layer_input: int = 0

    @classmethod
    def read(cls, keys: Keys, layers: Iterable[Layer], norm: str = "rms", **options: Any) -> TextConfig:
        """Return the configuration of a file, after its architecture has read its part of the metadata.

        Args:
            keys: The metadata.
            layers: The layers.
            norm: Kind of the norms.
            options: `embedding_scale`, `logit_scale`, `final_softcap`, `output_norm`, `has_embedding_norm`.

        Raises:
            ModelError: Metadata is missing or wrong, or a key has a value that is not supported.
        """
        config = cls(
            name=keys.name,
            layers=tuple(layers),
            n_embd=keys.n_embd,
            n_vocab=_n_vocab(keys),
            n_ctx_train=keys.count("context_length", most=1 << 30),
            norm=norm,
            eps=keys.real(EPS_KEYS[norm], None, 0, 1),
            pooling=POOLINGS[keys.count("pooling_type", POOLINGS.index("mean"), 0, len(POOLINGS) - 1)],
            n_predictors=keys.n_predictors,
            **options,
        )
        attention = next(filter(None, config.attentions), None)
        rope = attention and attention.rope
        keys.check_unread(
            {
                "attention.causal": (True,),
                "attention.key_length_swa": (attention.n_key if attention else 0,),
                "attention.value_length_swa": (attention.n_value if attention else 0,),
                "embedding_length_out": (0, keys.n_embd),
                "expert_count": (0,),
                "expert_group_count": (0, 1),
                "expert_used_count": (0,),
                "nextn_predict_layers": (0,),
                "rope.dimension_count_swa": (rope.n_dims if rope else 0,),
            }
        )
        return config

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @cached_property
    def attentions(self) -> tuple[Attention | None, ...]:
        """The attention of each layer; `None` where there is none."""
        return tuple(layer.find(Attention) for layer in self.layers)

    @cached_property
    def states(self) -> tuple[Mapping[str, int], ...]:
        """Elements of each recurrent state of a sequence, by its name, in each layer; empty: it has none."""
        return tuple(
            {k: n for b in layer.blocks() if isinstance(b, Recurrent) for k, n in b.states.items()}
            for layer in self.layers
        )

    @property
    def has_kv(self) -> bool:
        """Whether a layer has keys and values."""
        return any(self.attentions)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer has recurrent states."""
        return any(self.states)

    @cached_property
    def experts(self) -> Experts | None:
        """The experts of the layer whose tokens use most of them; `None` if there are none."""
        found = [experts for layer in self.layers if (experts := layer.find(Experts))]
        return max(found, key=lambda experts: experts.n_used, default=None)

    @cached_property
    def windows(self) -> tuple[int, ...]:
        """The different sizes of sliding windows, 0 (no window) first."""
        return 0, *sorted({a.window for a in self.attentions if a} - {0})

    @property
    def n_ctx_orig(self) -> int:
        """Context size up to which RoPE's frequencies are those of the training [tokens]."""
        ropes = (a.rope for a in self.attentions if a)
        return next((rope.n_ctx_orig for rope in ropes if rope), self.n_ctx_train)


def _n_vocab(keys: Keys) -> int:
    table = keys.file["token_embd.weight"]
    if len(table.ne) != 2 or table.ne[0] != keys.n_embd or not table.ne[1]:
        raise ModelError(
            f"{keys.file.path}: tensor 'token_embd.weight' has ne {list(table.ne)}; "
            f"it must be [{keys.n_embd}, n_vocab]"
        )
    return table.ne[1]
