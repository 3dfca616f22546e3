"""Keys: the metadata of a GGUF file that an architecture reads."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from ggmlb.core.errors import ModelError, shown

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile

MAX_LAYERS = 1 << 12
MAX_WIDTH = 1 << 20
"""Bounds on metadata, far beyond any model."""

WITHOUT_EFFECT: Final = frozenset({
    "attention.head_count", "attention.head_count_kv",  # of recurrent models
    "attention.layer_norm_epsilon",  # of models with RMS norms
    "classifier.activation", "classifier.output_labels", "classifier.pooling_type",  # of scores of texts
    "expert_group_used_count", "feed_forward_length",  # of models that have only experts
    "rope.scaling.finetuned", "tensor_data_layout", "vocab_size",
})  # fmt: skip
"""Keys that are not read: they have no effect here, or tensors give the same."""

MAX_NAMED: Final = 8
"""Most keys that a warning names."""


class Keys:
    """Reads metadata keys `<architecture>.*`, named without that prefix, and remembers those read.

    Args:
        file: The model.
        name: Its architecture.

    Attributes:
        file, name: As given.
        n_layer: Number of layers.
        n_predictors: Layers after these that predict further tokens, and are not computed.
        n_embd: Elements of a token's hidden state.
    """

    def __init__(self, file: GgufFile, name: str) -> None:
        self.file = file
        self.name = name
        self._meta = file.metadata
        self._read: set[str] = set()
        self.n_embd = self.count("embedding_length")
        self.n_layer = self.count("block_count", most=MAX_LAYERS)
        self.n_predictors = 0

    def skip_predictors(self) -> None:
        """Leave out the last layers, `nextn_predict_layers`, which predict further tokens."""
        self.n_predictors = self.count("nextn_predict_layers", 0, 0, self.n_layer - 1)
        self.n_layer -= self.n_predictors

    def _name(self, key: str) -> str:
        self._read.add(key)
        return f"{self.name}.{key}"

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MAX_WIDTH) -> int:
        """Return an integer, or `default` without the key; raise a ModelError outside `least` to `most`."""
        return self._meta.integer(self._name(key), default, least, most)

    def counts(
        self,
        key: str,
        default: Sequence[int] | None = None,
        least: int = 1,
        most: int | Sequence[int] = MAX_WIDTH,
    ) -> tuple[int, ...]:
        """Return an integer for each layer: those of an array, or the same single value for all.

        Args:
            key: The key.
            default: Values without the key; `None`: it must be there.
            least: Smallest value.
            most: Largest value, of all layers or of each.

        Raises:
            ModelError: There is no such key, a value is out of range, or the array has another length.
        """
        name, limits = self._name(key), [most] * self.n_layer if isinstance(most, int) else most
        if name not in self._meta and default is not None:
            return tuple(default)
        if name not in self._meta or self._meta.slot(name).length is None:
            return (self._meta.integer(name, None, least, min(limits)),) * self.n_layer
        found = (self.numbers(key, self.n_layer + self.n_predictors) or ())[: self.n_layer]
        for layer, (n, limit) in enumerate(zip(found, limits, strict=True)):
            if not least <= n <= limit:
                raise self.error(key, f"it is {n} for layer {layer}; it must be {least} to {limit}")
        return found

    def real(self, key: str, default: float | None = None, least: float = 0, most: float = 1e30) -> float:
        """Return a finite number, or `default` without the key; raise a ModelError outside the limits."""
        return self._meta.real(self._name(key), default, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean, or `default` if there is no such key."""
        return self._meta.flag(self._name(key), default)

    def text(self, key: str, default: str) -> str:
        """Return a string, or `default` if there is no such key."""
        return self._meta.text(self._name(key), default)

    def by_layer(self, key: str) -> tuple[bool, ...] | None:
        """Return a boolean for each layer from an array, false past its end; `None` if it is no array."""
        name, n_layer = self._name(key), self.n_layer
        if name not in self._meta or self._meta.slot(name).length is None:
            return None
        found = self._meta.numbers(name)
        if found.ndim != 1 or found.dtype.kind not in "biu" or found.size > MAX_LAYERS:
            raise self.error(key, f"it is {self._meta.slot(name)}; it must be an array of bools or integers")
        return (*(found[:n_layer] != 0).tolist(), *(False,) * (n_layer - found.size))

    def numbers(self, key: str, n: int) -> tuple[int, ...] | None:
        """Return an array of `n` integers; `None` without the key."""
        name = self._name(key)
        if name not in self._meta:
            return None
        found = self._meta.numbers(name) if self._meta.slot(name).length is not None else None
        if found is None or found.dtype.kind not in "iu" or found.shape != (n,):
            raise self.error(key, f"it is {self._meta.slot(name)}; it must be {n} integers")
        return tuple(found.tolist())

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
        start = f"{self.name}."
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
                f"{self.file.path}: metadata without effect on this architecture, as in llama.cpp: "
                f"{', '.join(unused[:MAX_NAMED])}{more}",
                RuntimeWarning,
                stacklevel=6,
            )
