"""Clients that are slow, broken, too many, or gone: others are answered, and nothing is left behind."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from tests.serve.conftest import Served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SHORT = {"prompt": "One, two,", "max_tokens": 2}
IMPATIENT = """
import sys
from ggmlb.models import TextModel, default_text_model
from ggmlb.serve import Limits, serve
with TextModel(default_text_model(), n_ctx=2048) as model:
    limits = Limits(n_requests=4, client_seconds=1)
    serve(model, port=0, limits=limits, on_start=lambda url: print("model at", url, file=sys.stderr))
"""
ENDLESS = {"prompt": "One, two,", "ignore_eos": True, "stream": True}


def post(
    served: Served, body: Any, length: int | None = None, on: socket.socket | None = None, path: str = TEXT
) -> socket.socket:
    """Send a request, and return the connection."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = on or socket.create_connection(served.address, timeout=60)
    connection.sendall(f"{head}Content-Length: {length or len(raw)}\r\n\r\n".encode() + raw)
    return connection


@pytest.mark.parametrize(
    ("path", "raw", "status", "told"),
    [
        (CHAT, b"{", 400, "not valid JSON"),
        (CHAT, b"[" * 200_000, 400, "not valid JSON"),
        (CHAT, b"\xff\xfe", 400, "not valid JSON"),
        (CHAT, b"[]", 400, "must be a JSON object"),
        (CHAT, b"{}", 400, "messages must be a list"),
        (CHAT, b'{"messages": [{"role": 1}]}', 400, "no text 'role'"),
        (CHAT, b'{"messages": [{"role": "user", "content": 5}]}', 400, "content is 5"),
        (TEXT, b'{"prompt": ""}', 400, "the prompt is empty"),
        (TEXT, b'{"prompt": [1, -5]}', 400, "token -5"),
        (TEXT, b'{"prompt": {"a": 1}}', 400, "prompt must be"),
        (TEXT, b'{"prompt": "a", "temperature": "hot"}', 400, "temperature is"),
        (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "temperature is nan"),
        (TEXT, b'{"prompt": "a", "max_tokens": -7}', 400, "max_tokens is -7"),
        (TEXT, b'{"prompt": "a", "max_tokens": true}', 400, "max_tokens is"),
        (TEXT, b'{"prompt": "a", "n": 100000}', 400, "n is 100000"),
        (TEXT, b'{"prompt": "a", "stop": [1]}', 400, "stop must be"),
        (TEXT, b'{"prompt": "a", "logit_bias": {"x": 1}}', 400, "logit_bias"),
        (TEXT, b'{"prompt": "a", "grammar": "root ::= ("}', 400, "grammar"),
        (TEXT, b'{"prompt": "a", "json_schema": {"type": "no"}}', 400, "json_schema"),
        (TEXT, b'{"prompt": "a", "response_format": {"type": "x"}}', 400, "response_format"),
        (TEXT, b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400), 400, "temperature has a number beyond"),
        (
            TEXT,
            b'{"prompt": "a", "logit_bias": {"5": 1%s}}' % (b"0" * 400),
            400,
            "logit_bias must give a number",
        ),
        (TEXT, b'{"prompt": "a", "top_p": true}', 400, "top_p is a bool"),
        (TEXT, b'{"prompt": "a", "n": 0}', 400, "n is 0"),
        (TEXT, b'{"prompt": ["a", "b", "c"], "n": 100}', 400, "prompts times n is 300"),
        (TEXT, b'{"prompt": "a", "logit_bias": {"5": 1e300}}', 400, "logit_bias has 5: 1e+300"),
        (
            CHAT,
            b'{"messages": [{"role": "user", "content": "a"}], "tool_choice": "foo"}',
            400,
            "tool_choice is 'foo'",
        ),
        ("/v1/embeddings", b'{"input": []}', 400, "the prompt is empty"),
        (TEXT, b" " * (9 << 20), 413, "more than 8,388,608 bytes"),
    ],
)
def test_a_wrong_body_is_answered_with_its_fault(
    served: Served, path: str, raw: bytes, status: int, told: str
) -> None:
    found, answer = served.call(path, raw=raw)
    assert found == status and told in answer["error"]["message"], answer


def test_other_pages_cannot_use_the_server(served: Served) -> None:
    plain = {"Content-Type": "text/plain"}  # as a form of any page can send it
    assert served.call(TEXT, SHORT, plain)[0] == 415
    assert served.call(TEXT, SHORT, {"Host": "rebound.example"})[0] == 403
    with socket.create_connection(served.address, timeout=60) as old:  # HTTP/1.0 needs no host
        old.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert b" 403 " in old.recv(1000).splitlines()[0]
    assert served.call("/nothing")[0] == 404 and served.call("/v1/models/other")[0] == 404


def test_a_client_that_goes_ends_its_answer(served: Served) -> None:
    for body in (ENDLESS, {**ENDLESS, "stream": False}):
        connection = post(served, body)
        served.wait_for_metric("answers_running", 1)
        connection.close()
        served.wait_for_metric("answers_running", 0)
    with post(served, ENDLESS) as half:
        served.wait_for_metric("answers_running", 1)
        half.shutdown(socket.SHUT_WR)
        served.wait_for_metric("answers_running", 0)


def test_slow_clients_keep_no_other_waiting(served: Served) -> None:
    slow = [post(served, SHORT, length=1000) for _ in range(50)]
    unread = post(served, {**ENDLESS, "max_tokens": 500})
    assert served.call(TEXT, SHORT)[0] == 200
    for connection in (*slow, unread):
        connection.close()
    served.wait_for_metric("answers_running", 0)


def test_waiting_embeddings_keep_no_other_waiting(served: Served) -> None:
    """They find no room beside a long generation; when their clients go, they are not computed."""
    long = post(served, {**ENDLESS, "prompt": "word " * 1400})
    served.wait_for_metric("answers_running", 1)
    waiting = [post(served, {"input": "word " * 1000}, path="/v1/embeddings") for _ in range(60)]
    assert served.call(TEXT, SHORT)[0] == 200 and served.metric("answers_running") == 1
    for connection in (*waiting, long):
        connection.close()
    served.wait_for_metric("answers_running", 0)
    gone = 'ggmlb_requests_total{path="/v1/embeddings",status="499"} 60'
    assert gone in served.call("/metrics")[1]


def test_large_bodies_are_not_kept(served: Served) -> None:
    """Their parsed objects take some 180 MB each."""
    large = {**ENDLESS, "x": [[]] * 2_000_000}
    connections = [post(served, large) for _ in range(8)]
    served.wait_for_metric("answers_running", 8)
    status = Path(f"/proc/{served.process.pid}/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0])
    for connection in connections:
        connection.close()
    served.wait_for_metric("answers_running", 0)
    assert peak < 1_000_000, f"{peak:,} kB"


def test_connections_without_requests_make_room_for_others() -> None:
    """A client that fills all places, and comes again at once when one is closed, keeps none out."""
    served = Served(program=IMPATIENT.replace("n_requests=4, client_seconds=1", "n_connections=20"))
    answering = post(served, ENDLESS)
    served.wait_for_metric("answers_running", 1)
    held = [socket.create_connection(served.address, timeout=60) for _ in range(30)]
    held += [post(served, SHORT, length=1000) for _ in range(30)]
    for _ in range(3):
        assert served.call(TEXT, SHORT)[0] == 200
        held += [socket.create_connection(served.address, timeout=60) for _ in range(20)]
    assert served.metric("answers_running") == 1 and answering.recv(100)
    for connection in (answering, *held):
        connection.close()
    served.stop()


def test_a_connection_between_two_requests_is_as_young_as_the_last_answer() -> None:
    served = Served(program=IMPATIENT.replace("n_requests=4, client_seconds=1", "n_connections=10"))
    connections = [HTTPConnection(*served.address, timeout=60) for _ in range(11)]
    for connection in connections[:10]:
        connection.connect()
    for i in (9, 0, 10, 0):
        connections[i].request("GET", "/health")
        assert connections[i].getresponse().read()
    assert connections[1].sock.recv(10) == b"", "closed for the new one"
    for connection in connections:
        connection.close()
    served.stop()


def test_connections_of_stalled_clients_are_closed() -> None:
    """One that sends no head, one that sends half of a second one, and one that reads no answer."""
    served = Served(program=IMPATIENT)
    silent, again = (socket.create_connection(served.address, timeout=60) for _ in range(2))
    again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b"200 OK" in again.recv(10_000)
    again.sendall(b"GET /health HTTP/1.1\r\n")
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(served.address)
        post(served, {**ENDLESS, "logprobs": 20, "max_tokens": 300, "n": 4}, on=unread)
        served.wait_for_metric("answers_running", 4)
        assert served.call(TEXT, SHORT)[0] == 429
        end = time.monotonic() + 300
        while served.call(TEXT, SHORT)[0] != 200:
            assert time.monotonic() < end, "the place of the unread answer is not free"
            time.sleep(0.2)
    for connection in (silent, again):
        with connection, suppress(ConnectionResetError):
            while connection.recv(10_000):
                pass
    served.stop()
    assert "Traceback" not in "".join(served.log)


def test_of_200_at_once_all_are_answered(served: Served) -> None:
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda i: served.call(TEXT, {**SHORT, "prompt": f"Number {i}"})[0], range(200)))
    assert found == [200] * 200
    served.wait_for_metric("answers_waiting", 0)


def test_a_key_and_a_full_queue_and_the_end() -> None:
    served = Served("--api-key", "secret", "--max-requests", "2", "--max-body", "2000")
    key = {"Authorization": "Bearer secret"}
    assert [served.call("/health")[0], served.call("/")[0]] == [200, 200]
    for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer s\u00e9cret"}):
        assert served.call("/v1/models", headers=wrong)[0] == served.call(TEXT, SHORT, wrong)[0] == 401
    assert served.call("/metrics")[0] == 401 and served.call(TEXT, SHORT, key)[0] == 200
    assert served.call(TEXT, {"prompt": "a" * 3000}, key)[0] == 413
    assert served.call(TEXT, {**SHORT, "n": 3}, key)[0] == 400
    results = []

    def ask() -> None:
        body = {"prompt": "One", "ignore_eos": True, "max_tokens": 150}
        results.append(served.call(TEXT, body, key))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    served.wait_for_metric("answers_running", 2, key)
    assert served.call(TEXT, SHORT, key)[0] == 429
    served.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.join(90)
    assert [status for status, _ in results] == [200, 200]
    assert all(told["usage"]["completion_tokens"] == 150 for _, told in results)
    assert served.stop() in (0, -signal.SIGTERM)
    assert "Traceback" not in "".join(served.log)
