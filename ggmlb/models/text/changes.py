"""Changes: the steering vectors and adapters of a model that are switched on."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import real_numbers
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from ggmlb.models.text.adapter import Adapter


class Changes:
    """The steering vectors and adapters of a model that its graphs apply.

    Vectors and scales are inputs of graphs, so that a graph serves all their values.

    Args:
        n_layer: Layers of the model.
        n_embd: Elements of a hidden state.

    Attributes:
        lock: Held while a batch is computed, and while vectors and adapters change.
        steered: By layer, the sum of the vectors that are added to the hidden states after it, if not 0.
        adapters: The loaded adapters.
        resumed: A layer, and the hidden states after it by position: only later layers are computed;
            `None`: all layers are computed.
    """

    def __init__(self, n_layer: int, n_embd: int) -> None:
        self._n_layer = n_layer
        self._n_embd = n_embd
        self.lock = RLock()
        self.steered: dict[int, npt.NDArray[np.float32]] = {}
        self._vectors: list[dict[int, npt.NDArray[np.float32]]] = []
        self.adapters: list[Adapter] = []
        self.resumed: tuple[int, npt.NDArray[np.float32]] | None = None
        self._are_all_on = False

    @property
    def key(self) -> Hashable:
        """Part of a graph's cache key: steered layers, active adapters, the layer after which it starts.

        A graph that starts after a layer has that layer's output as an input (`resuming`).
        """
        if not (self.steered or self.adapters or self.resumed):
            return None  # fast path of each step
        return tuple(sorted(self.steered)), self.active, self.resumed and self.resumed[0]

    @contextmanager
    def resuming(self, layer: int, states: npt.NDArray[np.float32]) -> Iterator[None]:
        """Context manager: compute only the layers after `layer`, from its `states` `(n_tokens, n_embd)`."""
        with self.lock:
            self.resumed = layer, states
            try:
                yield
            finally:
                self.resumed = None

    @property
    def active(self) -> tuple[Adapter, ...]:
        """The adapters whose scale is not 0."""
        return tuple(adapter for adapter in self.adapters if adapter.scale or self._are_all_on)

    @contextmanager
    def with_all_adapters(self) -> Iterator[None]:
        """Context manager in which all adapters count as on, for reserving memory."""
        self._are_all_on = True
        try:
            yield
        finally:
            self._are_all_on = False

    @contextmanager
    def steering(self, vectors: Mapping[int, npt.ArrayLike], scale: float) -> Iterator[None]:
        """Context manager: add `scale` times the vector of each layer to the hidden states after it."""
        if not math.isfinite(scale):
            raise ArgumentError(f"steering: the scale is {scale}; give a finite number")
        added = {layer: np.float32(scale) * self._vector(layer, vector) for layer, vector in vectors.items()}
        with self.lock:
            self._vectors.append(added)
            self._add_up()
        try:
            yield
        finally:  # blocks of several threads end in any order
            with self.lock:
                self._vectors = [kept for kept in self._vectors if kept is not added]
                self._add_up()

    def _add_up(self) -> None:
        layers = {layer for vectors in self._vectors for layer in vectors}
        sums = {i: np.array(sum(v[i] for v in self._vectors if i in v)) for i in layers}
        self.steered = {layer: vector for layer, vector in sums.items() if vector.any()}

    def _vector(self, layer: int, values: npt.ArrayLike) -> npt.NDArray[np.float32]:
        if not isinstance(layer, (int, np.integer)) or not 0 <= layer < self._n_layer:
            raise ArgumentError(f"steering: there is no layer {layer!r}; layers are 0 to {self._n_layer - 1}")
        vector = real_numbers(values, "steering").astype(np.float32)
        if vector.shape != (self._n_embd,) or not np.isfinite(vector).all():
            raise ArgumentError(
                f"steering: the vector of layer {layer} has shape {vector.shape}; give {self._n_embd} finite "
                "numbers"
            )
        return vector
