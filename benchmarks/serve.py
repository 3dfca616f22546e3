"""Requests per second of `ggmlb serve` beside llama.cpp's server, with the same model and threads.

Both serve SmolLM2 with a context of 8,192 tokens for up to 16 answers at once, llama.cpp's with its own
defaults for all else. They take turns; the idle one sleeps. Clients send one request after another, each for
32 tokens after a prompt of some 190, whose first 160 are the same for all clients (`shared`) or for none
(`own`). `first` is the median time to the first token. `processor` is the processor time of the server's
process per request, which a busy machine changes least; `ratio` is that of llama.cpp's by ours.

    python benchmarks/serve.py --peer PATH/llama-server --about "VERSION, BUILD" [--threads 1] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from http.client import HTTPConnection
from itertools import count
from statistics import median

from report import Table, save

from ggmlb.models import default_text_model

N_TOKENS, N_CTX, N_SLOTS = 32, 8192, 16
REQUESTS = {1: 3, 4: 8, 16: 16}
WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
NUMBERS = count()


class Server:
    """A server in a process of its own."""

    def __init__(self, port: int, *command: str) -> None:
        self.port = port
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            time.sleep(0.2)
            with suppress(OSError):
                client = HTTPConnection("127.0.0.1", port)
                client.request("GET", "/health")
                if client.getresponse().status == 200:
                    return
        self.close()
        raise RuntimeError(f"{command[0]} does not answer")

    def seconds(self) -> float:
        """The processor time of the process so far [s]."""
        with open(f"/proc/{self._process.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def first_token(self, prompt: str) -> float:
        """Send a request, read the whole answer, and return the time to its first token [s]."""
        body = {
            "prompt": prompt,
            "max_tokens": N_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        client = HTTPConnection("127.0.0.1", self.port, timeout=600)
        start, first = time.perf_counter(), 0.0
        client.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = client.getresponse()
        assert answer.status == 200, answer.read()
        while line := answer.readline():
            if line.startswith(b"data: {") and not first:
                first = time.perf_counter() - start
        client.close()
        return first

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()


def prompt_of(n_words: int, seed: object) -> str:
    """Return a text of random words."""
    draw = random.Random(f"{seed}")
    return " ".join(draw.choice(WORDS) for _ in range(n_words))


def measured(server: Server, n_clients: int, is_shared: bool) -> tuple[float, float, float]:
    """Return requests per second, the median time to the first token [s], and processor time of one [s]."""
    same = prompt_of(160, next(NUMBERS))
    prompts = [
        (same if is_shared else prompt_of(160, next(NUMBERS))) + " " + prompt_of(30, next(NUMBERS))
        for _ in range(REQUESTS[n_clients])
    ]
    with ThreadPoolExecutor(n_clients) as pool:
        start, used = time.perf_counter(), server.seconds()
        firsts = list(pool.map(server.first_token, prompts))
        took, used = time.perf_counter() - start, server.seconds() - used
    return len(prompts) / took, median(firsts), used / len(prompts)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", required=True)
    parser.add_argument(
        "--about", required=True, help="version, build and instruction sets of the peer, for the page"
    )
    parser.add_argument("--threads", default="1")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    model, sizes = str(default_text_model()), ["-c", str(N_CTX), "-t", args.threads]
    our = sys.executable, "-m", "ggmlb", "--quiet", "serve", "-m", model, *sizes, "--port", "8181"
    their = args.peer, "-m", model, *sizes, "-np", str(N_SLOTS), "--kv-unified", "--port", "8182"
    table = Table(
        "clients", "prefix", "requests/s", "llama.cpp", "ratio", "first [ms]", "llama.cpp", "processor [ms]",
        "llama.cpp", "ratio",
    )  # fmt: skip
    with closing(Server(8181, *our)) as ours, closing(Server(8182, *their)) as theirs:
        for server in (ours, theirs):  # plans, and kernels that are compiled when first needed
            measured(server, N_SLOTS, False)
        for is_shared in (True, False):
            for n_clients in REQUESTS:
                runs = [
                    (measured(ours, n_clients, is_shared), measured(theirs, n_clients, is_shared))
                    for _ in range(args.rounds)
                ]
                (n, first, used), (n2, first2, used2) = (
                    [median(run[i][j] for run in runs) for j in range(3)] for i in (0, 1)
                )
                table.row(
                    n_clients, "shared" if is_shared else "own", f"{n:.2f}", f"{n2:.2f}", f"{n / n2:.2f}",
                    f"{1e3 * first:.0f}", f"{1e3 * first2:.0f}", f"{1e3 * used:.0f}", f"{1e3 * used2:.0f}",
                    f"{used2 / used:.2f}",
                )  # fmt: skip
    if args.save:
        about = f"Serving\n\n{' '.join(str(__doc__).split())}\n\nllama.cpp: {args.about}."
        save("serve", about, table, packages=("numpy", "uvicorn", "starlette"))


if __name__ == "__main__":
    main()
