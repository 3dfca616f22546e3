"""Session: a sequence whose KV cache stays between calls, for conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np

from ggmlb import DType, save_gguf
from ggmlb.core.arguments import checked_methods
from ggmlb.core.errors import AllocationError, GraphError, ModelError, readable_size
from ggmlb.inspect.html import pre
from ggmlb.interface.memory_table import device_of
from ggmlb.models.gguf import GgufFile
from ggmlb.models.text.generation import Generation, n_equal
from ggmlb.models.text.sampling import Options, OptionValues, changed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ggmlb.models.gguf.vocabulary import Vocabulary
    from ggmlb.models.text.generation import Engine
    from ggmlb.models.text.model import Prompt

TYPE = "ggmlb session"
KEY = "ggmlb.session.model"
"""The fingerprint of the model, in a state's metadata."""

N_SAMPLES = 8
SAMPLE = 512
"""Samples of each weight in a fingerprint, and the bytes of one."""


@checked_methods
class Session:
    """Generation that reuses its KV cache: only tokens after the common prefix are computed.

    Made by `TextModel.session`; a context manager, which closes it. Logits differ from those of
    `TextModel.generate` by rounding only. With recurrent layers it continues from the states after all cached
    tokens, or from those of an earlier prompt, 8 tokens before its end, if the prompt starts with these
    tokens and has more. Use of a session by a callback or another thread while it generates is a GraphError.

    Attributes:
        tokens: Tokens in the KV cache, or in the recurrent states.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Callable[[], Vocabulary],
        tokens_of: Callable[[Prompt], list[int]],
        fingerprint: Callable[[], str],
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._tokens_of = tokens_of
        self._fingerprint = fingerprint
        self._sequence = engine.new_sequence()
        self._is_busy = False
        self.tokens: list[int] = []

    def __repr__(self) -> str:
        memory = self._engine.memory
        devices = dict.fromkeys(device_of(b.buft) for buffer in memory.buffers for b in buffer.allocations)
        return (
            f"<Session: {len(self.tokens):,} of {memory.n_cells:,} tokens of context, "
            f"{memory} of {readable_size(memory.nbytes)} on "
            f"{', '.join(devices)}>"
        )

    def _repr_html_(self) -> str:
        return pre(repr(self))

    def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        on_token: Callable[[str], object] | None = None,
        **changes: Unpack[OptionValues],
    ) -> Generation:
        """Generate text after `prompt`, the whole conversation; its cached beginning is not recomputed."""
        options = changed(options, changes)
        tokens = self._tokens_of(prompt)
        self._engine.check_fits(tokens)
        with self._alone("generate"):
            n_cached = self._cut(n_equal(self.tokens, tokens, len(tokens) - 1))
            del self.tokens[n_cached:]
            request = self._engine.request(tokens, options, self._vocabulary(), self._sequence, n_cached)
            try:
                for _ in self._engine.run([request]):
                    if on_token is not None and (piece := request.take()):
                        on_token(piece)
            finally:
                self.tokens = request.tokens[: self._cut(request.n_done)]  # fewer if a batch failed
        return request.result

    def _cut(self, n: int) -> int:
        """Keep the first `n` tokens; return the number of tokens that stay."""
        with self._engine.lock:
            return self._engine.memory.remove(self._sequence, n)

    @contextmanager
    def _alone(self, call: str) -> Iterator[None]:
        """Context manager that locks the session; another call raises."""
        with self._engine.lock:
            if self._is_busy:
                raise GraphError(
                    f"session.{call}: the session is in use by another thread, or by the call that runs "
                    "this callback; wait for its end, or use another session"
                )
            self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def save_state(self, path: str | PathLike[str]) -> None:
        """Save tokens and KV cache to a file for `load_state`; on an error, an existing file stays.

        Raises:
            ModelError: The file cannot be written.
        """
        with self._alone("save_state"):
            with self._engine.lock:
                state = self._engine.memory.save(self._sequence)
            state["tokens"] = np.array(self.tokens, np.int32)
            del state["positions"]  # each token's place
            tensors = {name: a.view(np.int8) if a.dtype == np.uint8 else a for name, a in state.items()}
            save_gguf(path, {"general.type": TYPE, KEY: self._fingerprint()}, tensors)

    def load_state(self, path: str | PathLike[str]) -> None:
        """Load a file of `save_state`; on an error, the session stays as it is.

        Raises:
            ModelError: The file is missing, damaged, or of another model.
            AllocationError: The cache has too few free cells.
        """
        with self._alone("load_state"):
            file = GgufFile(path)
            if file.metadata.text("general.type", "") != TYPE or "tokens" not in file:
                raise ModelError(f"{path} is no saved session; give a file that save_state wrote")
            if file.metadata.text(KEY, "") != self._fingerprint():
                raise ModelError(
                    f"{path} is a state of another model, or of one with another context size; load it into "
                    "the model that it was saved from"
                )
            tokens = file.array("tokens")
            if tokens.dtype != np.int32 or tokens.ndim != 1 or (tokens.size and tokens.min() < 0):
                raise ModelError(f"{path} is damaged: its tokens are no token ids; save it again")
            state = {name: file.blocks(name) for name in file if file[name].dtype is DType.I8}
            state["positions"] = np.arange(tokens.size, dtype=np.int32)
            memory = self._engine.memory
            with self._engine.lock:
                memory.check(state)
                if tokens.size > memory.n_cells or not memory.fits({self._sequence: tokens.size}):
                    raise AllocationError(
                        f"load_state: {tokens.size} tokens do not fit beside other sequences; end some "
                        "(Session.close), or open the model with a larger n_ctx"
                    )
                self._cut(0)
                self.tokens = []  # in case the device fails
                memory.load(self._sequence, state)
                self.tokens = tokens.tolist()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the session's tokens from the KV cache."""
        with self._alone("close"):
            self._cut(0)
            self.tokens = []


def fingerprint(file: GgufFile) -> str:
    """Return a hash that identifies a model file: of its headers, and of samples of each weight."""
    found = sha256()
    for number, part in enumerate(file.parts):
        tensors = [tensor for tensor in file.values() if tensor.part == number]
        found.update(part.view[: min((t.offset for t in tensors), default=len(part.view))])
        for tensor in tensors:
            step = max(tensor.nbytes // N_SAMPLES, 1)
            for start in range(tensor.offset, tensor.offset + tensor.nbytes, step):
                found.update(part.view[start : start + min(step, SAMPLE)])
    return found.hexdigest()
