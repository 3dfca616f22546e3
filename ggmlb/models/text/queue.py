"""JobQueue: one thread that computes the generations of many callers in common batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Event, Thread
from typing import TYPE_CHECKING

from ggmlb.core.arguments import checked_methods
from ggmlb.core.errors import AllocationError, Error, FreedError
from ggmlb.models.text.decoder import N_OUT, Floats
from ggmlb.models.text.generation import Engine, Generation, Request, n_equal
from ggmlb.models.text.sampling import Options, OptionValues, changed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ggmlb.models.text.model import Prompt

N_AHEAD = 64
"""Tokens that a generation must have room for, beside its prompt, when it starts."""

MIN_SHARED = 16
"""Shortest prefix that is copied from another sequence, or waited for, instead of computed [tokens]."""

MOST_TAKEN = 0.8
"""Part of a finished sequence that a prompt must begin with to continue it; a shorter part is copied."""


class Job:
    """A generation in a `JobQueue`.

    Attributes:
        result: The result so far.
        error: The error that ended it; `None` if there is none.
        n_reused: Tokens of the prompt that were in the KV cache already.
        is_done: Whether it has ended.
    """

    def __init__(self, request: Request, on_piece: Callable[[str, bool], object] | None) -> None:
        self.request = request
        self.result = request.result
        self.error: Exception | None = None
        self.n_reused = 0
        self.is_cancelled = False
        self._on_piece = on_piece
        self._done = Event()

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def cancel(self) -> None:
        """End it before its next token; `stopped_by` is `"cancelled"` then."""
        self.is_cancelled = True

    def wait(self, timeout: float | None = None) -> Generation:
        """Wait for the end, and return the result.

        Raises:
            TimeoutError: It has not ended after `timeout` seconds.
            Error: The generation failed.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the generation has not ended after {timeout} s")
        if self.error is not None:
            raise self.error
        return self.result

    def notify(self) -> None:
        """Pass new text to the callback; mark the job as done if the request is."""
        request = self.request
        self.error = self.error or request.error
        piece = request.take() if self._on_piece is not None else ""
        is_done = request.is_done
        if is_done:
            self._done.set()
        if self._on_piece is not None and (piece or is_done):
            try:
                self._on_piece(piece, is_done)
            except Exception as error:  # other jobs go on
                self.error = self.error or error
                self._on_piece = None
                self.cancel()


@checked_methods
class JobQueue:
    """Generates for many threads at once, in common batches, until it is closed.

    Made by `TextModel.queue`; a context manager. A job starts when the KV cache has room for its prompt. The
    cache keeps finished sequences as long as no other needs their place, and a prompt computes only the
    tokens after the longest prefix that any sequence has. If the running sequences outgrow the cache, the
    newest one is paused, and its tokens are computed again later.

    Attributes:
        n_generated, n_prompt, n_reused: Tokens generated, of prompts, and of prompts not computed, since the
            start.
    """

    def __init__(
        self,
        engine: Engine,
        request: Callable[[Prompt, Options], Request],
        tokens_of: Callable[[Prompt], list[int]],
        embed: Callable[[Prompt], Floats],
    ) -> None:
        self._engine = engine
        self._request = request
        self._tokens_of = tokens_of
        self._embed = embed
        self._embeddings: deque[tuple[list[int], Future[Floats]]] = deque()
        self._changed = Condition()
        self._waiting: deque[Job] = deque()
        self._active: list[Job] = []
        self._kept: list[tuple[int, list[int]]] = []  # least recently used first
        self._is_closed = False
        self.n_generated = self.n_prompt = self.n_reused = 0
        self._thread = Thread(target=self._run, name="ggmlb jobs", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<JobQueue: {self.n_active} running, {self.n_waiting} waiting>"

    @property
    def n_active(self) -> int:
        """Number of running generations."""
        return len(self._active)

    @property
    def n_waiting(self) -> int:
        """Number of generations that have not started."""
        return len(self._waiting)

    def submit(
        self,
        prompt: Prompt,
        options: Options | None = None,
        on_piece: Callable[[str, bool], object] | None = None,
        **changes: Unpack[OptionValues],
    ) -> Job:
        """Queue a generation, and return at once.

        Args:
            prompt: As for `TextModel.generate`, like `options` and `changes`.
            options: Options of the generation.
            on_piece: `on_piece(text, is_done)`, called with each new text and at the end, from the queue's
                thread; it must return soon. An error that it raises ends the job, which has that error.
            changes: Single options by name.

        Raises:
            FreedError: The queue is closed.
            Error: As `TextModel.generate`.
        """
        job = Job(self._request(prompt, changed(options, changes)), on_piece)
        with self._changed:
            if self._is_closed:
                raise FreedError("submit: this queue was closed; make another by TextModel.queue")
            self._waiting.append(job)
            self._changed.notify()
        return job

    def embed(self, prompt: Prompt) -> Future[Floats]:
        """Queue a prompt's embedding, as of `TextModel.embed`, to be computed between two batches.

        Raises:
            FreedError: The queue is closed.
            ArgumentError: The prompt does not fit.
        """
        tokens, found = self._tokens_of(prompt), Future[Floats]()
        self._engine.check_fits(tokens)
        with self._changed:
            if self._is_closed:
                raise FreedError("embed: this queue was closed; make another by TextModel.queue")
            self._embeddings.append((tokens, found))
            self._changed.notify()
        return found

    def close(self, cancel: bool = False) -> None:
        """Wait until all jobs have ended, or `cancel` them; free their place in the cache."""
        with self._changed:
            self._is_closed = True
            for job in (*self._waiting, *self._active) if cancel else ():
                job.cancel()
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> JobQueue:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.close(cancel=kind is not None)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._waiting or self._active or self._embeddings or self._is_closed):
                    self._changed.wait()
                if not (self._waiting or self._active or self._embeddings):
                    break
            try:
                self._step()
            except Exception as error:  # of the device, or of the model's weights: nothing can go on
                self._fail(error)
        self._drop(len(self._kept))

    def _step(self) -> None:
        """Start jobs that fit, compute one batch, and pass on its text."""
        for job in (*self._waiting, *self._active):
            if job.is_cancelled and not job.request.is_done:
                job.request.end("cancelled")
                self._leave(job)
        if self._embeddings:
            self._embed_next()
        self._start()
        self._pause()
        jobs = {job.request.sequence: job for job in self._active}
        n_before = {number: len(job.result.tokens) for number, job in jobs.items()}
        for request in self._engine.step([job.request for job in self._active]) if jobs else ():
            job = jobs[request.sequence]
            self.n_generated += len(request.result.tokens) - n_before[request.sequence]
            if request.is_done:
                self._leave(job)
            else:
                job.notify()

    def _embed_next(self) -> None:
        """Compute the first waiting embedding, if there is room beside the running jobs."""
        tokens, found = self._embeddings[0]
        needs = {job.request.sequence: len(job.request.tokens) for job in self._active}
        if not self._make_room({**needs, -1: len(tokens)}) and self._active:
            return
        self._embeddings.popleft()
        if not found.set_running_or_notify_cancel():
            return
        try:
            found.set_result(self._embed(tokens))
        except Exception as error:
            found.set_exception(error)

    def _start(self) -> None:
        """Start waiting jobs, first come, first served, while there is room."""
        for job in list(self._waiting):
            if len(self._active) == N_OUT:
                return
            request = job.request
            tokens = request.tokens
            length, source = self._best_source(tokens)
            running = next((j.request for j in self._active if j.request.sequence == source), None)
            if running is not None and length - running.n_done >= MIN_SHARED:
                continue  # soon, the running one has computed the prefix of both
            if running is not None:
                length = min(length, running.n_done)
            needs = {r.sequence: len(r.tokens) + _n_ahead(r) for r in (j.request for j in self._active)}
            needs[request.sequence] = len(tokens) + _n_ahead(request)
            if not self._make_room(needs, source) and self._active:
                return
            with self._changed:
                self._waiting.remove(job)
                self._active.append(job)
            request.n_done = self._reuse(request, source, length, running is not None)
            if not request.result.tokens:
                job.n_reused = request.n_done
                self.n_prompt += len(tokens)
                self.n_reused += request.n_done

    def _best_source(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the length of the longest prefix of a prompt that a sequence has, and the sequence.

        With recurrent states, only finished sequences count, as they are or at a checkpoint.
        """
        memory, most = self._engine.memory, len(tokens) - 1
        if memory.slots is not None:
            found = [(memory.reachable(s, n_equal(tokens, theirs, most)), s) for s, theirs in self._kept]
        else:
            running = [(job.request.sequence, job.request.tokens) for job in self._active]
            found = [(n_equal(tokens, theirs, most), s) for s, theirs in self._kept + running]
        return max(found, default=(0, -1))

    def _reuse(self, request: Request, source: int, length: int, is_running: bool) -> int:
        """Give a request the first `length` tokens of another sequence; return how many it has then."""
        memory = self._engine.memory
        kept = dict(self._kept).get(source, [])
        with self._engine.lock:
            if kept and length >= MOST_TAKEN * len(kept):
                self._kept.remove((source, kept))
                request.sequence = source
                return memory.remove(source, length)
            is_there = is_running or bool(kept)
            if not is_there or length < MIN_SHARED:
                return 0
            try:
                return memory.copy(source, request.sequence, length)
            except AllocationError:
                return 0

    def _pause(self) -> None:
        """Preempt the newest jobs while the running ones do not fit the KV cache: they start again later."""
        while True:
            n, running = self._engine.n_draft, [job.request for job in self._active]
            needs = {r.sequence: len(r.tokens) + min(n, _n_ahead(r)) for r in running}
            if self._make_room(needs) or len(self._active) <= 1:
                return
            with self._changed:
                job = self._active.pop()
                self._waiting.appendleft(job)
            self._free(job.request.sequence)
            job.request.n_done = 0

    def _make_room(self, needs: dict[int, int], source: int = -1) -> bool:
        """Whether sequences fit the cache, if need be without the finished ones; `source` goes last."""
        with self._engine.lock:
            while not self._engine.memory.fits(needs):
                if not self._kept:
                    return False
                self._kept.sort(key=lambda kept: kept[0] == source)
                self._drop(1)
        return True

    def _leave(self, job: Job) -> None:
        """Take a finished job out; its sequence stays in the cache."""
        request = job.request
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            else:
                self._active.remove(job)
                if request.n_done:
                    self._kept.append((request.sequence, request.tokens[: request.n_done]))
        job.notify()

    def _fail(self, error: Exception) -> None:
        """End all running jobs with an error."""
        for job in list(self._active):
            job.request.fail(error)
            with suppress(Error):  # the device that failed may fail again: `error` is told
                self._free(job.request.sequence)
            with self._changed:
                self._active.remove(job)
            job.notify()

    def _drop(self, n: int) -> None:
        for _ in range(n):
            self._free(self._kept.pop(0)[0])

    def _free(self, sequence: int) -> None:
        with self._engine.lock:
            self._engine.memory.remove(sequence)


def _n_ahead(request: Request) -> int:
    """Return the number of further tokens that must fit the cache when a request starts."""
    return min(N_AHEAD, request.options.max_tokens - len(request.result.tokens))
