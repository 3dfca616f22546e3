"""Log-probabilities by llama.cpp (xllamacpp), and by our devices, for the same forced tokens.

llama.cpp logs to standard output and may end the process, so it runs as a process of its own:
`python -m tests.support.llama_cpp FILE KV_TYPE N_FORCED [LORA=SCALE ...]`, the sequences on standard input;
with 0 forced tokens, it gives embeddings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import numpy.typing as npt

from ggmlb import DType
from ggmlb.models import TextModel

ROOT = Path(__file__).parents[2]

N_FORCED = 12
"""Tokens at the end of a sequence before each of which log-probabilities are compared, by default."""

N_BEST = 50
"""Tokens that are compared: the likeliest ones of the reference."""

N_SHOWN = 256
"""Likeliest tokens that llama.cpp tells; the reference's best are among them."""

N_CTX = 128

Floats = npt.NDArray[np.float64]

NONE: Mapping[Path, float] = {}


def llama_cpp_log_probs(
    path: Path,
    sequences: Sequence[Sequence[int]],
    n_vocab: int,
    kv_type: DType = DType.F16,
    n_forced: int = N_FORCED,
    adapters: Mapping[Path, float] = NONE,
) -> Floats:
    """Return llama.cpp's log-probabilities before each forced token; NaN for those that it does not tell.

    It tells those of the likeliest tokens, and of the forced one.

    Returns:
        Shape `(n_sequences, n_forced, n_vocab)`.

    Raises:
        RuntimeError: llama.cpp ended without a result; carries the end of its log.
    """
    answer = _answer(path, sequences, kv_type, n_forced, adapters)
    found = np.full((len(sequences), n_forced, n_vocab), np.nan)
    for i, steps in enumerate(answer):
        for j, (ids, values) in enumerate(steps):
            found[i, j, ids] = values
    return found


def llama_cpp_embeddings(path: Path, sequences: Sequence[Sequence[int]]) -> list[Floats]:
    """Return llama.cpp's embedding of each sequence, pooled as the file says; of each token for `none`.

    Raises:
        RuntimeError: llama.cpp ended without a result; carries the end of its log.
    """
    return [np.array(rows) for rows in _answer(path, sequences, DType.F16, 0, NONE)]


def _answer(
    path: Path,
    sequences: Sequence[Sequence[int]],
    kv_type: DType,
    n_forced: int,
    adapters: Mapping[Path, float],
) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.llama_cpp", str(path), str(int(kv_type)), str(n_forced)]
        + [f"{file}={scale}" for file, scale in adapters.items()],
        input=json.dumps([list(map(int, s)) for s in sequences]),
        capture_output=True,
        text=True,
        errors="replace",
        cwd=ROOT,
        check=False,
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith("[[[")]
    if not answers:
        raise RuntimeError(f"llama.cpp gave no result (exit {done.returncode}): {done.stderr[-2000:]}")
    return json.loads(answers[-1])


def log_probs(logits: npt.NDArray[np.float32]) -> Floats:
    """Return the natural logarithms of the probabilities of each row of logits."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


def our_log_probs(
    path: Path, sequences: Sequence[Sequence[int]], adapters: Mapping[Path, float] = NONE, **options: Any
) -> Floats:
    """As `llama_cpp_log_probs`, by a `TextModel` with these options: a prompt, then token by token."""
    found = []
    with TextModel(path, n_ctx=N_CTX, **options) as model:
        for file, scale in adapters.items():
            model.load_adapter(file, scale)
        for sequence in sequences:
            rows: list[npt.NDArray[np.float32]] = []
            forced = iter(sequence[-N_FORCED:])

            def force(
                _: object, logits: npt.NDArray[np.float32], forced: Any = forced, rows: Any = rows
            ) -> npt.NDArray[np.float32]:
                rows.append(logits.copy())
                chosen = np.zeros_like(logits)
                chosen[next(forced)] = 1
                return chosen

            model.generate(
                sequence[:-N_FORCED],
                max_tokens=N_FORCED,
                temperature=0,
                ignore_eos=True,
                logits_processor=force,
            )
            found.append(log_probs(np.array(rows)))
    return np.array(found)


def float32_log_probs(
    path: Path, sequences: Sequence[Sequence[int]], adapters: Mapping[Path, float] = NONE
) -> Floats:
    """As `our_log_probs`, by the CPU in float32, all tokens of a sequence at once."""
    with TextModel(path, ["CPU"], n_ctx=N_CTX, kv_type="f32") as model:
        for file, scale in adapters.items():
            model.load_adapter(file, scale)
        return np.array([log_probs(model.logits(list(s[:-1]))[-N_FORCED:]) for s in sequences])


def distances(found: Floats, reference: Floats) -> Floats:
    """Return the distances of the log-probabilities of the reference's `N_BEST` tokens.

    Returns:
        Shape `(n_sequences, N_FORCED, N_BEST)`; NaN for those that llama.cpp does not tell.
    """
    best = np.argsort(-reference, axis=-1)[..., :N_BEST]
    return np.abs(np.take_along_axis(found - reference, best, axis=-1))


def n_disagreeing(found: Floats, llama_cpp: Floats, reference: Floats, least: float = 0.5) -> int:
    """Return how often the likeliest token is not llama.cpp's, though its two best differ by more.

    Where llama.cpp's own rounding made it choose another one than float32 does, or made the two differ by
    more than they do in float32, nothing is counted.
    """
    known = np.where(np.isnan(llama_cpp), -np.inf, llama_cpp)
    second, first = np.sort(known, axis=-1)[..., -2:].transpose(2, 0, 1)
    theirs = known.argmax(axis=-1)
    second_best, best = np.sort(reference, axis=-1)[..., -2:].transpose(2, 0, 1)
    is_sure = np.minimum(first - second, best - second_best) > least
    is_sure &= theirs == reference.argmax(axis=-1)
    return int((is_sure & (theirs != found.argmax(axis=-1))).sum())


def _main(
    path: str, kv_type: int, n_forced: int, adapters: Sequence[str], sequences: Sequence[Sequence[int]]
) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = N_CTX
    params.cache_type_k = params.cache_type_v = kv_type
    params.n_parallel = 1
    # Threads of it that wait for one another spin, which takes long where others compute.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    loras = (adapter.rpartition("=") for adapter in adapters)
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(file, float(scale)) for file, _, scale in loras]
    params.verbosity = 0
    params.embedding = not n_forced
    server = xllamacpp.Server(params)
    found: list[Any] = []
    for sequence in sequences if not n_forced else ():
        # Its own method takes no file whose pooling type is none.
        asked = Request(
            f"{server.listening_address}/embedding", json.dumps({"content": list(sequence)}).encode()
        )
        with urlopen(asked) as answer:
            found.append(json.load(answer)[0]["embedding"])
    for sequence in sequences if n_forced else ():
        steps = []
        for n in range(len(sequence) - n_forced, len(sequence)):
            # The bias makes it choose the forced token, because it tells no probabilities for one that ends
            # the text or is a part of a character. Those that it tells are without the bias.
            answer = server.handle_completions(
                {
                    "prompt": list(sequence[:n]), "n_predict": 1, "temperature": 0, "n_probs": N_SHOWN,
                    "cache_prompt": True, "logit_bias": [[sequence[n], 1e4]],
                }
            )  # fmt: skip
            content = answer["choices"][0]["logprobs"]["content"]
            top = [*content[0]["top_logprobs"], *content]  # the likeliest ones, and the forced one
            steps.append(([t["id"] for t in top], [t["logprob"] for t in top]))
        found.append(steps)
    print(flush=True)
    print(json.dumps(found), flush=True)
    os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:], json.load(sys.stdin))
