"""Adapters: LoRA factors beside a model's weights, from GGUF files or new."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, Context, DType, Tensor, alloc_ctx_tensors, save_gguf
from ggmlb.core.arguments import checked_methods, generator, named
from ggmlb.core.errors import ArgumentError, ModelError, did_you_mean, shown
from ggmlb.core.lifetime import Closeable
from ggmlb.interface.memory_table import Space
from ggmlb.models.filling import slices, values_of
from ggmlb.models.gguf import GgufFile
from ggmlb.models.weights import Source, Weights

EMBEDDINGS = "token_embd.weight"
"""The weight whose factors are transposed: rows of `a` belong to tokens."""

Homes = Mapping[str, tuple[Source, Backend]]
"""Weights of a model that can have factors, by name, with the device of each."""


class Factors(NamedTuple):
    """LoRA factors of a weight, to which `b @ a * scale * alpha / rank` is added.

    Attributes:
        a: `[n_in, rank]`, of experts `[n_in, rank, n_expert]`; of embeddings `[rank, n_vocab]`.
        b: `[rank, n_out]`, of experts `[rank, n_out, n_expert]`; of embeddings `[rank, n_embd]`.
    """

    a: Tensor
    b: Tensor


class Placed(NamedTuple):
    """LoRA factors in device memory, with their sizes and a function that frees them.

    Attributes:
        factors: Factors by the names of the weights.
        spaces: Bytes by buffer type.
        free: Frees the memory.
    """

    factors: dict[str, Factors]
    spaces: Sequence[Space]
    free: Callable[[], None]


@named("an adapter, as new_adapter() or load_adapter(path) makes one")
@checked_methods
class Adapter(Closeable):
    """A LoRA adapter on the devices of a model's layers; see `TextModel.load_adapter` and `new_adapter`.

    It is on while its `scale` is not 0, from the next batch on, and changes no weight of the model. The KV
    cache of earlier tokens of a session stays as it is. A context manager, which frees its memory.

    Args:
        source: The source of its factors.
        architecture: The architecture of the model.
        weights: Weights that can have factors.
        scale: Initial scale.
        remove: Called when it is closed.

    Attributes:
        source: As given.
        alpha: LoRA alpha; 0: the rank.
        factors: Factors by the names of the weights.
        spaces: Bytes of the factors by buffer type.
        nbytes: Size of the factors [bytes].

    Raises:
        ModelError: A file is missing or damaged, no LoRA adapter, of another architecture, or has a tensor
            that does not fit.
        ArgumentError: The scale is no finite number, or no weight matches.
        AllocationError: A device lacks room.
    """

    def __init__(
        self,
        source: FactorSource,
        architecture: str,
        weights: Homes,
        scale: float,
        remove: Callable[[Adapter], None],
    ) -> None:
        self.source = source
        self.scale = scale
        self.alpha = source.alpha
        self._architecture = architecture
        self._remove = remove
        self.factors, self.spaces, self._free = source.place(architecture, weights)
        self.nbytes = sum(tensor.nbytes for factors in self.factors.values() for tensor in factors)

    @property
    def scale(self) -> float:
        """Strength of the adapter (0: off)."""
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ArgumentError(f"an adapter's scale is {value!r}; give a finite number, 0 for off")
        self._scale = float(value)

    def multiplier(self, rank: int) -> float:
        """Return `scale * alpha / rank`, the factor by which `b @ a` is multiplied.

        Raises:
            ArgumentError: The rank is not positive.
        """
        if rank < 1:
            raise ArgumentError(f"multiplier: the rank is {rank}; give 1 or more")
        return self._scale * (self.alpha / rank if self.alpha else 1.0)

    def save(self, path: str | PathLike[str]) -> None:
        """Save the adapter as a GGUF file, which `load_adapter` and llama.cpp read; `scale` is not saved.

        Raises:
            ModelError: The file cannot be written.
        """
        metadata: dict[str, str | float] = {
            "general.type": "adapter",
            "general.architecture": self._architecture,
            "adapter.type": "lora",
            "adapter.lora.alpha": float(self.alpha),
        }
        tensors = {
            f"{name}.lora_{part}": tensor
            for name, factors in self.factors.items()
            for part, tensor in zip("ab", factors, strict=True)
        }
        save_gguf(path, metadata, tensors)

    def close(self) -> None:
        """Switch the adapter off and free its memory; has no effect if already closed."""
        self._remove(self)
        self._free()

    def __repr__(self) -> str:
        return f"<Adapter {self.source.name}: {len(self.factors)} weights, scale {self.scale:g}>"


@dataclass(frozen=True)
class NewFactors:
    """New LoRA factors to train, f32; `a` is random, as in PEFT, and `b` is 0.

    Attributes:
        targets: Regular expression: weights whose names it matches anywhere have factors.
        rank: Rows of `a`.
        alpha: LoRA alpha: products are multiplied by `alpha / rank`.
        seed: Seed of the random numbers.
    """

    targets: str
    rank: int
    alpha: float
    seed: int

    trainable: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The adapter's name in error messages."""
        return f"new, rank {self.rank}"

    def place(self, architecture: str, weights: Homes) -> Placed:
        """Allocate new factors, each on the device of its weight; any `architecture` is accepted.

        Raises:
            ArgumentError: No weight matches, or the rank is too large.
            AllocationError: A device lacks room.
        """
        try:
            targets = re.compile(self.targets)
        except re.error as error:
            raise ArgumentError(
                f"new_adapter: targets {self.targets!r} are no regular expression: {error}"
            ) from None
        names = [n for n in weights if targets.search(n) and len(weights[n][0].shape) == 2]
        if not names:
            known = dict.fromkeys(re.sub(r"(?<=blk\.)\d+", "N", n) for n in weights)
            raise ArgumentError(f"new_adapter: targets {self.targets!r} match none of {', '.join(known)}")
        if self.rank > (most := min(min(weights[n][0].shape) for n in names)):
            raise ArgumentError(
                f"new_adapter: the rank is {self.rank}; give at most {most}, the least extent of a weight"
            )
        rng = generator(self.seed, "new_adapter")

        def values(a: Tensor, b: Tensor) -> tuple[npt.ArrayLike, npt.ArrayLike]:
            bound = 1 / math.sqrt(a.ne[0])  # as in PyTorch's Linear
            return rng.uniform(-bound, bound, a.shape), np.zeros(b.shape)

        return _place_trainable(names, weights, lambda _: self.rank, values)


def _place_trainable(
    names: Iterable[str],
    weights: Homes,
    rank: Callable[[str], int],
    values: Callable[[Tensor, Tensor], tuple[npt.ArrayLike, npt.ArrayLike]],
) -> Placed:
    """Place factors as plain f32, which training can change.

    Args:
        names: Names of the weights that have factors.
        weights: All weights that can have factors.
        rank: Returns the rank of a weight's factors.
        values: Returns the values of a weight's two factors.
    """
    contexts: dict[Backend, Context] = {}
    factors: dict[str, Factors] = {}
    for name in names:
        source, home = weights[name]
        ctx = contexts.setdefault(home, Context())
        a, b = (
            ctx.new_tensor(DType.F32, shape[::-1], f"{name}.lora_{part}")
            for part, shape in zip("ab", factor_shapes(name, source, rank(name)), strict=True)
        )
        factors[name] = Factors(a, b)
    with ExitStack() as stack:
        buffers = [stack.enter_context(alloc_ctx_tensors(ctx, home)) for home, ctx in contexts.items()]
        for pair in factors.values():
            if not pair.a.placed("load").is_planned:
                for tensor, array in zip(pair, values(*pair), strict=True):
                    tensor.set_array(array)
        spaces = [(inner.buft, inner.size) for buffer in buffers for inner in buffer.allocations]
        return Placed(factors, spaces, stack.pop_all().close)


def factor_shapes(name: str, weight: Source, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the LoRA factors `a` and `b` of a weight, in NumPy order."""
    *experts, n_out, n_in = weight.shape
    if name == EMBEDDINGS:
        return (n_out, rank), (n_in, rank)
    return (*experts, rank, n_in), (*experts, n_out, rank)


class AdapterFile:
    """A GGUF file of `general.type` "adapter", as llama.cpp's `convert_lora_to_gguf.py` writes it.

    Args:
        path: The file.
        trainable: Whether to place its factors as f32, for training; else in the fastest layout.

    Attributes:
        alpha: LoRA alpha.

    Raises:
        ModelError: The file is missing or damaged.
    """

    def __init__(self, path: Path, trainable: bool = False) -> None:
        self.path = path
        self.trainable = trainable
        self._file = GgufFile(path)
        self.alpha = self._file.metadata.real("adapter.lora.alpha", 0.0)

    @property
    def name(self) -> str:
        """The adapter's name in error messages."""
        return self.path.name

    def place(self, architecture: str, weights: Homes) -> Placed:
        """Load the file's factors, each onto its weight's device; raise if `architecture` is not the file's.

        Raises:
            ModelError: The factors do not fit the model.
            AllocationError: A device lacks room.
        """
        self._check_kind(architecture)
        names = self._paired(weights)
        memory = Weights(self._file)
        sources: dict[Backend, dict[str, Source]] = {}
        for name in names:
            source, home = weights[name]
            sources.setdefault(home, {}).update(self._sources(name, source))
        if self.trainable:
            self._check_finite(sources.values())
            return _place_trainable(names, weights, self._rank, self._values)
        try:
            placed: dict[str, Tensor] = {}
            for home, some in sources.items():
                placed |= memory.place(some, home)
            if not any(tensor.placed("load").is_planned for tensor in placed.values()):
                self._check_finite(sources.values())
        except BaseException:
            memory.free()
            raise
        factors = {name: Factors(placed[name + ".lora_a"], placed[name + ".lora_b"]) for name in names}
        return Placed(factors, memory.spaces, memory.free)

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
            raise meta.error("adapter.alora.invocation_tokens", "activated LoRA (aLoRA) is not supported")

    def _paired(self, weights: Mapping[str, object]) -> list[str]:
        """Return the names of the weights that have factors."""
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
        rank = self._rank(name)
        if not rank:
            raise self._error(b, "its rank is 0")
        shapes = dict(zip((a, b), factor_shapes(name, weight, rank), strict=True))
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

    def _rank(self, name: str) -> int:
        return self._file[name + ".lora_b"].ne[0]

    def _values(self, a: Tensor, b: Tensor) -> tuple[npt.ArrayLike, npt.ArrayLike]:
        return self._file.array(a.name), self._file.array(b.name)

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


FactorSource = AdapterFile | NewFactors
"""The source of an adapter's factors."""
