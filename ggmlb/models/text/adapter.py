"""Adapter: LoRA from a GGUF file, low-rank products that are added to those of a model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ggmlb import Backend, Tensor
from ggmlb.core.errors import ArgumentError, ModelError, did_you_mean, shown
from ggmlb.core.lifetime import Closeable
from ggmlb.interface.memory_table import Space
from ggmlb.models.filling import slices, values_of
from ggmlb.models.gguf import GgufFile
from ggmlb.models.weights import Source, Weights

EMBEDDINGS = "token_embd.weight"
"""The weight whose factors are stored the other way round: rows of `a` are those of tokens."""


class Factors(NamedTuple):
    """What is added to a weight, `b @ a` times `alpha / rank` and the adapter's scale.

    Attributes:
        a: `[n_in, rank]`, of experts `[n_in, rank, n_expert]`; of embeddings `[rank, n_vocab]`.
        b: `[rank, n_out]`, of experts `[rank, n_out, n_expert]`; of embeddings `[rank, n_embd]`.
    """

    a: Tensor
    b: Tensor


class Adapter(Closeable):
    """A LoRA adapter on the devices of a model's layers; made by `TextModel.load_adapter`.

    It is on while its `scale` is not 0, from the next batch on, and changes no weight of the model. Keys and
    values that a session kept before stay as they are. A context manager, which frees its memory.

    Args:
        path: A GGUF file of `general.type` "adapter", as llama.cpp's `convert_lora_to_gguf.py` writes it.
        architecture: The model's.
        weights: Those that may have factors, by name, with the device of each.
        scale: At first.
        remove: Called when it is closed.

    Attributes:
        path: The file.
        alpha: The file's scale, divided by the rank; 0: the rank.
        factors: By the names of the weights.
        nbytes: Their size [bytes].

    Raises:
        ModelError: The file is missing or damaged, no LoRA adapter, of another architecture, or has a tensor
            that does not fit.
        ArgumentError: The scale is no finite number.
        AllocationError: A device lacks room.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        weights: Mapping[str, tuple[Source, Backend]],
        scale: float,
        remove: Callable[[Adapter], None],
    ) -> None:
        self.path = path
        self.scale = scale
        self._remove = remove
        self._file = file = GgufFile(path)
        self._check_kind(architecture)
        self.alpha = file.metadata.real("adapter.lora.alpha", 0.0)
        names = self._paired(weights)
        self._weights = Weights(file)
        sources: dict[Backend, dict[str, Source]] = {}
        for name in names:
            source, home = weights[name]
            sources.setdefault(home, {}).update(self._sources(name, source))
        try:
            placed: dict[str, Tensor] = {}
            for home, some in sources.items():
                placed |= self._weights.place(some, home)
            if not any(tensor.placed("load").is_planned for tensor in placed.values()):
                self._check_finite(sources.values())
        except BaseException:
            self._weights.free()
            raise
        self.factors = {name: Factors(placed[name + ".lora_a"], placed[name + ".lora_b"]) for name in names}
        self.nbytes = sum(tensor.nbytes for tensor in placed.values())

    @property
    def spaces(self) -> Sequence[Space]:
        """Memories that hold its factors, with the bytes in each."""
        return self._weights.spaces

    @property
    def scale(self) -> float:
        """What the products are multiplied by; 0: the adapter is off."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ArgumentError(f"an adapter's scale is {value!r}; give a finite number, 0 for off")
        self._scale = float(value)

    def multiplier(self, rank: int) -> float:
        """What a product of this rank is multiplied by."""
        return self._scale * (self.alpha / rank if self.alpha else 1.0)

    def _check_kind(self, architecture: str) -> None:
        meta = self._file.metadata
        kinds = (
            ("general.type", "adapter"),
            ("adapter.type", "lora"),
            ("general.architecture", architecture),
        )
        for key, wanted in kinds:
            found = meta.text(key, "")
            if found != wanted:
                raise meta.error(key, f"{shown(found)!r}; a LoRA adapter of this model has {wanted!r}")
        if "adapter.alora.invocation_tokens" in meta:
            raise meta.error(
                "adapter.alora.invocation_tokens", "adapters that wait for tokens (aLoRA) are not known"
            )

    def _paired(self, weights: Mapping[str, object]) -> list[str]:
        """Return the weights that have factors."""
        names: dict[str, None] = {}
        for tensor in self._file:
            name, _, end = tensor.rpartition(".")
            if end not in ("lora_a", "lora_b") or name not in weights:
                raise self._error(
                    tensor, f"the model multiplies with no weight of that name{did_you_mean(name, weights)}"
                )
            other = f"{name}.lora_{'b' if end == 'lora_a' else 'a'}"
            if other not in self._file:
                raise self._error(tensor, f"its partner {other!r} is missing")
            names[name] = None
        if not names:
            raise ModelError(f"{self.path} has no tensors; convert the adapter again")
        return list(names)

    def _sources(self, name: str, weight: Source) -> dict[str, Source]:
        """The sources of a weight's factors."""
        a, b = name + ".lora_a", name + ".lora_b"
        *experts, n_out, n_in = weight.shape
        rank = self._file[b].ne[0]
        shapes = {a: (*experts, rank, n_in), b: (*experts, n_out, rank)}
        if name == EMBEDDINGS:
            shapes = {a: (n_out, rank), b: (n_in, rank)}
        for tensor, shape in shapes.items():
            found = self._file[tensor].shape
            if found != shape:
                raise self._error(
                    tensor,
                    f"it has shape {list(found)}; {name!r} of the model, and rank {rank}, ask for "
                    f"{list(shape)}",
                )
            self._file.weight(tensor, shape)
        return {
            tensor: Source((tensor,), shape, is_matrix=True, is_multiplied=(name, tensor) != (EMBEDDINGS, a))
            for tensor, shape in shapes.items()
        }

    def _check_finite(self, sources: Iterable[Mapping[str, Source]]) -> None:
        for tensor, source in (item for some in sources for item in some.items()):
            extent = self._file.weight(tensor, source.shape)
            if not all(np.isfinite(values_of(rows, extent.dtype)).all() for rows in slices(extent)):
                raise self._error(tensor, "it has NaN or infinity")

    def _error(self, tensor: str, found: str) -> ModelError:
        return ModelError(
            f"{self.path}: tensor {shown(tensor)!r} of the adapter does not fit: {found}; give an adapter of "
            "this model"
        )

    def close(self) -> None:
        """Switch it off and free its memory; has no effect if already closed."""
        self._remove(self)
        self._weights.free()

    def __repr__(self) -> str:
        return f"<Adapter {self.path.name}: {len(self.factors)} weights, scale {self.scale:g}>"
