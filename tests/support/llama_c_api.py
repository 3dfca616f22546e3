"""llama.cpp of PyPI's xllamacpp (ggml 0.26) by its C API: unlike its Python API, calls release the GIL."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]


class ModelParams(C.Structure):
    """`struct llama_model_params`."""

    _fields_ = [
        ("devices", C.c_void_p), ("overrides", C.c_void_p), ("n_gpu_layers", C.c_int32),
        ("split_mode", C.c_int), ("load_mode", C.c_int), ("lazy_mode", C.c_int), ("main_gpu", C.c_int32),
        ("tensor_split", C.c_void_p), ("callback", C.c_void_p), ("callback_data", C.c_void_p),
        ("kv_overrides", C.c_void_p), ("flags", C.c_bool * 6), ("rest", C.c_char * 256),
    ]  # fmt: skip


class ContextParams(C.Structure):
    """`struct llama_context_params`."""

    _fields_ = [
        *((n, C.c_uint32) for n in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq")),
        ("n_outputs_max", C.c_uint32), ("n_outputs_max_per_seq", C.c_uint32), ("n_threads", C.c_int32),
        ("n_threads_batch", C.c_int32),
        *((n, C.c_int) for n in ("ctx_type", "rope_scaling", "pooling", "attention", "flash_attn")),
        *((f"rope_{i}", C.c_float) for i in range(6)), ("yarn_orig_ctx", C.c_uint32), ("defrag", C.c_float),
        ("cb_eval", C.c_void_p), ("cb_eval_data", C.c_void_p), ("type_k", C.c_int), ("type_v", C.c_int),
        ("moe_cache_size", C.c_size_t), ("abort", C.c_void_p), ("abort_data", C.c_void_p),
        ("embeddings", C.c_bool), ("offload_kqv", C.c_bool), ("no_perf", C.c_bool), ("op_offload", C.c_bool),
        ("rest", C.c_char * 256),
    ]  # fmt: skip


class Batch(C.Structure):
    """`struct llama_batch`."""

    _fields_ = [
        ("n_tokens", C.c_int32), ("token", C.c_void_p), ("embd", C.c_void_p), ("pos", C.c_void_p),
        ("n_seq_id", C.c_void_p), ("seq_id", C.c_void_p), ("logits", C.c_void_p),
    ]  # fmt: skip


FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "backend_init": (None,),
    "log_set": (None, C.c_void_p, C.c_void_p),
    "model_default_params": (ModelParams,),
    "context_default_params": (ContextParams,),
    "model_load_from_file": (C.c_void_p, C.c_char_p, ModelParams),
    "init_from_model": (C.c_void_p, C.c_void_p, ContextParams),
    "model_get_vocab": (C.c_void_p, C.c_void_p),
    "model_n_embd": (C.c_int32, C.c_void_p),
    "vocab_n_tokens": (C.c_int32, C.c_void_p),
    "tokenize": (C.c_int32, C.c_void_p, C.c_char_p, C.c_int32, C.c_void_p, C.c_int32, C.c_bool, C.c_bool),
    "decode": (C.c_int32, C.c_void_p, Batch),
    "encode": (C.c_int32, C.c_void_p, Batch),
    "get_logits_ith": (C.POINTER(C.c_float), C.c_void_p, C.c_int32),
    "get_embeddings_seq": (C.POINTER(C.c_float), C.c_void_p, C.c_int32),
    "get_memory": (C.c_void_p, C.c_void_p),
    "memory_clear": (None, C.c_void_p, C.c_bool),
    "state_save_file": (C.c_bool, C.c_void_p, C.c_char_p, C.c_void_p, C.c_size_t),
    "state_load_file": (C.c_bool, C.c_void_p, C.c_char_p, C.c_void_p, C.c_size_t, C.c_void_p),
    "free": (None, C.c_void_p),
    "model_free": (None, C.c_void_p),
}


def library_path() -> Path:
    """Return the extension module that holds llama.cpp and ggml."""
    spec = find_spec("xllamacpp")
    assert spec is not None and spec.submodule_search_locations
    return next(Path(spec.submodule_search_locations[0]).glob("xllamacpp*.so"))


class Llama:
    """A model with a context.

    Args:
        model: The GGUF file.
        n_gpu_layers: Layers for the devices that are not CPUs; 0 for none.
        n_seq_max: Sequences at a time.
        shares: Proportions of the layers of each such device.
        embeddings: Whether to compute embeddings instead of logits.
        n_threads: Threads of the CPU.
        load_mode: 1 maps the file, 0 reads it.

    Attributes:
        log: What llama.cpp and ggml logged.
    """

    def __init__(
        self,
        model: Path,
        n_gpu_layers: int = 99,
        n_seq_max: int = 1,
        shares: Sequence[float] = (),
        embeddings: bool = False,
        n_threads: int = 2,
        n_ctx: int = 256,
        load_mode: int | None = None,
    ) -> None:
        library = C.CDLL(str(library_path()))
        self.c: dict[str, Callable[..., Any]] = {}
        for name, (result, *arguments) in FUNCTIONS.items():
            function = getattr(library, f"llama_{name}")
            function.restype, function.argtypes = result, arguments
            self.c[name] = function
        self.log: list[str] = []
        self._log = C.CFUNCTYPE(None, C.c_int, C.c_char_p, C.c_void_p)(
            lambda level, text, _: self.log.append(f"{level}:{text.decode(errors='replace')}")
        )
        self.c["log_set"](C.cast(self._log, C.c_void_p), None)
        self.c["backend_init"]()
        params = self.c["model_default_params"]()
        params.n_gpu_layers = n_gpu_layers
        if load_mode is not None:
            params.load_mode = load_mode
        self._shares = (C.c_float * 16)(*shares)
        if shares:
            params.tensor_split = C.addressof(self._shares)
        self._context = None
        self._model = self.c["model_load_from_file"](str(model).encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp did not load {model}: {self.log[-6:]}")
        params = self.c["context_default_params"]()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, 64, 64, n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        params.embeddings = embeddings
        self._context = self.c["init_from_model"](self._model, params)
        if not self._context:
            raise RuntimeError(f"llama.cpp made no context: {self.log[-6:]}")
        self._vocab = self.c["model_get_vocab"](self._model)
        self.n_vocab = self.c["vocab_n_tokens"](self._vocab)

    def tokens(self, text: str) -> list[int]:
        """Return a text's tokens."""
        raw, found = text.encode(), (C.c_int32 * 256)()
        n = self.c["tokenize"](self._vocab, raw, len(raw), found, 256, True, True)
        return list(found[:n])

    def decode(self, sequences: Sequence[Sequence[int]], start: int = 0, call: str = "decode") -> int:
        """Compute tokens of sequences 0, 1, ... from a position on; return llama.cpp's status."""
        flat = [(t, start + i, s) for s, tokens in enumerate(sequences) for i, t in enumerate(tokens)]
        n = len(flat)
        token, pos, seq = ((C.c_int32 * n)(*numbers) for numbers in zip(*flat, strict=True))
        one, wanted = (C.c_int32 * n)(*[1] * n), (C.c_int8 * n)(*[1] * n)
        pointers = (C.c_void_p * n)(*(C.addressof(seq) + 4 * i for i in range(n)))
        batch = Batch(n, *(C.addressof(a) if a is not None else None for a in (token, None, pos)))
        batch.n_seq_id, batch.seq_id, batch.logits = (C.addressof(a) for a in (one, pointers, wanted))
        status: int = self.c[call](self._context, batch)
        return status

    def logits(self, i: int = -1) -> Logits:
        """Return the logits of the `i`-th token of the last batch."""
        return np.ctypeslib.as_array(self.c["get_logits_ith"](self._context, i), (self.n_vocab,)).copy()

    def embedding(self, sequence: int) -> Logits:
        """Return the embedding of a sequence of the last batch."""
        n = self.c["model_n_embd"](self._model)
        return np.ctypeslib.as_array(self.c["get_embeddings_seq"](self._context, sequence), (n,)).copy()

    def generate(self, prompt: Sequence[int], n: int, start: int = 0) -> tuple[list[int], Logits]:
        """Return `n` greedy tokens after a prompt, and the logits before each."""
        found: list[int] = []
        rows: list[Logits] = []
        tokens = list(prompt)
        for _ in range(n):
            if status := self.decode([tokens], start):
                raise RuntimeError(f"llama_decode returned {status}: {self.log[-6:]}")
            start += len(tokens)
            rows.append(self.logits())
            tokens = [int(rows[-1].argmax())]
            found += tokens
        return found, np.array(rows)

    def forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Logits:
        """Return the logits before each of the tokens that follow a prompt."""
        rows, start = [], 0
        for part in (prompt, *([token] for token in tokens[:-1])):
            if status := self.decode([part], start):
                raise RuntimeError(f"llama_decode returned {status}: {self.log[-6:]}")
            start += len(part)
            rows.append(self.logits())
        return np.array(rows)

    def clear(self) -> None:
        """Forget all sequences."""
        self.c["memory_clear"](self.c["get_memory"](self._context), True)

    def save(self, path: Path) -> bool:
        """Write the state of the context."""
        return bool(self.c["state_save_file"](self._context, str(path).encode(), None, 0))

    def load(self, path: Path) -> bool:
        """Read a state of a context."""
        n = C.c_size_t()
        return bool(self.c["state_load_file"](self._context, str(path).encode(), None, 0, C.addressof(n)))

    def close(self) -> None:
        """Free the context, then the model."""
        if self._context:
            self.c["free"](self._context)
        self.c["model_free"](self._model)
        self._context = self._model = None
