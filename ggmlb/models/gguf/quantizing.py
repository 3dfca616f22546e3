"""Quantisation of models: `quantize_gguf` converts the matrices of a GGUF file.

The blocks are those of ggml's reference quantisers, without an importance matrix.
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError, DTypeError, ModelError
from ggmlb.models.filling import converted, slices
from ggmlb.models.gguf.mixtures import MIXTURES, Mixture, MixtureLayer
from ggmlb.models.gguf.reader import GgufFile, GgufTensor
from ggmlb.models.gguf.writer import save_gguf
from ggmlb.models.mapped_file import FLOATS

Bytes = npt.NDArray[np.uint8]

Progress = Callable[[int, int], None]
"""`progress(n_done, n_all)`, in bytes read."""

VERSION: Final = 2
"""Version of the block formats (GGML_QNT_VERSION)."""

KEPT: Final = re.compile(
    r"_norm\.weight$|^(position_embd|token_types)\.weight$|ffn_gate_inp|ssm_conv1d|time_mix_|attn_rel_b"
)
"""Matrices that are small, or whose precision matters: they keep their type, as in llama.cpp."""

FALLBACKS: Final = {
    DType.Q2_K: DType.IQ4_NL, DType.Q3_K: DType.IQ4_NL, DType.TQ1_0: DType.Q4_0, DType.TQ2_0: DType.Q4_0,
    DType.IQ4_XS: DType.IQ4_NL, DType.Q1_0: DType.Q4_0, DType.Q2_0: DType.Q4_0, DType.Q4_K: DType.Q5_0,
    DType.Q5_K: DType.Q5_1, DType.Q6_K: DType.Q8_0, DType.NVFP4: DType.MXFP4,
}  # fmt: skip
"""Types of smaller blocks, for rows that are not whole blocks; F16 if these do not fit either."""

FILE_TYPES: Final = {
    DType.F32: 0, DType.F16: 1, DType.Q4_0: 2, DType.Q4_1: 3, DType.Q8_0: 7, DType.Q5_0: 8, DType.Q5_1: 9,
    DType.Q2_K: 10, DType.Q3_K: 11, DType.Q4_K: 14, DType.Q5_K: 16, DType.Q6_K: 18, DType.IQ4_NL: 25,
    DType.IQ4_XS: 30, DType.BF16: 32, DType.TQ1_0: 36, DType.TQ2_0: 37, DType.MXFP4: 38, DType.NVFP4: 39,
    DType.Q1_0: 40,
}  # fmt: skip
"""`general.file_type` (enum llama_ftype); of k-quants the small mixture, which is nearest."""

GUESSED: Final = 1024
"""`general.file_type` of types without a number."""

LAYER: Final = re.compile(r"^blk\.(\d+)\.")


class Change(NamedTuple):
    """A tensor of the source file, with its new type and size in the quantised file.

    Attributes:
        tensor: The tensor of the old file.
        dtype: Its new type.
        nbytes: Its new size [bytes].
        note: The reason for another type than the one requested; empty if there is none.
    """

    tensor: GgufTensor
    dtype: DType
    nbytes: int
    note: str


def quantize_gguf(
    source: GgufFile,
    path: str | os.PathLike[str],
    dtype: DType | str,
    *,
    rules: Mapping[str, DType | str] | None = None,
    pure: bool = False,
    requantize: bool = False,
    n_threads: int = 1,
    progress: Progress | None = None,
) -> list[Change]:
    """Write a model with its matrices converted to `dtype`, a type or a mixture such as Q4_K_M.

    Norms, tensors of one dimension and a few small matrices (`KEPT`) keep their type. The output matrix, or
    the token embeddings if they are the output matrix too, gets at least Q6_K. A mixture (`MIXTURES`) gives
    some matrices of some layers another type. Rows that are not whole blocks get a type of smaller blocks.

    Args:
        source: The model; a split model becomes one file.
        path: The new file.
        dtype: The type of matrices, or the name of a mixture, as `"q4_K_M"`.
        rules: Types of single tensors by regular expression; the first that matches in the name counts.
        pure: Whether all matrices, the output included, get `dtype`, or the mixture's most frequent type.
        requantize: Whether to convert quantised tensors, which is less accurate than from floating point.
        n_threads: Number of threads.
        progress: Called with the bytes that were converted.

    Returns:
        The tensors with their new types, in the order of the file.

    Raises:
        ArgumentError: A rule is no regular expression, or matches no tensor; or less than one thread.
        DTypeError: No such type, or one that cannot be written.
        ModelError: A tensor is quantised, and `requantize` is false; metadata that a mixture asks for is
            missing; or the file cannot be written.

    Source: llama_model_quantize.
    """
    to = mixture_of(dtype)
    changes = plan_types(source, to, {pattern: _writable(t) for pattern, t in (rules or {}).items()}, pure)
    if n_threads < 1:
        raise ArgumentError(f"quantize_gguf: n_threads is {n_threads}; give 1 or more")
    if not requantize:
        for tensor, new, _, _ in changes:
            if tensor.dtype.is_quantized and new is not tensor.dtype:
                raise ModelError(
                    f"{source.path}: tensor {tensor.name!r} is {tensor.dtype.name} already; {new.name} "
                    "made from it is less accurate than from the original; convert the original model, or "
                    "add --requantize (requantize=True)"
                )
    with suppress(OSError):
        if any(os.path.samefile(path, part.path) for part in source.parts):
            raise ArgumentError(f"quantize_gguf: {path} is the model that is read; give another name")
    changed = {"general.file_type": np.uint32(to.file_type)}
    if any(new.is_quantized for _, new, _, _ in changes):
        changed["general.quantization_version"] = np.uint32(VERSION)
    metadata = source.metadata | changed
    for key in ("split.no", "split.count", "split.tensors.count"):
        metadata.pop(key, None)
    done = _Counter(source.nbytes, progress)
    with ThreadPoolExecutor(n_threads) as pool:
        tensors = {
            t.name: (_converted(source, t.name, new, pool, n_threads, done), new, t.ne)
            for t, new, _, _ in changes
        }
        save_gguf(Path(path), metadata, tensors)
    source.check_unchanged()
    return changes


def mixture_of(dtype: DType | str) -> Mixture:
    """Return the mixture of types with a name such as Q4_K_M, or one with the single type `dtype`.

    Raises:
        DTypeError: No such type, or one that cannot be written.
    """
    if isinstance(dtype, str) and dtype.upper() in MIXTURES:
        return MIXTURES[dtype.upper()]
    to = _writable(dtype)
    return Mixture(to, FILE_TYPES.get(to, GUESSED))


def _writable(dtype: DType | str) -> DType:
    dtype = DType.parse(dtype)
    if dtype not in FILE_TYPES and dtype is not DType.Q2_0:
        names = ", ".join((*(t.name.lower() for t in FILE_TYPES), *map(str.lower, MIXTURES)))
        raise DTypeError(f"quantize_gguf: {dtype.name} is no type to store weights in; use {names}")
    return dtype


def plan_types(source: GgufFile, to: Mixture, rules: Mapping[str, DType], pure: bool = False) -> list[Change]:
    """Choose each tensor's new type: by `rules` (by name), else the mixture `to` (if `pure`, its main type).

    Raises:
        ArgumentError: A rule is no regular expression, or matches no tensor.
        ModelError: Metadata that a mixture asks for is missing.
    """
    patterns = []
    for pattern, dtype in rules.items():
        try:
            patterns.append((re.compile(pattern), dtype))
        except re.error as error:
            raise ArgumentError(f"the rule {pattern!r} is no regular expression: {error}") from None
        if not any(patterns[-1][0].search(name) for name in source):
            raise ArgumentError(f"the rule {pattern!r} matches no tensor; see the names with ggmlb show")
    output = "output.weight" if "output.weight" in source else "token_embd.weight"
    changes = []
    for name, tensor in source.items():
        wanted = next((dtype for pattern, dtype in patterns if pattern.search(name)), None)
        if wanted is None:
            if _is_kept(tensor):
                wanted = tensor.dtype
            elif pure:
                wanted = to.dtype
            elif name == output:
                wanted = to.output_type
            else:
                wanted = _by_layer(source, to, name)
        found = _fitting(tensor, wanted)
        note = ""
        if found is not wanted:
            note = (
                f"rows of {tensor.ne[0]} elements are not whole {wanted.name} blocks of "
                f"{wanted.block_size}; stored as {found.name}"
            )
        n_rows = tensor.nbytes // max(tensor.dtype.row_size(tensor.ne[0]), 1)
        changes.append(Change(tensor, found, n_rows * found.row_size(tensor.ne[0]), note))
    return changes


def _by_layer(source: GgufFile, to: Mixture, name: str) -> DType:
    """The type that a mixture gives to a matrix."""
    layer = LAYER.match(name)
    if layer is None or not to.rules:
        return to.dtype
    meta = source.metadata
    arch = meta.text("general.architecture")
    heads = _first_layers(source, f"{arch}.attention.head_count", 0)
    shared = heads // max(1, _first_layers(source, f"{arch}.attention.head_count_kv", heads))
    n_layer, n_expert = meta.integer(f"{arch}.block_count"), meta.integer(f"{arch}.expert_count", 0)
    return to.type_of(name, MixtureLayer(int(layer[1]), n_layer, n_expert, shared))


def _first_layers(source: GgufFile, key: str, default: int) -> int:
    """Return a number that a file has once, or for each layer; then that of the first layer."""
    found = source.metadata.first(key, 1) if key in source.metadata else default
    number = found[0] if isinstance(found, list) and found else found
    if not isinstance(number, int):
        raise source.metadata.error(key, "it must be a whole number, or one for each layer")
    return number


def _is_kept(tensor: GgufTensor) -> bool:
    is_matrix = len(tensor.ne) > 1 and tensor.ne[1] > 1 and tensor.name.endswith("weight")
    is_number = tensor.dtype.is_quantized or tensor.dtype in FLOATS
    return not (is_matrix and is_number) or KEPT.search(tensor.name) is not None


def _fitting(tensor: GgufTensor, dtype: DType) -> DType:
    """Return a type whose blocks fill the rows."""
    if tensor.ne[0] % dtype.block_size:
        dtype = FALLBACKS.get(dtype, DType.F16)
    return DType.F16 if tensor.ne[0] % dtype.block_size else dtype


class _Counter:
    """Counts bytes for the progress."""

    def __init__(self, n_all: int, progress: Progress | None) -> None:
        self._n_done, self._n_all, self._progress = 0, n_all, progress

    def add(self, n: int) -> None:
        self._n_done += n
        if self._progress is not None:
            self._progress(self._n_done, self._n_all)


def _converted(
    source: GgufFile, name: str, dtype: DType, pool: ThreadPoolExecutor, n_threads: int, done: _Counter
) -> Iterator[Bytes]:
    """Yield a tensor's bytes in its new type, while threads convert the next."""
    extent = source.extent(name)
    if extent.dtype is dtype:
        for rows in slices(extent):
            yield rows
            done.add(rows.nbytes)
        return
    waiting: deque[tuple[int, Future[Bytes]]] = deque()

    def first() -> Bytes:
        nbytes, future = waiting.popleft()
        blocks = future.result()
        done.add(nbytes)
        return blocks

    for rows in slices(extent, 1 << 20):
        waiting.append((rows.nbytes, pool.submit(converted, rows, extent.dtype, dtype, name)))
        if len(waiting) > 2 * n_threads:
            yield first()
    while waiting:
        yield first()
