"""Tracing of a language model: values of nodes by name, and the logit lens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.inspect.html import Raw, escape, table
from ggmlb.models.text.decoder import Array, Floats, Token
from ggmlb.models.text.generation import Engine
from ggmlb.models.text.graph import ATTENTION

N_SHOWN = 12
"""Most tokens of a prompt in a picture: the last ones."""

N_LAYERS = 4
"""Layers that are traced together, which bounds the memory."""


def matching(patterns: str | Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the names in `known` that match any pattern (with `*`, `?`, `[...]`), in the order of `known`.

    Raises:
        ArgumentError: A pattern matches no name.
    """
    found = set()
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        some = [name for name in known if fnmatchcase(name, pattern)]
        if not some:
            forms = dict.fromkeys(re.sub(r"^blk\.\d+\.", "blk.*.", name) for name in known)
            layers = {name.split(".")[1] for name in known if name.startswith("blk.")}
            near = did_you_mean(re.sub(r"^blk\.\d+\.", "blk.*.", pattern), forms)
            raise ArgumentError(
                f"trace: no node of this model with {len(layers)} layers has the name {pattern!r}{near}"
            )
        found.update(some)
    return [name for name in known if name in found]


def traced_parts(engine: Engine, tokens: Sequence[int], names: Sequence[str]) -> Iterator[dict[str, Array]]:
    """Compute a prompt in batches; yield the values of the nodes `names` for each batch."""

    def trace(batch: Sequence[Token]) -> dict[str, Array]:
        found = engine.decoder.trace(batch, names)
        if not all(map(_is_finite, found.values())):
            engine.memory.note_nan()
        return found

    return engine.parts(tokens, trace)


def first_not_finite(engine: Engine, tokens: Sequence[int]) -> tuple[str, str] | None:
    """Compute a prompt; return the first node with NaN or infinity, and its device, or `None`."""
    for names in groups(engine.decoder.names()):
        with engine.lock:
            values = traced(engine, tokens, names)
            for name in names:
                if not _is_finite(values[name]):
                    return name, engine.decoder.device_of(name)
    return None


def _is_finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())


def groups(names: Sequence[str]) -> Iterator[list[str]]:
    """Yield node names in groups of a few layers (`N_LAYERS`), without attention weights."""
    group: list[str] = []
    layers: set[str] = set()
    for name in names:
        layer = name.rpartition(".")[0]
        if layer not in layers and len(layers) == N_LAYERS:
            yield group
            group, layers = [], set()
        layers.add(layer)
        if not name.endswith(ATTENTION):
            group.append(name)
    yield group


def traced(engine: Engine, tokens: Sequence[int], names: Sequence[str]) -> dict[str, Array]:
    """Compute a prompt; return the values of the nodes `names` for all its tokens."""
    parts = list(traced_parts(engine, tokens, names))
    return {
        name: _joined([part[name] for part in parts], len(tokens))
        if name.endswith(ATTENTION)
        else np.concatenate([part[name] for part in parts])
        for name in names
    }


def _joined(parts: Sequence[Array], n_tokens: int) -> Array:
    """Join attention weights along the tokens; those of tokens that come later are 0."""
    wide = [np.pad(part, ((0, 0), (0, 0), (0, n_tokens - part.shape[2]))) for part in parts]
    return np.concatenate(wide, axis=1)


class LogitLens:
    """The logits of the hidden states after layers, as if each layer were the last.

    In a notebook, a table of the most likely token by layer and token of the prompt, darker by probability.

    Attributes:
        tokens: The prompt.
        layers: The layers.
        logits: Shape `(n_layers, n_tokens, n_vocab)`.
    """

    def __init__(
        self, tokens: Sequence[int], layers: Sequence[int], logits: Floats, text_of: Callable[[int], str]
    ) -> None:
        self.tokens = list(tokens)
        self.layers = list(layers)
        self.logits = logits
        self._text_of = text_of

    def best(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return the most likely tokens and their probabilities, each of shape `(n_layers, n_tokens)`."""
        ids = self.logits.argmax(axis=-1)
        most = self.logits.max(axis=-1, keepdims=True)
        return ids, 1 / np.exp(self.logits - most).sum(axis=-1)

    def texts(self) -> list[list[str]]:
        """Return the texts of the most likely tokens, by layer and token of the prompt."""
        return [[self._text_of(int(token)) for token in row] for row in self.best()[0]]

    def __repr__(self) -> str:
        return f"<LogitLens: {len(self.layers)} layers, {len(self.tokens)} tokens>"

    def _repr_html_(self) -> str:
        ids, shares = self.best()
        start = max(0, len(self.tokens) - N_SHOWN)
        head = [self._text_of(token) for token in self.tokens[start:]]
        rows = [
            [layer, *(self._cell(int(i), float(p)) for i, p in zip(row[start:], share[start:], strict=True))]
            for layer, row, share in zip(self.layers, ids, shares, strict=True)
        ]
        return table(("layer", *head), rows[::-1], n_rows=len(rows))

    def _cell(self, token: int, share: float) -> Raw:
        text = escape(self._text_of(token).replace("\n", "\u21b5").strip(" ") or "\u2423")
        return Raw(
            f'<span title="{100 * share:.0f} %" style="background:rgba(64,128,224,{0.7 * share:.2f})">'
            f"{text}</span>"
        )


def lens(
    engine: Engine, tokens: Sequence[int], layers: Sequence[int], text_of: Callable[[int], str]
) -> LogitLens:
    """Return logits of a prompt's hidden states after each of `layers`; `text_of` gives a token's text."""
    states = traced(engine, tokens, [f"blk.{layer}.out" for layer in layers])
    with engine.lock:
        logits = engine.decoder.lens(np.concatenate(list(states.values())))
    return LogitLens(tokens, layers, logits.reshape(len(layers), len(tokens), -1), text_of)
