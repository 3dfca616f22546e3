"""Session: a sequence that keeps keys and values between calls, for conversations."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from ggmlb.core.errors import ModelError
from ggmlb.models.mapped_file import failing
from ggmlb.models.text.generation import Generation
from ggmlb.models.text.sampling import Options, changed

if TYPE_CHECKING:
    from ggmlb.models.gguf.vocabulary import Vocabulary
    from ggmlb.models.text.generation import Engine
    from ggmlb.models.text.model import Prompt

FORMAT = "ggmlb state 1"


class Session:
    """Generation for prompts with a common beginning, of which only the new tokens are computed.

    Made by `TextModel.session`. Logits differ from those of `TextModel.generate` by rounding only. A
    recurrent model (Mamba) goes on only where the prompt begins with all tokens that are kept, and has more.

    Attributes:
        tokens: Tokens whose keys and values, or states, are kept.
    """

    def __init__(
        self,
        engine: Engine,
        vocabulary: Callable[[], Vocabulary],
        tokens_of: Callable[[Prompt], list[int]],
    ) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._tokens_of = tokens_of
        self._sequence = engine.new_sequence()
        self.tokens: list[int] = []

    def generate(
        self,
        prompt: Prompt,
        options: Options | None = None,
        on_token: Callable[[str], object] | None = None,
        **changes: Any,
    ) -> Generation:
        """Generate text after a prompt; as `TextModel.generate`.

        Args:
            prompt: The whole of it, what was there before included.
            options: As there.
            on_token: As there.
            changes: As there.

        Raises:
            Error: As there.
        """
        memory, options = self._engine.memory, changed(options, changes)
        tokens = self._tokens_of(prompt)
        self._engine.check_fits(tokens)
        n_kept = min(len(tokens) - 1, _n_equal(self.tokens, tokens))
        n_kept = memory.remove(self._sequence, n_kept)
        del self.tokens[n_kept:]
        request = self._engine.request(tokens, options, self._vocabulary(), self._sequence, n_kept)
        try:
            for _ in self._engine.run([request]):
                if on_token is not None and (piece := request.take()):
                    on_token(piece)
        finally:
            n_kept = memory.remove(self._sequence, request.n_done)  # fewer, where a batch failed
            self.tokens = request.tokens[:n_kept]
        return request.result

    def save_state(self, path: str | PathLike[str]) -> None:
        """Write tokens, keys and values to a file, for `load_state`.

        Raises:
            ModelError: The file cannot be written.
        """
        state: dict[str, Any] = self._engine.memory.save(self._sequence)
        state |= {"format": np.array(FORMAT), "tokens": np.array(self.tokens, np.int32)}
        with (
            failing(f"cannot write {path}", OSError, cure="give another path"),
            Path(path).open("wb") as file,
        ):
            np.savez(file, **state)

    def load_state(self, path: str | PathLike[str]) -> None:
        """Read what `save_state` wrote.

        Raises:
            ModelError: The file is missing, damaged, or of another model.
            AllocationError: Too few cells are free.
        """
        with (
            failing(f"{path} is no state of a session", OSError, ValueError, KeyError, BadZipFile, EOFError),
            Path(path).open("rb") as raw,
            np.load(raw, allow_pickle=False) as file,
        ):
            state = dict(file)
        tokens = state.pop("tokens", np.zeros(0))
        if str(state.pop("format", "")) != FORMAT or "positions" not in state:
            raise ModelError(f"{path} is no state of a session; give a file that save_state wrote")
        positions = state["positions"]
        if tokens.dtype != np.int32 or positions.dtype != np.int32 or tokens.shape != positions.shape:
            raise ModelError(f"{path} is damaged: {tokens.shape} tokens have {positions.shape} positions")
        if (tokens.size and tokens.min() < 0) or not np.array_equal(positions, np.arange(tokens.size)):
            raise ModelError(f"{path} is damaged: it has tokens or positions that no sequence has")
        self._engine.memory.remove(self._sequence)
        self._engine.memory.load(self._sequence, state)
        self.tokens = tokens.tolist()

    def close(self) -> None:
        """Free the cells of the sequence."""
        self._engine.memory.remove(self._sequence)
        self.tokens = []


def _n_equal(a: list[int], b: list[int]) -> int:
    """The number of tokens that two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
