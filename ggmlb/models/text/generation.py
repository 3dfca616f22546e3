"""Generation: sequences computed in batches, and their text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ggmlb.core.errors import ArgumentError, ModelError, shown
from ggmlb.inspect.html import escape, pre
from ggmlb.models.text import dry
from ggmlb.models.text.decoder import N_BATCH, N_OUT, Array, Decoder, Floats, Token
from ggmlb.models.text.grammar import Grammar
from ggmlb.models.text.memory import SequenceMemory
from ggmlb.models.text.sampling import CANDIDATE, Options, Sampler, log_probabilities

if TYPE_CHECKING:
    from ggmlb.models.gguf.vocabulary import Detokenizer, Vocabulary

Part = TypeVar("Part")

FIRST_DRAFT = 3
"""Length of a request's first draft [tokens]."""

MOST_VERIFIED = 16
"""Most tokens of a batch with drafts: in larger ones, each token costs nearly as much as one without."""


@dataclass(repr=False)
class Generation:
    """Generated text with its tokens and times; `str()` is the text, notebooks show it with its speed.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        tokens: Generated tokens, without the token that ends the text.
        text: The generated text, up to a text of `stop`.
        logprobs: For each generated token, if `logprobs` was given: the most likely tokens, best first, with
            the natural logarithms of their probabilities before sampling.
        stopped_by: `"length"`: `max_tokens` was reached; `"context"`: the context is full; `"end"`: the model
            ended the text; `"stop"`: a text of `stop` was generated; `"cancelled"`: see `Job.cancel`; empty
            while the generation runs.
        prompt_seconds: Time until the first logits [s].
        seconds: Time from the first logits to the end [s].
        n_drafted, n_accepted: Tokens of drafts that were verified, and those of them that were right.
    """

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[tuple[list[int], list[float]]] = field(default_factory=list)
    stopped_by: str = ""
    prompt_seconds: float = 0.0
    seconds: float = 0.0
    n_drafted: int = 0
    n_accepted: int = 0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens per second, up to the first logits; 0 if not measured."""
        return len(self.prompt_tokens) / self.prompt_seconds if self.prompt_seconds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second, after the first token; 0 if there are none."""
        return (len(self.tokens) - 1) / self.seconds if self.seconds and self.tokens else 0.0

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"<Generation {shown(self.text)!r}: {self._speed()}>"

    def _repr_html_(self) -> str:
        return f"{pre(self.text)}<div>{escape(self._speed())}</div>"

    def _speed(self) -> str:
        ended = f", ended by {self.stopped_by}" if self.stopped_by else ""
        return (
            f"{len(self.tokens):,} tokens at {self.tokens_per_second:.1f} per second, after "
            f"{len(self.prompt_tokens):,} of prompt at {self.prompt_tokens_per_second:.1f}{ended}"
        )


class Request:
    """A sequence that is being generated: its tokens, its options, and its result so far.

    Args:
        sequence: Its number in the cache.
        prompt: Its first tokens.
        n_cached: Tokens of the prompt that are in the cache already.
        options: The options of the generation.
        ends: Tokens that end the text.
        detokenizer: Turns tokens into text.
        is_session: Whether its tokens stay in the cache when it is done.
        full_by: The limit that `max_tokens` is: `"length"`, or `"context"` if the context is smaller.
        grammar: Masks tokens that are not allowed.
        breakers: Sequence breakers of DRY.

    Attributes:
        result: The result so far.
        tokens: Prompt and generated tokens.
        n_done: Number of tokens in the cache.
        ends: As given.
        n_draft: Length of its next draft: longer after drafts that were right.
        error: The error that ended the generation; `None` if there is none.
        n_best, guesser: As those of `Sampler`.
    """

    def __init__(
        self,
        sequence: int,
        prompt: Sequence[int],
        n_cached: int,
        options: Options,
        ends: frozenset[int],
        detokenizer: Detokenizer,
        is_session: bool = False,
        full_by: str = "length",
        grammar: Grammar | None = None,
        breakers: dry.Breakers = MappingProxyType({}),
    ) -> None:
        self.sequence = sequence
        self.options = options
        self.result = Generation(list(prompt))
        self.tokens = list(prompt)
        self.n_done = n_cached
        self.is_session = is_session
        self.error: Exception | None = None
        self._full_by = full_by
        self._sampler = Sampler(options, grammar, breakers)
        self.n_best = self._sampler.n_best
        self.guesser = self._sampler.guesser
        self.ends = ends
        self.n_draft = FIRST_DRAFT
        self._detokenizer = detokenizer
        self._unread: list[int] = []
        self._held = ""
        self._n_taken = 0
        self._times = [0.0, 0.0]

    @property
    def is_done(self) -> bool:
        """Whether the generation has ended."""
        return bool(self.result.stopped_by)

    def next_tokens(self, n_most: int, draft: Sequence[int] = ()) -> list[Token]:
        """Return at most `n_most` tokens to compute next, and a draft of those after the newest one.

        Only the sequence's newest token and the draft need logits.
        """
        if not self._times[0]:
            self._times[0] = perf_counter()
        end = min(len(self.tokens), self.n_done + n_most)
        found = [
            Token(self.tokens[i], self.sequence, i, i == len(self.tokens) - 1)
            for i in range(self.n_done, end)
        ]
        found += [Token(token, self.sequence, i, True) for i, token in enumerate(draft, end)]
        self.n_done = end + len(draft)
        return found

    def accept(self, logits: Array) -> None:
        """Sample the next token; end at an end token, a stop text or `max_tokens`."""
        options, result = self.options, self.result
        if not result.tokens:
            self._times[1] = perf_counter()
            result.prompt_seconds = self._times[1] - self._times[0]
        if not options.max_tokens:
            self.end(self._full_by)
            return
        token = self._sampler(logits, self.tokens)
        if token in self.ends:
            self.end("end")
            return
        if options.logprobs:
            result.logprobs.append(log_probabilities(logits, options.logprobs))
        self.tokens.append(token)
        result.tokens.append(token)
        self._unread.append(token)
        if options.stop:
            self._read()
        if not self.is_done and len(result.tokens) >= options.max_tokens:
            self.end(self._full_by)

    def verify(self, draft: Sequence[int], rows: Array) -> None:
        """Accept tokens while they are those of a draft; set `n_done` to the cached ones that are right.

        Args:
            draft: Tokens that were computed after the newest one.
            rows: Logits, or candidates, of the newest token and of the draft.
        """
        first = self.n_done = len(self.tokens)  # also where sampling fails
        for row, guess in zip(rows, (*draft, -1), strict=True):
            self.accept(row)
            if self.is_done or self.tokens[-1] != guess:
                break
        n = n_equal(draft, self.tokens[first:], len(draft))
        self.n_done = first + n
        self.n_draft = 2 * n + 1 if n == len(draft) else max(n, len(draft) // 2, 1)
        self.result.n_drafted += len(draft)
        self.result.n_accepted += n

    def take(self) -> str:
        """Return the text since the last call, without an end that may be the beginning of a stop text."""
        self._read()
        end = len(self.result.text)
        piece = self.result.text[self._n_taken : end]
        self._n_taken = end
        return piece

    def end(self, why: str) -> None:
        """End the generation; `why` becomes `stopped_by`."""
        if why != "stop":
            self._read()
            self._add_text(self._detokenizer.flush())
            self.result.text += self._held
        self.result.stopped_by = self.result.stopped_by or why
        self.result.seconds = perf_counter() - self._times[1]

    def fail(self, error: Exception) -> None:
        """End the generation with an error."""
        self.error = error
        self.end("error")

    def _read(self) -> None:
        """Decode the tokens that are not decoded yet."""
        tokens, self._unread = self._unread, []
        for token in tokens:
            self._add_text(self._detokenizer.add(token))

    def _add_text(self, piece: str) -> None:
        self._held += piece
        found = [at for stop in self.options.stop if (at := self._held.find(stop)) >= 0]
        if found:
            self.result.text += self._held[: min(found)]
            self._held = ""
            self.end("stop")
            return
        n_held = max((_overlap(self._held, stop) for stop in self.options.stop), default=0)
        keep = len(self._held) - n_held
        self.result.text += self._held[:keep]
        self._held = self._held[keep:]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of a text that is a prefix of a stop text."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class Engine:
    """Continuous batching: a batch has one token of each running request, then prompt tokens.

    Threads may share it, and callbacks may use it: one batch is computed at a time.

    Args:
        decoder: Computes batches.
        memory: The KV cache, recurrent states, or both.
        not_finite: Returns the ModelError for tokens whose last outputs are NaN or infinite.
        drafts: Drafts tokens of requests, given the most for each; `None`: nothing is drafted.
        n_draft: Most tokens of a draft.

    Attributes:
        decoder: As given.
        memory: As given.
        lock: Held while a batch is computed.
    """

    def __init__(
        self,
        decoder: Decoder,
        memory: SequenceMemory,
        not_finite: Callable[[Sequence[int]], ModelError],
        drafts: Callable[[Sequence[Request], Sequence[int]], list[list[int]]] | None = None,
        n_draft: int = 0,
    ) -> None:
        self.decoder = decoder
        self.memory = memory
        self.lock = decoder.changes.lock
        self._not_finite = not_finite
        self._drafts = drafts
        self.n_draft = min(n_draft, MOST_VERIFIED - 1) if drafts is not None else 0
        self._running: dict[int, Request] = {}
        self._n_sequences = 0

    def new_sequence(self) -> int:
        """Return an unused sequence number."""
        with self.lock:
            self._n_sequences += 1
            return self._n_sequences

    def check_fits(self, tokens: Sequence[int]) -> None:
        """Raise an ArgumentError if a prompt has more tokens than the context.

        Raises:
            ArgumentError: The prompt has more tokens than the context.
        """
        if len(tokens) > self.memory.n_cells:
            raise ArgumentError(
                f"the prompt has {len(tokens)} tokens, but n_ctx is {self.memory.n_cells}; cut it, or open "
                "the model with a larger n_ctx"
            )

    def request(
        self,
        tokens: Sequence[int],
        options: Options,
        vocabulary: Vocabulary,
        sequence: int | None = None,
        n_cached: int = 0,
    ) -> Request:
        """Return a request to generate after a prompt; its first `n_cached` tokens are in the cache already.

        Args:
            tokens: The prompt.
            options: Options of the generation; `max_tokens` is reduced to the room in the context.
            vocabulary: Turns tokens into text, and knows the end tokens.
            sequence: A sequence that stays in the cache; by default a new one, which is removed at the end.
            n_cached: Tokens of the prompt that are in the sequence's cache.

        Raises:
            ArgumentError: The prompt does not fit.
        """
        self.check_fits(tokens)
        most = self.memory.n_cells + 1 - len(tokens)
        is_short = not 0 <= options.max_tokens <= most
        options = replace(options, max_tokens=most if is_short else options.max_tokens)
        is_free = not options.grammar and options.json_schema is None
        ends: frozenset[int] = frozenset() if options.ignore_eos and is_free else vocabulary.end_tokens
        grammar = None if is_free else Grammar(vocabulary, options.grammar, options.json_schema)
        breakers = (
            dry.breakers_of(vocabulary, options.dry_sequence_breakers) if options.dry_multiplier else {}
        )
        number = self.new_sequence() if sequence is None else sequence
        is_session = sequence is not None
        return Request(
            number, tokens, n_cached, options, ends, vocabulary.stream(), is_session,
            "context" if is_short else "length", grammar, breakers,
        )  # fmt: skip

    def run(self, requests: Iterable[Request]) -> Iterator[Request]:
        """Generate for requests in batches; a request starts when the cache has room for all its tokens.

        Args:
            requests: The requests; the cells of a finished one are freed, unless it is a session's.

        Yields:
            A request that has one more token, or is done.
        """
        waiting = deque(requests)
        active: list[Request] = []
        try:
            while waiting or active:
                with self.lock:
                    while waiting and len(active) < N_OUT and (not active or self._has_room(waiting[0])):
                        active.append(waiting.popleft())  # a single request always starts
                        self._running[active[-1].sequence] = active[-1]
                for request in self.step(active):
                    if request.is_done:
                        active.remove(request)
                        self._remove(request)
                    if request.error is not None:
                        raise request.error
                    yield request
        finally:
            for request in active:
                self._remove(request)

    def step(self, active: Sequence[Request]) -> list[Request]:
        """Compute one batch; return the requests that have one more token, or are done."""
        batch: list[Token] = []
        asking: list[tuple[Request, list[int]]] = []
        others: list[Request] = []
        with self.lock:
            drafts = self._drafts_of(active) if self.n_draft else {}
            # Running requests come before prompts.
            for request in sorted(active, key=_n_left) if len(active) > 1 else active:
                draft = drafts.get(request.sequence, [])
                tokens = request.next_tokens(N_BATCH - len(batch), draft)
                batch += tokens
                if tokens and tokens[-1].wants_logits:
                    asking.append((request, draft))
                else:
                    others.append(request)
            n_best = [request.n_best for request, _ in asking]
            rows = self.decoder.likeliest(batch, max(n_best) if n_best and all(n_best) else 0)
            ends = np.cumsum([1 + len(draft) for _, draft in asking]).tolist()
            parts = [rows[end - len(draft) - 1 : end] for (_, draft), end in zip(asking, ends, strict=True)]
            failed = [i for i, part in enumerate(parts) if not _is_finite(part)]
            has_processor = any(request.options.logits_processor for request, _ in asking)
            if failed or has_processor:  # these may use this model, a processor also from another thread
                parts = [part.copy() for part in parts]
            if failed:
                self._retry(asking, parts, failed, others)
            if not has_processor:
                self._accept(asking, parts)
        if has_processor:
            self._accept(asking, parts)
        return [request for request, _ in asking]

    def _drafts_of(self, active: Sequence[Request]) -> dict[int, list[int]]:
        """Return drafts of requests whose tokens are all in the cache except the newest, by sequence."""
        most = min(self.n_draft, MOST_VERIFIED // max(len(active), 1) - 1)
        ready, counts = [], []
        for request in active:
            n = min(most, request.n_draft, request.options.max_tokens - len(request.result.tokens) - 1)
            if n > 0 and _n_left(request) == 1:
                ready.append(request)
                counts.append(n)
        needs = {r.sequence: len(r.tokens) + n for r, n in zip(ready, counts, strict=True)}
        if self._drafts is None or not ready or not self.memory.fits(needs):
            return {}
        return dict(zip(needs, self._drafts(ready, counts), strict=True))

    def _accept(self, asking: Sequence[tuple[Request, list[int]]], parts: Sequence[Array]) -> None:
        """Sample tokens of requests from rows of logits; remove drafted tokens that differ from the cache."""
        for (request, draft), rows in zip(asking, parts, strict=True):
            if request.is_done:
                continue
            n_cached = request.n_done
            try:
                if draft:
                    request.verify(draft, rows)
                else:
                    request.accept(rows[0])
            except Exception as error:  # of sampling: other requests of the batch go on
                request.fail(error)
            if request.n_done < n_cached:
                with self.lock:
                    self.memory.remove(request.sequence, request.n_done)

    def _retry(
        self,
        asking: list[tuple[Request, list[int]]],
        parts: list[Array],
        failed: Sequence[int],
        others: Sequence[Request],
    ) -> None:
        """Compute NaN or infinite rows again, each request alone; end those that fail again.

        NaN of one sequence may reach all of its batch, since some kernels multiply masked values; so the
        others, whose outputs are not known yet, begin again too.
        """
        self.memory.note_nan()
        for request in (*others, *(asking[i][0] for i in failed)):
            request.n_done = self.memory.remove(request.sequence)
        for i in failed:
            request = asking[i][0]
            while _n_left(request):
                found = self.decoder.decode(request.next_tokens(N_BATCH))
            if np.isfinite(found.max()):
                asking[i], parts[i] = (request, []), found
            else:
                request.n_done = self.memory.remove(request.sequence)
                request.fail(self._not_finite(request.tokens))

    def _has_room(self, request: Request) -> bool:
        """Whether the cache has room for a request beside the running ones."""
        return self.memory.fits({r.sequence: _n_most(r) for r in (*self._running.values(), request)})

    def _remove(self, request: Request) -> None:
        with self.lock:
            self._running.pop(request.sequence, None)
            if not request.is_session:
                self.memory.remove(request.sequence)

    def parts(self, tokens: Sequence[int], compute: Callable[[Sequence[Token]], Part]) -> Iterator[Part]:
        """Pass a prompt to `compute` in batches of `N_OUT` (64) tokens; yield the result of each batch.

        Raises:
            ArgumentError: The prompt does not fit.
        """
        self.check_fits(tokens)
        sequence = self.new_sequence()
        try:
            for start in range(0, len(tokens), N_OUT):
                part = tokens[start : start + N_OUT]
                with self.lock:
                    found = compute([Token(t, sequence, start + i, True) for i, t in enumerate(part)])
                yield found
        finally:
            with self.lock:
                self.memory.remove(sequence)

    def each(self, tokens: Sequence[int], compute: Callable[[Sequence[Token]], Floats]) -> Floats:
        """Pass a prompt to `compute` (`decode` or `hidden`) in batches; return the outputs of all tokens.

        Raises:
            ArgumentError: The prompt does not fit.
            ModelError: An output is NaN or infinite.
        """

        def checked(batch: Sequence[Token]) -> Floats:
            found = compute(batch)
            if not np.isfinite(found.max()):
                self.memory.note_nan()
                self.memory.remove(batch[0].sequence)
                raise self._not_finite(tokens[: batch[-1].position + 1])
            return found

        return np.concatenate(list(self.parts(tokens, checked)))


def _is_finite(rows: Array) -> bool:
    """Whether the largest logit of each row is finite; those of candidates always are."""
    return rows.dtype == CANDIDATE or bool(np.isfinite(rows.max(axis=1)).all())


def _n_left(request: Request) -> int:
    """Return the number of tokens that are not computed yet."""
    return len(request.tokens) - request.n_done


def _n_most(request: Request) -> int:
    """Return the largest number of cells that a request may need."""
    return len(request.result.prompt_tokens) + request.options.max_tokens


def n_equal(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return the length of the common prefix of two sequences, at most `most`."""
    n = min(len(a), len(b), most)
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])
