"""TextModel: a GGUF language model on chosen devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ggmlb import Backend, DType, Scheduler
from ggmlb.core.arguments import alias, checked_methods, named
from ggmlb.core.errors import AllocationError, ArgumentError, FreedError, ModelError
from ggmlb.interface.memory_table import MemoryReport
from ggmlb.models.devices import ModelOnDevices
from ggmlb.models.gguf.summary import facts as gguf_facts
from ggmlb.models.gguf.vocabulary import Vocabulary
from ggmlb.models.hub import model_path
from ggmlb.models.layers import held
from ggmlb.models.summary import Summary
from ggmlb.models.text.adapter import Adapter, AdapterFile, NewFactors
from ggmlb.models.text.changes import Changes
from ggmlb.models.text.compare import (
    LIMIT,
    Comparison,
    Differences,
    check_alike,
    compare,
    node_differences,
    token_difference,
)
from ggmlb.models.text.decoder import N_BATCH, Array, Floats
from ggmlb.models.text.draft import Draft, Drafts, ModelDrafts, check_rewinds, check_vocabularies
from ggmlb.models.text.generation import Engine, Generation, Request
from ggmlb.models.text.inside import LogitLens, first_not_finite, lens, matching, traced
from ggmlb.models.text.loaded_model import LoadedModel
from ggmlb.models.text.perplexity import Perplexity, perplexity
from ggmlb.models.text.placement import Placement
from ggmlb.models.text.planner import open_planner
from ggmlb.models.text.queue import JobQueue
from ggmlb.models.text.sampling import Options, OptionValues, changed
from ggmlb.models.text.session import Session, fingerprint
from ggmlb.models.text.strategies import with_strategy
from ggmlb.models.text.training import Training, TrainingGraph
from ggmlb.optimize import AdamW

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ggmlb.models.gguf.chat import ChatTemplate
    from ggmlb.optimize import Callback, Epoch, Optimizer, Schedule

LEAST_LENGTH = 1e-12
"""Smallest norm that an embedding is divided by."""

MOST_TRAINED = 1 << 20
"""Largest batch of training [tokens]."""

Message = Mapping[str, Any]
"""A message of a chat: `{"role": "user", "content": "Hello"}`."""
alias("Message", "Mapping")

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token numbers, or the messages of a chat."""
alias("Prompt", "str | Sequence[int] | Sequence[Message]")


@named("a TextModel")
@checked_methods
class TextModel(ModelOnDevices):
    """Generates text with a GGUF model.

    Each layer runs on the device that has its weights. A context manager, which frees the devices on exit.
    Threads and callbacks may use it: one batch is computed at a time; a session serves one call at a time,
    and while a thread trains, no other may use the model. The CPU reads embeddings and unpacked weights from
    the mapped file, which must not be modified meanwhile.

    Example: `TextModel("model.gguf", ["CUDA0", "CPU"])`

    Args:
        path: The GGUF file; of a split model, the first part. Or the name of a repository of Hugging Face
            with a type, as `"org/repo:Q4_K_M"`; needs `huggingface_hub`.
        devices: Short for `placement=Placement(devices)`: names, as `["OpenCL0", "CPU"]`, highest priority
            first.
        placement: The devices, and which parts of the model go to each; by default as many layers as fit go
            to the first device, the next ones to the second, and so on.
        n_ctx: Context size of all sequences together [tokens]; by default that of the model's training, at
            most 4096. Recurrent layers have states of at most 16 sequences, fewer if large. Required
            if the KV cache would take more than 256 MiB and 8 times the bytes of the weights.
        kv_type: Type of the KV cache: `"f16"`, `"bf16"`, `"q8_0"`, `"q4_0"` or `"f32"`. States of recurrent
            models are f32.
        threads: CPU threads; all by default.
        n_ubatch: Tokens per step of a pipeline, at most 512: while a device computes one step of a prompt,
            the next device computes the step before. By default there is no pipeline. For layers on several
            devices that compute asynchronously (CUDA, OpenCL).
        adapters: LoRA adapters to load, with their scales; see `load_adapter`.
        draft: Drafts the next tokens, which this model verifies together: a smaller model with the same
            vocabulary, as a file (opened on the same devices, with the same `n_ctx`) or open already; or a
            function of the tokens so far, such as `PromptLookup()`. The text stays the same, except where
            two tokens are equally likely but for rounding. Not for recurrent models.
        n_draft: Most tokens of a draft; it gets shorter while drafts are wrong.

    Attributes:
        config: The model's sizes.
        draft: The model or function that drafts; `None` if there is none.
        experts: The cache of experts, with its hits and misses; `None` without `Placement.expert_cache`.
        file: The GGUF file.
        placement: The device of each part.
        n_ctx: The context size [tokens].
        load_seconds: Time that loading took [s].

    Raises:
        ModelError: The file is missing, corrupt, or of an unknown architecture.
        RegistryError: No device has one of the names.
        ArgumentError: `placement` names devices too, a device is named twice, the model
            lacks a layer, or an override or strategy is not possible.
        DTypeError: `kv_type` is no type.
        AllocationError: A device lacks room.
    """

    def __init__(
        self,
        path: str | PathLike[str],
        devices: Sequence[str] | None = None,
        placement: Placement | None = None,
        *,
        n_ctx: int | None = None,
        kv_type: DType | str = DType.F16,
        threads: int | None = None,
        n_ubatch: int | None = None,
        adapters: Sequence[tuple[str | PathLike[str], float]] = (),
        draft: str | PathLike[str] | TextModel | Draft | None = None,
        n_draft: int = 3,
    ) -> None:
        start = perf_counter()
        requested = placement or Placement()
        if devices is not None:
            if requested.devices is not None:
                raise ArgumentError("TextModel: devices are given twice; give them in the placement alone")
            requested = replace(requested, devices=devices)
        if not 1 <= n_draft <= N_BATCH:
            raise ArgumentError(f"n_draft is {n_draft}; give 1 to {N_BATCH}")
        files = [Path(adapter) for adapter, _ in adapters]
        with ExitStack() as resources:
            if isinstance(draft, (str, PathLike)):  # first, so that the placement knows the memory it takes
                names = requested.devices
                draft = TextModel(draft, names, n_ctx=n_ctx, kv_type=kv_type, threads=threads)
                resources.enter_context(draft)
            self.draft = draft
            asked = open_planner(resources, model_path(path), requested, n_ctx, kv_type, n_ubatch, files)
            self._planner = planner = with_strategy(resources, asked)
            self.file, self.config, self.n_ctx = planner.file, planner.config, planner.params.n_ctx
            self._backends = tuple(planner.backends.values())
            if threads is not None:
                _set_threads(self._backends, threads)
            self.placement = planner.choose()
            self._changes = Changes(self.config.n_layer, self.config.n_embd)
            self._loaded = LoadedModel(
                planner.layout, planner.backends, self.placement, planner.params, self._changes
            )
            resources.callback(self._loaded.free)
            for adapter, scale in adapters:
                self._loaded.load_adapter(AdapterFile(Path(adapter)), scale)
            self._engine = Engine(
                self._loaded.decoder, self._loaded.memory, self._not_finite, self._drafts(resources), n_draft
            )
            self._lock = self._engine.lock
            self._resources = resources.pop_all()
        self.experts = self._loaded.experts
        self.load_seconds = perf_counter() - start

    def _drafts(self, resources: ExitStack) -> Drafts | ModelDrafts | None:
        """Return the drafts of requests, after checks; `None` without `draft`."""
        draft, n_vocab = self.draft, self.config.n_vocab
        if draft is None:
            return None
        check_rewinds(self.config)
        if not isinstance(draft, TextModel):
            return Drafts(draft, n_vocab)
        check_rewinds(draft.config)
        check_vocabularies(self.vocabulary, draft.vocabulary)
        found = ModelDrafts(draft._engine, n_vocab, draft.config.n_vocab)
        resources.callback(found.free)
        return found

    # -- facts ---------------------------------------------------------------------------------

    @property
    def homes(self) -> Mapping[int | str, str]:
        """The device of each layer, of the `"embeddings"`, and of the `"output"`."""
        return self.placement.homes

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler of the last step, to see its splits and placement; `None` before the first."""
        return self._engine.decoder.scheduler

    @property
    def memory(self) -> MemoryReport:
        """Allocated and predicted memory of each device.

        Raises:
            FreedError: The model was closed.
        """
        self._check("memory")
        events = self._loaded.adapter_events
        return MemoryReport(self._planner.forecast(self.placement, events), self._loaded.table)

    def summary(self) -> Summary:
        """Return the model's sizes, the layers and other parts on each device, and each device's memory.

        Raises:
            FreedError: The model was closed.
        """
        memory, facts = self.memory, gguf_facts(self.file)
        context = f"{self.n_ctx:,} tokens" + (
            f", {self._planner.params.kv_type.name.lower()} KV cache" if self.config.has_kv else ""
        )
        about = {
            "architecture": f"{self.config.name}, {self.config.n_layer} layers of {self.config.n_embd}",
            "weights": facts["tensors"],
            "types": facts["types"],
            "context": context,
            "loaded in": f"{self.load_seconds:.2f} s",
        }
        parts = held(self.homes, [backend.name for backend in self.backends])
        return Summary(f"TextModel {self.file.path.name}", about, parts, memory)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the file.

        Raises:
            ModelError: The file has no chat template.
        """
        from ggmlb.models.gguf.chat import ChatTemplate

        meta, words = self.file.metadata, self.vocabulary
        if "tokenizer.chat_template" not in meta:
            raise ModelError(f"{self.file.path} has no chat template; give the prompt as one text")
        bos, eos = (words.decode([t], special=True) if t is not None else "" for t in (words.bos, words.eos))
        return ChatTemplate(meta.text("tokenizer.chat_template"), bos, eos)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary, which turns text into tokens and back.

        Raises:
            ModelError: The file's vocabulary is damaged, or of an unknown kind.
        """
        return Vocabulary(self.file.metadata)

    def __repr__(self) -> str:
        return f"<TextModel {self.file.path.name}: {self.config.name}, {self.config.n_layer} layers>"

    # -- tokens and logits ---------------------------------------------------------------------

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt: a text (special tokens are added), a chat, or a list of tokens.

        Raises:
            ArgumentError: The prompt is empty, or has a token that the vocabulary lacks.
            ModelError: The prompt is a chat, and the file has no chat template.
        """
        self._check("tokens_of")
        items: list[Any] = list(prompt)
        if isinstance(prompt, str):
            tokens = self.vocabulary.encode(prompt)
        elif items and all(isinstance(message, Mapping) for message in items):
            tokens = self.vocabulary.encode(self.chat_template.render(items), add_special=False)
        else:
            tokens = items
        n_vocab = self.config.n_vocab
        for token in tokens:
            if (
                isinstance(token, bool)
                or not isinstance(token, (int, np.integer))
                or not 0 <= token < n_vocab
            ):
                raise ArgumentError(f"the prompt has the token {token!r}; tokens are 0 to {n_vocab - 1}")
        if not tokens:
            raise ArgumentError("the prompt is empty; give a text, or at least one token")
        return tokens

    def logits(self, prompt: Prompt) -> Floats:
        """Return the logits after each token of a prompt, shape `(n_tokens, n_vocab)`.

        Raises:
            ArgumentError: The prompt is empty or does not fit `n_ctx`.
            FreedError: The model was closed.
        """
        return self._engine.each(self.tokens_of(prompt), self._engine.decoder.decode)

    def embed(self, prompt: Prompt) -> Floats:
        """Return a prompt's embedding, of norm 1, shape `(n_embd,)`.

        It is the mean of the normalised hidden states, or the state of the first (`cls`) or last token, as
        `pooling_type` of the file asks; the mean by default.

        Returns:
            With the pooling type `none`, the hidden states of all tokens, shape `(n_tokens, n_embd)`, not
            normalised.

        Raises:
            ModelError: The pooling type is `rank`: the model scores texts, and has no embeddings.
            ArgumentError: The prompt is empty or does not fit `n_ctx`.
            FreedError: The model was closed.
        """
        pooling = self.config.pooling
        if pooling == "rank":
            key = f"{self.config.name}.pooling_type"
            raise self.file.metadata.error(
                key, "it is 4 (rank): the model scores texts, and has no embeddings"
            )
        hidden = self._engine.each(self.tokens_of(prompt), self._engine.decoder.hidden)
        if pooling == "none":
            return hidden
        pooled: Floats = {"mean": hidden.mean(axis=0), "cls": hidden[0], "last": hidden[-1]}[pooling]
        return pooled / max(float(np.linalg.norm(pooled)), LEAST_LENGTH)

    # -- looking inside ------------------------------------------------------------------------

    def trace_names(self) -> list[str]:
        """Return the names of nodes that `trace` accepts, in the order of computation."""
        self._check("trace_names")
        return self._engine.decoder.names()

    def trace(self, prompt: Prompt, names: str | Sequence[str] = "blk.*.out") -> dict[str, Array]:
        """Compute a prompt, and return the values of nodes inside the model by name.

        Graphs and devices are those of `logits`; each value is read right after its node. The names are in
        `docs/text-models.md`.

        Example: `model.trace("The sky", "blk.*.attn_out")["blk.3.attn_out"]`

        Args:
            prompt: As for `generate`.
            names: Names, or patterns with `*`, `?` and `[...]`.

        Returns:
            Arrays by name, shape `(n_tokens, ...)`; of attention weights (`blk.*.attn_weights`)
            `(n_head, n_tokens, n_tokens)`: head, token, token seen.

        Raises:
            ArgumentError: A pattern matches no name, or the prompt is empty or does not fit `n_ctx`.
            FreedError: The model was closed.
        """
        tokens = self.tokens_of(prompt)
        return traced(self._engine, tokens, matching(names, self._engine.decoder.names()))

    def logit_lens(self, prompt: Prompt, layers: Sequence[int] | None = None) -> LogitLens:
        """Return the logits of the hidden states after each layer, as if it were the last layer.

        Args:
            prompt: As for `generate`.
            layers: Layers, all by default. The logits of each take `n_tokens * n_vocab` floats.

        Raises:
            ArgumentError: There is no such layer, or the prompt is empty or does not fit `n_ctx`.
            FreedError: The model was closed.
        """
        tokens = self.tokens_of(prompt)
        known = range(self.config.n_layer)
        asked = list(known if layers is None else layers)
        if not asked or not set(asked) <= set(known):
            raise ArgumentError(f"logit_lens: layers is {asked}; give indices from 0 to {known[-1]}")
        return lens(self._engine, tokens, asked, self._text_of)

    def steering(
        self, vectors: Mapping[int, npt.ArrayLike], scale: float = 1.0
    ) -> AbstractContextManager[None]:
        """Context manager: add `scale` times the vector of each layer to the hidden states after it.

        The vectors are inputs of graphs, so that nothing is loaded again. Nested blocks add up. The KV cache
        of earlier tokens of a session stays as it is.

        Example: `with model.steering({12: vector}): print(model.generate("I feel").text)`

        Args:
            vectors: For each layer, `n_embd` numbers.
            scale: Factor of the vectors.

        Raises:
            ArgumentError: There is no such layer, or a vector has another shape, when the block is entered.
        """
        return self._changes.steering(vectors, scale)

    def load_adapter(self, path: str | PathLike[str], scale: float = 1.0, trainable: bool = False) -> Adapter:
        """Load a LoRA adapter with factor `scale` (to train if `trainable`); model weights do not change.

        Example: `adapter = model.load_adapter("pirate.gguf")`, then `adapter.scale = 0` to switch it off.

        Args:
            path: A GGUF file, as llama.cpp's `convert_lora_to_gguf.py` writes it.
            scale: Factor of the adapter; 0: off.
            trainable: Whether to place its factors as f32, so that `finetune` can change them.

        Returns:
            The adapter, which is on until it or the model is closed; several may be on.

        Raises:
            ModelError: The file is missing or damaged, no LoRA adapter, or of another model.
            ArgumentError: The scale is no finite number.
            AllocationError: A device lacks room.
            FreedError: The model was closed.
        """
        self._check("load_adapter")
        return self._loaded.load_adapter(AdapterFile(Path(path), trainable), scale)

    def new_adapter(
        self,
        targets: str = r"attn_[qkv]\.weight|attn_output\.weight",
        rank: int = 8,
        alpha: float | None = None,
        seed: int = 0,
    ) -> Adapter:
        """Return a new LoRA adapter, for weights that match `targets`; without training, it has no effect.

        Args:
            targets: Regular expression: weights whose names it matches anywhere have factors.
            rank: Rows and columns of the factors.
            alpha: LoRA alpha: the products are multiplied by `alpha / rank`; twice the rank by default.
            seed: Seed of the random factors `a`; the factors `b` are 0.

        Raises:
            ArgumentError: No weight matches, the rank is not positive, or the seed is negative.
            AllocationError: A device lacks room.
            FreedError: The model was closed.
        """
        self._check("new_adapter")
        if rank < 1:
            raise ArgumentError(f"new_adapter: the rank is {rank}; give 1 or more")
        return self._loaded.load_adapter(
            NewFactors(targets, rank, 2.0 * rank if alpha is None else alpha, seed)
        )

    def training(
        self,
        adapter: Adapter,
        optimizer: Optimizer | Schedule = AdamW(),  # noqa: B008 - frozen
        *,
        n_ctx: int = 128,
        n_batch: int = 4,
        opt_period: int = 1,
        seed: int = 0,
    ) -> Training:
        """Return a trainer of an adapter, for single steps or epochs; `finetune` trains in one call.

        Example: `with model.training(adapter) as t: t.opt.epoch(t.dataset(model.tokens_of(text)))`

        Args:
            adapter: An adapter of this model, new or loaded as `trainable`; it must be on.
            optimizer: Hyperparameters, or a function that returns those of each step; see `ggmlb.optimize`.
            n_ctx: Sequence length [tokens].
            n_batch: Sequences per batch.
            opt_period: Batches per optimizer step, whose gradients are accumulated.
            seed: Seed of the order of the data.

        Raises:
            ArgumentError: The adapter is off, another model's, or not trainable; the model has experts or is
                recurrent, whose ops have no gradients; or a number is out of range.
            AllocationError: A device lacks room.
            FreedError: The model was closed.
        """
        self._check("training")
        if adapter not in self._changes.active:
            raise ArgumentError(
                f"training: {adapter!r} is off, closed, or of another model; set its scale or load it"
            )
        if not adapter.source.trainable:
            raise ArgumentError(f"training: {adapter!r} is not trainable; load it with trainable=True")
        if self.config.is_recurrent or self.config.experts is not None:
            kind = "is recurrent" if self.config.experts is None else "has experts"
            raise ArgumentError(f"training: the model {kind}: its ops have no gradients; use another model")
        if n_ctx < 1 or not 1 <= n_batch <= MOST_TRAINED // n_ctx:
            raise ArgumentError(
                f"training: n_ctx is {n_ctx}, n_batch {n_batch}; give 1 or more, together at most "
                f"{MOST_TRAINED:,} tokens"
            )
        if n_ctx > (most := self.config.n_ctx_train):
            raise ArgumentError(
                f"training: n_ctx is {n_ctx}; the model was made for sequences of up to {most}"
            )
        graph = TrainingGraph(self.config, self._loaded.tensors, n_ctx, n_batch, self._changes)
        return Training(graph, self.backends, adapter, optimizer, opt_period, seed)

    def finetune(
        self,
        adapter: Adapter,
        text: Prompt,
        optimizer: Optimizer | Schedule = AdamW(),  # noqa: B008 - frozen
        *,
        n_epochs: int = 1,
        n_ctx: int = 128,
        n_batch: int = 4,
        opt_period: int = 1,
        val_split: float = 0.0,
        callback: Callback | None = None,
        seed: int = 0,
    ) -> list[Epoch]:
        """Train an adapter with a text; the model's own weights stay as they are, also quantised ones.

        Example: `model.finetune(model.new_adapter(), text, optimize.AdamW(1e-3), n_epochs=3)`

        Args:
            adapter: As for `training`, like `optimizer`, `n_ctx`, `n_batch`, `opt_period` and `seed`.
            text: As for `generate`; it is cut into sequences of `n_ctx` tokens.
            optimizer: Hyperparameters, or a function that returns those of each step.
            n_epochs: Number of passes over the text, each in a new order.
            n_ctx: Sequence length [tokens].
            n_batch: Sequences per batch.
            opt_period: Batches per optimizer step.
            val_split: Fraction of the text, its end, that is for validation and does not train.
            callback: Called after each batch; `False` ends the training.
            seed: Seed of the order of the data.

        Returns:
            Results of each epoch.

        Raises:
            ArgumentError: The text is too short; or as `training`.
        """
        with self.training(
            adapter, optimizer, n_ctx=n_ctx, n_batch=n_batch, opt_period=opt_period, seed=seed
        ) as training:
            return training.opt.fit(training.dataset(self.tokens_of(text)), n_epochs, val_split, callback)

    def compare(
        self,
        other: TextModel,
        text: str,
        n_ctx: int = 512,
        max_tokens: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Comparison:
        """Return the errors of another version of this model (such as a quantised one) over a text.

        Args:
            other: A model with the same layers and vocabulary.
            text: A text of at least one token; its chunks are independent.
            n_ctx: Chunk size [tokens].
            max_tokens: Maximum number of tokens.
            progress: `progress(done, total)`, called after each chunk.

        Raises:
            ArgumentError: The models differ in more than their weights, or a chunk does not fit `n_ctx`.
            FreedError: A model was closed.
        """
        tokens = self._common_tokens("compare", other, text)[:max_tokens]
        if n_ctx < 1 or (max_tokens is not None and max_tokens < 1):
            raise ArgumentError(f"compare: max_tokens is {max_tokens}, n_ctx {n_ctx}; give 1 or more")
        first = self.vocabulary.bos if self.vocabulary.adds_bos else None
        engines = self._engine, other._engine
        return compare(*engines, tokens, self.config, min(n_ctx, self.n_ctx, other.n_ctx), first, progress)

    def differences(
        self, other: TextModel, prompt: Prompt, max_tokens: int = 0, limit: float = LIMIT
    ) -> Differences:
        """Find the first node and the first token at which another model or device differs from this one.

        Args:
            other: A model with the same layers and vocabulary.
            prompt: As for `generate`.
            max_tokens: Tokens to generate, greedily, to find the first that differs; 0: none.
            limit: NMSE above which a node differs.

        Raises:
            ArgumentError: The models differ in more than their weights, or the prompt is empty or does not
                fit `n_ctx`.
            FreedError: A model was closed.
        """
        tokens = self._common_tokens("differences", other, prompt)
        engines = self._engine, other._engine
        nodes = node_differences(*engines, tokens, limit)
        if not max_tokens:
            return Differences(limit, nodes)
        options = Options(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        ours, theirs = (model.generate(tokens, options).tokens for model in (self, other))
        parted = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        place = next(parted, None)
        if place is None:
            return Differences(limit, nodes)
        so_far, chosen = tokens + ours[:place], (ours[place], theirs[place])
        token = token_difference(*engines, so_far, chosen, place, self._text_of, self.config.n_layer)
        return Differences(limit, nodes, token)

    def _common_tokens(self, call: str, other: TextModel, prompt: Prompt) -> list[int]:
        """Return the tokens of a prompt, after a check that they are the same for both models."""
        other._check(call)
        check_alike(self.config, other.config)
        tokens = self.tokens_of(prompt)
        if other.tokens_of(prompt) != tokens:
            raise ArgumentError(f"{call}: the vocabularies differ; give two files of one model")
        return tokens

    def _text_of(self, token: int) -> str:
        return self.vocabulary.decode([token], special=True)

    # -- generation ----------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        on_token: Callable[[str], object] | None = None,
        **changes: Unpack[OptionValues],
    ) -> Generation:
        """Generate text after a prompt; the same arguments give the same text.

        Example: `model.generate("Once upon a time", max_tokens=64, temperature=0).text`

        Args:
            prompt: A text, token numbers, or the messages of a chat (`{"role": ..., "content": ...}`).
            options: Options of the generation; see `Options`.
            on_token: Called with each new text, of whole characters.
            changes: Single options by name, as `max_tokens=64`; see `Options`.

        Raises:
            ArgumentError: The prompt is empty or does not fit `n_ctx`, or an option is unknown or invalid.
            ModelError: The prompt is a chat, and the file has no template; or the file was changed.
            FreedError: The model was closed.
        """
        request = self._request(prompt, changed(options, changes))
        for _ in self._engine.run([request]):
            if on_token is not None and (piece := request.take()):
                on_token(piece)
        return request.result

    def stream(
        self, prompt: Prompt, options: Options | None = None, **changes: Unpack[OptionValues]
    ) -> Iterator[str]:
        """Yield the text of `generate` piece by piece, each of whole characters.

        Raises:
            Error: As `generate`.
        """
        request = self._request(prompt, changed(options, changes))
        for _ in self._engine.run([request]):
            if piece := request.take():
                yield piece

    def generate_many(
        self, prompts: Sequence[Prompt], options: Options | None = None, **changes: Unpack[OptionValues]
    ) -> list[Generation]:
        """Generate text after each of several prompts, in batches of as many as fit the context.

        Raises:
            Error: As `generate`.
        """
        asked = changed(options, changes)
        requests = [self._request(prompt, asked) for prompt in prompts]
        for _ in self._engine.run(requests):
            pass
        return [request.result for request in requests]

    def perplexity(
        self,
        text: str,
        n_ctx: int = 512,
        max_chunks: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Perplexity:
        """Return the perplexity of a text, chunk by chunk, as llama.cpp's `llama-perplexity` does.

        Args:
            text: A text of at least one chunk.
            n_ctx: Chunk size [tokens]; the second half of each chunk is predicted.
            max_chunks: Maximum number of chunks.
            progress: `progress(done, total)`, called after each chunk.

        Raises:
            ArgumentError: The text is too short, or a chunk does not fit the model's `n_ctx`.
            FreedError: The model was closed.
        """
        words = self.vocabulary
        first = words.bos if words.adds_bos else None
        return perplexity(self._engine, self.tokens_of(text), n_ctx, first, max_chunks, progress)

    def session(self) -> Session:
        """Return a session, whose KV cache stays between calls (for conversations)."""
        return Session(self._engine, lambda: self.vocabulary, self.tokens_of, self._fingerprint)

    def queue(self) -> JobQueue:
        """Return a queue, whose thread computes the generations of many callers in common batches.

        Example: `with model.queue() as queue: jobs = [queue.submit(text) for text in texts]`
        """
        self._check("queue")
        return JobQueue(self._engine, self._request, self.tokens_of, self.embed)

    def _fingerprint(self) -> str:
        """Return a hash that identifies the model of a saved session."""
        self._check("session")
        is_long = "rope_factors_long.weight" in self.file and self.n_ctx > self.config.n_ctx_orig
        return fingerprint(self.file) + "+long" * is_long

    def _request(self, prompt: Prompt, options: Options) -> Request:
        return self._engine.request(self.tokens_of(prompt), options, self.vocabulary)

    def _not_finite(self, tokens: Sequence[int]) -> ModelError:
        """Return the error about the outputs of a prompt that are NaN or infinite, with their cause."""
        devices = ", ".join(backend.name for backend in self.backends)
        what = f"{self.file.path} on {devices}: NaN or infinity after token {len(tokens)}"
        try:
            found = first_not_finite(self._engine, tokens)
        except AllocationError:  # other sequences leave no room to recompute it
            found = None
        node, device = found or ("", "")
        where = f", first in {node!r} on {device}" if found else ""
        layer = ".".join(node.split(".")[:2]) + "." if node.startswith("blk.") else ""
        weights = self._loaded.weights
        for prefix in (f"{node}.", layer, "rope_") if layer else ("",):
            if (weight := weights.not_finite(prefix)) is not None:
                return ModelError(
                    f"{what}{where}: the weight {weight!r} has NaN or infinity; copy or download it again"
                )
        return ModelError(
            f"{what}{where}, though all weights are finite; try kv_type='f32', another device, or no "
            "steering vectors and adapters"
        )

    def _check(self, call: str) -> None:
        if self.is_freed:
            raise FreedError(f"{call}: this model was closed")
        self._loaded.weights.check_mapped()


def _set_threads(backends: Sequence[Backend], n: int) -> None:
    for backend in backends:
        set_n_threads = backend.device.reg.get_proc_address("set_n_threads")
        if set_n_threads is not None:
            set_n_threads(backend, n)
