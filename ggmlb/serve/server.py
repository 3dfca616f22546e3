"""The server: routes of OpenAI's API over one `JobQueue`, limits, metrics, and the page to chat in."""

from __future__ import annotations

import asyncio
import base64
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from hmac import compare_digest
from importlib.resources import files
from time import perf_counter, time
from typing import Any, Final, TypeVar

import uvicorn
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from ggmlb.core.errors import AllocationError, ArgumentError, Error, FreedError, ModelError
from ggmlb.models import Generation, Job, JobQueue, TextModel
from ggmlb.serve import answers, requests

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")

POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What the page may load: only from this server."""

SMALL_BODY: Final = 1 << 16
"""Bodies up to this size are not subject to `bodies_nbytes`, and are parsed at once [bytes]."""

T = TypeVar("T")
Piece = tuple[int, str, bool]
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Limits:
    """Limits of clients.

    Attributes:
        n_requests: Answers that may be computed or waited for at once; of more, clients are told to retry.
        n_connections: Open connections; a new one replaces the oldest one without a complete request.
        body_nbytes: Largest body [bytes].
        bodies_nbytes: All bodies that are being read or parsed, if one is above 64 KiB [bytes].
        client_seconds: Longest time to send a head, to send a body, or to take up what is to be read [s].
        shutdown_seconds: Time that running answers have when the server is stopped [s].
    """

    n_requests: int = 256
    n_connections: int = 1024
    body_nbytes: int = 8 << 20
    bodies_nbytes: int = 128 << 20
    client_seconds: float = 30.0
    shutdown_seconds: int = 60


class _RefusedError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        content: The answer.
    """

    def __init__(self, status: int, text: str, kind: str = "invalid_request_error", code: str = "") -> None:
        self.status = status
        self.content = answers.error(text, kind, code or None)


class _Server:
    """The handlers of one server; attributes as the arguments of `create_app`."""

    def __init__(
        self, model: TextModel, name: str, api_key: str | None, hosts: tuple[str, ...], limits: Limits
    ):
        self.model = model
        self.name = name
        self.limits = limits
        self._api_key = api_key or None
        self._hosts = hosts
        self._start = time()
        self._n_open = self._n_body_bytes = 0
        self._n_answers: Counter[tuple[str, int]] = Counter()
        self._recent = (perf_counter(), 0, 0.0)
        self.queue: JobQueue
        self._large = CapacityLimiter(1)  # objects of JSON take up to 25 times the memory of their text
        self.page = files(__package__).joinpath("page.html").read_text(encoding="utf-8")

    # -- requests ------------------------------------------------------------------------------

    def route(self, path: str, handler: Handler, is_open: bool = False, method: str = "GET") -> Route:
        """Return the route of a handler, with checks of key and host, and errors in OpenAI's form."""

        async def answer(request: Request) -> Response:
            try:
                self._check(request, is_open)
                found = await handler(request)
            except _RefusedError as refused:
                retry = {"Retry-After": "1"} if refused.status in (429, 503) else None
                found = JSONResponse(refused.content, refused.status, retry)
            except AllocationError as error:
                found = JSONResponse(answers.error(str(error), "server_error"), 503, {"Retry-After": "1"})
            except (ArgumentError, ModelError) as error:
                code = "context_length_exceeded" if "n_ctx" in str(error) else None
                found = JSONResponse(answers.error(str(error), code=code), 400)
            except FreedError:
                found = JSONResponse(answers.error("the server is being stopped", "server_error"), 503)
            except ClientDisconnect:
                found = Response(status_code=499)
            except Error as error:
                found = JSONResponse(answers.error(str(error), "server_error"), 500)
            self._n_answers[path, found.status_code] += 1
            return found

        return Route(path, answer, methods=[method])

    def _check(self, request: Request, is_open: bool) -> None:
        host = request.url.hostname if "host" in request.headers else None
        if self._hosts and host not in self._hosts:  # a page elsewhere, by a name of its own
            raise _RefusedError(403, f"the host {host!r} is not this server's; see --host")
        if self._api_key is None or is_open:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not compare_digest(given.encode(), self._api_key.encode()):
            raise _RefusedError(
                401, "the API key is missing or wrong", "authentication_error", "invalid_api_key"
            )

    async def _parsed(self, request: Request, parse: Callable[[Mapping[str, Any]], T]) -> T:
        """Return the body parsed by `parse`; count one more open answer. The body is freed."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            raise _RefusedError(415, "send JSON, with the header Content-Type: application/json")
        raw = bytearray()

        async def read() -> None:
            async for part in request.stream():
                self._n_body_bytes += len(part)
                raw.extend(part)
                if len(raw) > self.limits.body_nbytes:
                    raise _RefusedError(413, f"the body has more than {self.limits.body_nbytes:,} bytes")
                if len(raw) > SMALL_BODY and self._n_body_bytes > self.limits.bodies_nbytes:
                    raise _RefusedError(429, "too many large bodies; try again soon", "rate_limit_error")

        try:
            await asyncio.wait_for(read(), self.limits.client_seconds)
            self._enter(1)
            try:
                limiter = self._large if len(raw) > SMALL_BODY else None
                return await to_thread.run_sync(lambda: parse(_json(raw)), limiter=limiter)
            except BaseException:
                self.leave(1)
                raise
        except asyncio.TimeoutError:
            seconds = self.limits.client_seconds
            raise _RefusedError(408, f"the body did not come within {seconds:g} s") from None
        except (Error, _RefusedError) as error:  # else its frames keep the body until garbage is collected
            error.__context__ = None
            raise error.with_traceback(None) from None
        finally:
            self._n_body_bytes -= len(raw)
            raw.clear()

    def _enter(self, n: int) -> None:
        """Count `n` more answers as open; refuse them if they are too many."""
        if self._n_open + n > self.limits.n_requests:
            raise _RefusedError(
                429, f"{self._n_open} answers are under way; try again soon", "rate_limit_error", "queue_full"
            )
        self._n_open += n

    def leave(self, n: int) -> None:
        """Count `n` fewer answers as open."""
        self._n_open -= n

    # -- generation ----------------------------------------------------------------------------

    async def generate(
        self, request: Request, parse: Callable[[Mapping[str, Any], TextModel], requests.Asked]
    ) -> Response:
        """Answer `/v1/chat/completions`, or `/v1/completions`."""
        asked = await self._parsed(request, lambda body: parse(body, self.model))
        n, run = 1, None
        try:
            n_more = len(asked.prompts) * asked.n - 1
            if n_more >= (most := self.limits.n_requests):
                raise _RefusedError(400, f"prompts times n is {n_more + 1}; at most {most} are allowed")
            self._enter(n_more)
            n += n_more
            run = _Run(self, asked)
            await run_in_threadpool(run.submit)
            if asked.is_streamed:
                stream = run.stream(n)
                n, run = 0, None  # the stream leaves when it ends
                headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
                return StreamingResponse(stream, media_type="text/event-stream", headers=headers)
            return JSONResponse(await run.whole(request))
        finally:
            if run is not None:
                run.cancel()
            self.leave(n)

    async def embeddings(self, request: Request) -> Response:
        """Answer `/v1/embeddings`."""
        parse = partial(requests.embeddings, tokens_of=self.model.tokens_of)
        prompts, is_packed = await self._parsed(request, parse)
        try:
            rows = await _while_there(request, self._embed(prompts))
            if rows[0].ndim > 1:
                raise _RefusedError(400, "this model has no embedding of a whole text (pooling type none)")
            data = [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": base64.b64encode(row.tobytes()).decode() if is_packed else row.tolist(),
                }
                for i, row in enumerate(rows)
            ]
            n = sum(map(len, prompts))
            used = {"prompt_tokens": n, "total_tokens": n}
            return JSONResponse({"object": "list", "model": self.name, "data": data, "usage": used})
        finally:
            self.leave(1)

    async def _embed(self, prompts: list[list[int]]) -> list[Any]:
        return [await asyncio.wrap_future(self.queue.embed(prompt)) for prompt in prompts]

    # -- facts ---------------------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        """Answer `/v1/models`, and `/v1/models/NAME`."""
        one = {"id": self.name, "object": "model", "created": int(self._start), "owned_by": "ggmlb"}
        if (name := request.path_params.get("name")) is None:
            return JSONResponse({"object": "list", "data": [one]})
        if name != self.name:
            raise _RefusedError(
                404, f"there is no model {name!r}; it is {self.name!r}", code="model_not_found"
            )
        return JSONResponse(one)

    async def health(self, request: Request) -> Response:
        """Answer `/health`."""
        return JSONResponse({"status": "ok"})

    async def status(self, request: Request) -> Response:
        """Answer `/status`: speed, the parts on each device, and memory."""
        summary = self.model.summary()
        now, n, speed = perf_counter(), self.queue.n_generated, self._recent[2]
        if now - self._recent[0] >= 0.5:
            speed = (n - self._recent[1]) / (now - self._recent[0])
            self._recent = now, n, speed
        return JSONResponse({
            "model": self.name, "facts": dict(summary.facts), "parts": dict(summary.parts),
            "memory": summary.memory.allocated.as_list(), "tokens_per_second": speed,
            "running": self.queue.n_active, "waiting": self.queue.n_waiting,
        })  # fmt: skip

    async def metrics(self, request: Request) -> Response:
        """Answer `/metrics`, in Prometheus' text format."""
        queue, lines = self.queue, []
        for name, kind, about, value in (
            ("tokens_generated_total", "counter", "Generated tokens.", queue.n_generated),
            ("prompt_tokens_total", "counter", "Tokens of prompts.", queue.n_prompt),
            ("prompt_tokens_reused_total", "counter", "Cached tokens of prompts.", queue.n_reused),
            ("answers_running", "gauge", "Answers that are computed now.", queue.n_active),
            ("answers_waiting", "gauge", "Answers that have not started.", queue.n_waiting),
            ("uptime_seconds", "gauge", "Time since the start.", round(time() - self._start, 3)),
        ):
            lines += [f"# HELP ggmlb_{name} {about}", f"# TYPE ggmlb_{name} {kind}", f"ggmlb_{name} {value}"]
        lines += ["# HELP ggmlb_requests_total Answered requests.", "# TYPE ggmlb_requests_total counter"]
        for (path, status), n in sorted(self._n_answers.items()):
            lines.append(f'ggmlb_requests_total{{path="{path}",status="{status}"}} {n}')
        lines += ["# HELP ggmlb_memory_bytes Allocated memory.", "# TYPE ggmlb_memory_bytes gauge"]
        for use in self.model.memory.allocated:
            labels = f'device="{use.device}",memory="{use.memory}",kind="{use.kind}"'
            lines.append(f"ggmlb_memory_bytes{{{labels}}} {use.nbytes}")
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def index(self, request: Request) -> Response:
        """Answer `/`: the page to chat in."""
        return HTMLResponse(self.page, headers={"Content-Security-Policy": POLICY})


class _Run:
    """The generations of one request.

    Args:
        server: The server.
        asked: What the request asks for.
    """

    def __init__(self, server: _Server, asked: requests.Asked) -> None:
        self._server = server
        self._model = server.model
        self._asked = asked
        self._jobs: list[Job] = []
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece] = asyncio.Queue()
        kind = "chat.completion" if asked.is_chat else "text_completion"
        self._head = {
            "id": answers.new_id("chatcmpl" if asked.is_chat else "cmpl"),
            "object": f"{kind}.chunk" if asked.is_chat and asked.is_streamed else kind,
            "created": int(time()),
            "model": server.name,
        }

    def submit(self) -> None:
        """Queue the generations."""
        options = self._asked.options
        for prompt in self._asked.prompts:
            for j in range(self._asked.n):
                number = len(self._jobs)
                seed = (options.seed + j) % (1 << 64)

                def take(piece: str, is_done: bool, number: int = number) -> None:
                    with suppress(RuntimeError):  # the loop is closed: nobody waits
                        self._loop.call_soon_threadsafe(self._pieces.put_nowait, (number, piece, is_done))

                self._jobs.append(self._server.queue.submit(prompt, options, take, seed=seed))

    def cancel(self) -> None:
        """Cancel the generations that are running."""
        for job in self._jobs:
            job.cancel()

    async def whole(self, request: Request) -> dict[str, Any]:
        """Wait for all generations, and return the whole answer; a client that goes ends them."""
        await _while_there(request, self._ended())
        for job in self._jobs:
            if job.error is not None:
                raise job.error
            if job.result.stopped_by == "cancelled":
                raise FreedError("the server is being stopped")
        choices = [self._choice(i, job.result) for i, job in enumerate(self._jobs)]
        return {**self._head, "choices": choices, "usage": self._usage()}

    async def _ended(self) -> None:
        n_left = len(self._jobs)
        while n_left:
            n_left -= (await self._pieces.get())[2]

    def _usage(self) -> dict[str, Any]:
        n_reused = sum(job.n_reused for job in self._jobs[:: self._asked.n])  # of each prompt once
        return answers.usage([job.result for job in self._jobs], self._asked.prompts, n_reused)

    def _choice(self, i: int, result: Generation) -> dict[str, Any]:
        asked = self._asked
        if asked.is_chat:
            message, reason = answers.message(result, asked.tools)
            logs = answers.chat_logprobs(self._model, result, asked.n_top, 0, len(result.tokens))
            return {"index": i, "message": message, "logprobs": logs, "finish_reason": reason}
        text = (asked.echo[i // asked.n] if asked.echo else "") + result.text
        reason = answers.REASONS.get(result.stopped_by, "stop")
        offset = len(text) - len(result.text)
        logprobs = answers.text_logprobs(self._model, result, asked.n_top, 0, len(result.tokens), offset)
        return {"index": i, "text": text, "logprobs": logprobs, "finish_reason": reason}

    async def stream(self, n: int) -> AsyncIterator[bytes]:
        """Yield the events of the answer; count `n` fewer open answers at the end."""
        try:
            streams = [_Choice(self._model, self._asked, job, i) for i, job in enumerate(self._jobs)]
            for choice in streams if self._asked.is_chat else ():
                yield self._event(choice.delta({"role": "assistant", "content": ""}))
            n_left = len(self._jobs)
            while n_left:
                number, piece, is_done = await self._pieces.get()
                n_left -= is_done
                job = self._jobs[number]
                if is_done and (job.error is not None or job.result.stopped_by == "cancelled"):
                    yield _event(
                        answers.error(str(job.error or "the server is being stopped"), "server_error")
                    )
                    return
                for found in streams[number].take(piece, is_done):
                    yield self._event(found)
            if self._asked.has_usage:
                yield _event({**self._head, "choices": [], "usage": self._usage()})
            yield b"data: [DONE]\n\n"
        finally:  # also if the client goes
            self.cancel()
            self._server.leave(n)

    def _event(self, choice: dict[str, Any]) -> bytes:
        return _event({**self._head, "choices": [choice]})


class _Choice:
    """One choice of a stream: its text so far, and the length that was sent."""

    def __init__(self, model: TextModel, asked: requests.Asked, job: Job, index: int) -> None:
        self._model = model
        self._asked = asked
        self._result = job.result
        self._index = index
        self._text = ""
        self._n_sent = self._n_logprobs = 0
        self._echo = asked.echo[index // asked.n] if asked.echo else ""

    def take(self, piece: str, is_done: bool) -> list[dict[str, Any]]:
        """Return the objects of a new piece of text; text that may be a tool call waits for the end."""
        self._text += piece
        asked = self._asked
        if not asked.is_chat:
            text, self._echo = self._echo + piece, ""
            offset, self._n_sent = self._n_sent + len(text) - len(piece), self._n_sent + len(text)
            reason = answers.REASONS.get(self._result.stopped_by, "stop") if is_done else None
            logs = answers.text_logprobs(self._model, self._result, asked.n_top, *self._new_tokens(), offset)
            return [{"index": self._index, "text": text, "logprobs": logs, "finish_reason": reason}]
        found = []
        end = self._text_end() if not is_done else len(self._text)
        message, reason = answers.message(self._result, asked.tools) if is_done else ({}, "")
        calls = message.get("tool_calls", [])
        text = self._text[self._n_sent : end]
        if calls:
            text = answers.tool_calls(text, asked.tools)[0]
        if text:
            found.append(self.delta({"content": text}))
        self._n_sent = max(self._n_sent, end)
        if calls:
            found.append(self.delta({"tool_calls": [{"index": i, **c} for i, c in enumerate(calls)]}))
        if is_done:
            found.append({**self.delta({}), "finish_reason": reason})
        if found and asked.n_top is not None:
            new = self._new_tokens()
            found[0]["logprobs"] = answers.chat_logprobs(self._model, self._result, asked.n_top, *new)
        return found

    def _new_tokens(self) -> tuple[int, int]:
        """Return the range of tokens whose log-probabilities are sent now; the queue may be adding more."""
        n = min(len(self._result.tokens), len(self._result.logprobs))
        first, self._n_logprobs = self._n_logprobs, n
        return first, n

    def _text_end(self) -> int:
        """Return the length of the text that can be sent now."""
        if not self._asked.tools:
            return len(self._text)
        start = self._text.lstrip()
        if self._asked.must_call or any(
            start.startswith(m) or m.startswith(start) for m in answers.CALL_MARKS
        ):
            return 0
        return answers.before_call(self._text, self._n_sent)

    def delta(self, change: dict[str, Any]) -> dict[str, Any]:
        """Return an object of the stream with a change of the message."""
        return {"index": self._index, "delta": change, "logprobs": None, "finish_reason": None}


class _Protocol(H11Protocol):
    """HTTP that closes connections whose client takes over `seconds` to send a head, or to read an answer.

    Where there are `n_most` connections, a new one replaces the one that has waited longest for a request.
    """

    def __init__(self, seconds: float, n_most: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = seconds
        self._n_most = n_most
        self._start = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def _watch(self) -> None:
        is_due = self.flow.write_paused or self.cycle is None or self.cycle.response_complete
        if is_due and self._timer is None:
            self._timer = self.loop.call_later(self._seconds, self.transport.abort)
        elif not is_due and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_waiting(self) -> bool:
        """Whether the server owes no answer: every request that has arrived as a whole is answered."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if len(self.connections) >= self._n_most:
            waiting = [c for c in self.connections if isinstance(c, _Protocol) and c.is_waiting]
            if waiting:
                oldest = min(waiting, key=lambda connection: connection._start)
                oldest.transport.abort()
                self.connections.discard(oldest)
            else:
                self.limit_concurrency = 0  # uvicorn answers 503
        super().connection_made(transport)
        self._watch()

    def on_response_complete(self) -> None:
        self._start = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()


def _json(raw: bytearray) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise _RefusedError(400, "the body must be a JSON object")
    return body


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


async def _while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine, which is cancelled if the client closes the connection.

    Raises:
        ClientDisconnect: The client has closed it.
    """

    async def leave() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    found, gone = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait({found, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise ClientDisconnect
        return found.result()
    finally:
        found.cancel()
        gone.cancel()


def create_app(
    model: TextModel,
    name: str | None = None,
    api_key: str | None = None,
    hosts: tuple[str, ...] = (),
    limits: Limits = Limits(),
) -> Starlette:
    """Return the ASGI application that serves a model.

    Args:
        model: The model; it stays open.
        name: The model's name for clients; that of its file by default.
        api_key: The key that clients must send; none by default.
        hosts: Names by which clients may call the server; any by default.
        limits: Bounds on what clients may use.
    """
    server = _Server(model, name or model.file.path.stem, api_key, hosts, limits)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        server.queue = model.queue()
        try:
            yield
        finally:
            await run_in_threadpool(server.queue.close, cancel=True)

    route = server.route
    routes = [
        route("/", server.index, is_open=True),
        route("/health", server.health, is_open=True),
        route("/metrics", server.metrics),
        route("/status", server.status),
        route("/v1/models", server.models),
        route("/v1/models/{name:path}", server.models),
        route("/v1/chat/completions", partial(server.generate, parse=requests.chat), method="POST"),
        route("/v1/completions", partial(server.generate, parse=requests.completion), method="POST"),
        route("/v1/embeddings", server.embeddings, method="POST"),
    ]
    app = Starlette(routes=routes, lifespan=lifespan)
    app.state.server = server
    return app


def serve(
    model: TextModel,
    host: str = "127.0.0.1",
    port: int = 8080,
    *,
    name: str | None = None,
    api_key: str | None = None,
    limits: Limits = Limits(),
    on_start: Callable[[str], object] | None = None,
) -> None:
    """Serve a model until SIGINT or SIGTERM; running answers end first.

    Args:
        model: The model.
        host: The address to listen at; by default only programs on this machine can reach it.
        port: The port; 0: a free one.
        name: As for `create_app`, like `api_key` and `limits`.
        api_key: The key that clients must send.
        limits: Bounds on what clients may use.
        on_start: Called with the server's URL when it listens.

    Raises:
        ArgumentError: The address cannot be listened at.
    """
    app = create_app(model, name, api_key, LOOPBACK if host in LOOPBACK else (), limits)
    config = uvicorn.Config(
        app, host, port, log_level="warning", timeout_keep_alive=15,
        timeout_graceful_shutdown=limits.shutdown_seconds, server_header=False, ws="none",
        http=partial(_Protocol, limits.client_seconds, limits.n_connections),  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        listener = config.bind_socket()
    except SystemExit:
        raise ArgumentError(f"cannot listen at {host}, port {port}; give another --port or --host") from None
    listener.listen(limits.n_connections)
    if on_start is not None:
        shown = f"[{host}]" if ":" in host else host
        on_start(f"http://{shown}:{listener.getsockname()[1]}")
    with listener:
        uvicorn.Server(config).run(sockets=[listener])
