"""Comparison of two models: errors of a quantisation, or the first difference between devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ggmlb.core.errors import ArgumentError
from ggmlb.inspect.compare import errors, first_above
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.decoder import Array
from ggmlb.models.text.generation import Engine
from ggmlb.models.text.inside import groups, traced, traced_parts

LIMIT = 0.05
"""Default NMSE above which nodes of two devices differ; activations rounded to 8 bits stay below it."""


@dataclass(frozen=True)
class Comparison:
    """Errors of a model against a reference model over the tokens of a text.

    Attributes:
        n_tokens: Tokens that were computed.
        layers: For each layer, the NMSE of the hidden states after it: the mean over tokens of the squared
            difference over the reference's square.
        divergences: Of each token's predictions, the Kullback-Leibler divergence from the reference's [nat].
        same_top: Share of tokens after which both models find the same next token most likely.
    """

    n_tokens: int
    layers: list[float]
    divergences: npt.NDArray[np.float64]
    same_top: float

    def divergence(self, share: float = 0.5) -> float:
        """Return the quantile `share` (0 to 1) of the tokens' KL divergences [nat]; 0.5 is the median."""
        return float(np.quantile(self.divergences, share))


def compare(
    reference: Engine,
    other: Engine,
    tokens: Sequence[int],
    config: TextConfig,
    n_ctx: int,
    first: int | None,
    progress: Callable[[int, int], None] | None,
) -> Comparison:
    """Compare two models over a text; `first` (BOS), if not `None`, replaces each chunk's first token."""
    layers = [f"blk.{i}.out" for i in range(config.n_layer)]
    sums = np.zeros(config.n_layer)
    divergences: list[npt.NDArray[np.float64]] = []
    n_same = n_done = 0
    for start in range(0, len(tokens), n_ctx):
        chunk = list(tokens[start : start + n_ctx])
        if first is not None:
            chunk[0] = first
        pairs = zip(
            *(traced_parts(engine, chunk, [*layers, "logits"]) for engine in (reference, other)), strict=True
        )
        for ours, theirs in pairs:
            for i, name in enumerate(layers):
                a, b = (found[name].astype(np.float64) for found in (ours, theirs))
                sums[i] += (np.square(b - a).sum(axis=-1) / np.square(a).sum(axis=-1)).sum()
            logs = _log_probs(ours["logits"]), _log_probs(theirs["logits"])
            divergences.append((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1))
            n_same += int((logs[0].argmax(axis=-1) == logs[1].argmax(axis=-1)).sum())
        n_done += len(chunk)
        if progress is not None:
            progress(n_done, len(tokens))
    return Comparison(n_done, (sums / n_done).tolist(), np.concatenate(divergences), n_same / n_done)


def _log_probs(logits: Array) -> npt.NDArray[np.float64]:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
    return x


class NodeDifference(NamedTuple):
    """Errors of a node's values in one model against those in the reference model.

    Attributes:
        name: Name of the node, as in a trace.
        nmse: Mean squared difference over the mean square of the reference's values.
        max_error: The largest difference of two elements.
        token: Index of the token with the largest difference.
        element: Index of the element in the token's values.
        values: Both values, the reference's first.
    """

    name: str
    nmse: float
    max_error: float
    token: int
    element: int
    values: tuple[float, float]


@dataclass(frozen=True)
class TokenDifference:
    """The first token at which the greedy generations of two models differ.

    Attributes:
        place: Number of equal tokens before it.
        tokens: Both tokens, the reference's first.
        texts: Their texts; empty for the end of the text.
        margins: Logit of the reference's token minus that of the other, in the reference and in the other.
        layer: The layer that caused it: the first one after which the reference's hidden states, put in
            place of the other's, make the other choose the reference's token; `None`: the output did.
    """

    place: int
    tokens: tuple[int, int]
    texts: tuple[str, str]
    margins: tuple[float, float]
    layer: int | None


@dataclass(frozen=True)
class Differences:
    """The first differences of two models; see `TextModel.differences`.

    Attributes:
        limit: The NMSE above which a node differs.
        nodes: Differences of the nodes in order, up to the layers of the first node above the limit.
        token: The first token that differs; `None` if none does, or none were generated.
    """

    limit: float
    nodes: list[NodeDifference]
    token: TokenDifference | None = None

    @property
    def first(self) -> NodeDifference | None:
        """The first node with an NMSE above the limit; `None` if there is none."""
        return first_above(self.nodes, self.limit)


def node_differences(
    reference: Engine, other: Engine, tokens: Sequence[int], limit: float
) -> list[NodeDifference]:
    """Compare nodes of two models in order; stop after the group of layers where an NMSE is above `limit`."""
    found: list[NodeDifference] = []
    for names in groups(reference.decoder.names()):
        values = [_sorted(traced(engine, tokens, names)) for engine in (reference, other)]
        found += [_difference(name, values[0][name], values[1][name]) for name in names]
        if first_above(found, limit) is not None:
            break
    return found


def _sorted(values: dict[str, Array]) -> dict[str, Array]:
    """Sort the values of a token's experts by expert number, as `top_k` leaves the order open."""
    layers = [name.removesuffix("ffn_chosen") for name in values if name.endswith(".ffn_chosen")]
    for layer in layers:
        order = np.argsort(values[layer + "ffn_chosen"], axis=1)
        for part in ("ffn_chosen", "ffn_gate_exps", "ffn_up_exps", "ffn_act", "ffn_down_exps"):
            found = values[layer + part]
            places = order.reshape(*order.shape, *(1,) * (found.ndim - 2))
            values[layer + part] = np.take_along_axis(found, places, axis=1)
    return values


def _difference(name: str, a: Array, b: Array) -> NodeDifference:
    nmse, largest = errors(a, b)
    apart = np.abs(b.astype(np.float64) - a).reshape(len(a), -1)
    token, element = np.unravel_index(int(np.nan_to_num(apart, nan=np.inf).argmax()), apart.shape)
    at = int(token), int(element)
    values = float(a.reshape(len(a), -1)[at]), float(b.reshape(len(b), -1)[at])
    return NodeDifference(name, nmse, largest, *at, values)


def token_difference(
    reference: Engine,
    other: Engine,
    tokens: Sequence[int],
    chosen: tuple[int, int],
    place: int,
    text_of: Callable[[int], str],
    n_layer: int,
) -> TokenDifference:
    """Find the first layer whose output from `reference` makes `other` choose the reference's next token.

    Args:
        reference: The model whose hidden states are right.
        other: The model that chooses another token.
        tokens: The prompt, and the tokens that both models generated after it.
        chosen: The next token of each model, the reference's first.
        place: Number of tokens that both models generated.
        text_of: Returns the text of a token.
        n_layer: Layers of each model.
    """
    names = [f"blk.{i}.out" for i in range(n_layer)]
    states = traced(reference, tokens, names)

    def margin(engine: Engine) -> float:
        logits = engine.each(tokens, engine.decoder.decode)[-1].astype(np.float64)
        return float(logits[chosen[0]] - logits[chosen[1]])

    def is_mended(layer: int) -> bool:
        if layer == n_layer - 1:
            with other.lock:
                last = other.decoder.lens(states[names[layer]][-1:])[0]
            return bool(last[chosen[0]] > last[chosen[1]])
        with other.decoder.changes.resuming(layer, states[names[layer]]):
            return margin(other) > 0

    margins = margin(reference), margin(other)
    found = next((layer for layer in range(n_layer) if is_mended(layer)), None)
    texts = text_of(chosen[0]), text_of(chosen[1])
    return TokenDifference(place, chosen, texts, margins, found)


def check_alike(a: TextConfig, b: TextConfig) -> None:
    """Raise an ArgumentError unless two models have equal numbers of layers and tokens, and equal widths.

    Raises:
        ArgumentError: The layers or vocabularies differ.
    """
    facts = [(c.name, c.n_layer, c.n_embd, c.n_vocab) for c in (a, b)]
    if facts[0] != facts[1]:
        sizes = ("{} of {} layers, {} elements, {} tokens".format(*fact) for fact in facts)
        raise ArgumentError(
            f"the models differ in more than their weights: {' and '.join(sizes)}; give "
            "two versions of one model"
        )
