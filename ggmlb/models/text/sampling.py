"""Sampling: the choice of the next token from logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from ggmlb.core.arguments import alias, checked_methods, named
from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.models.text.dry import Breakers, penalise_repetition

Floats = npt.NDArray[np.float32]

LogitsProcessor = Callable[[Sequence[int], Floats], Floats]
"""`processor(tokens, logits)`: the logits to sample from, given the tokens so far, prompt included."""
alias("LogitsProcessor", "Callable")

MIROSTAT_TOKENS = 100
"""Likeliest tokens from which Mirostat 1 estimates the distribution, as llama.cpp does."""

BLOCK = 64
"""Logits whose maximum is compared first in the search for the most likely tokens."""

N_BEST = 64
"""Most likely tokens that a device finds, for sampling from fewer than these."""

CANDIDATE = np.dtype([("logit", np.float32), ("id", np.int32)])
"""One of them: its logit, and its number."""


@named("Options(...)")
@checked_methods
@dataclass(frozen=True, slots=True)
class Options:
    """Options of generation; sampling applies its steps in this order, as llama.cpp does.

    Attributes:
        max_tokens: Most tokens to generate; -1: until the text ends or the context is full.
        logits_processor: `processor(tokens, logits)` returns the logits to sample from.
        grammar: Form of the text: a grammar in GBNF, or in llguidance's variant of Lark; needs llguidance.
        json_schema: Form of the text: a JSON schema, as an object or as JSON; `{}` is any JSON.
        logit_bias: Numbers added to the logits of tokens; -inf excludes a token.
        repeat_penalty: Positive logits of recent tokens are divided by this, negative ones multiplied.
        frequency_penalty: Subtracted from a token's logit for each time that it is recent.
        presence_penalty: Subtracted from the logits of recent tokens.
        repeat_last: Number of tokens that count as recent.
        dry_multiplier: DRY: tokens that would go on with a repetition of `n` tokens lose `dry_multiplier *
            dry_base ** (n - dry_allowed_length)` of their logits; 0: off.
        dry_base: See `dry_multiplier`; below 1: off.
        dry_allowed_length: Shortest repetition that is penalised [tokens].
        dry_penalty_last_n: Number of last tokens to search for repetitions; -1: all.
        dry_sequence_breakers: Texts that end a repetition.
        top_k: Sample only from the K most likely tokens; 0: no limit.
        typical_p: Sample only from the most typical tokens whose probabilities sum to this: those of which
            the information is nearest to the expected one.
        top_p: Sample only from the most likely tokens whose probabilities sum to this (nucleus sampling).
        min_p: Sample only from tokens with at least this fraction of the highest probability.
        xtc_probability: Probability with which all but the least likely of the tokens with probabilities of
            at least `xtc_threshold` are excluded.
        xtc_threshold: See `xtc_probability`; above 0.5: nothing is excluded.
        mirostat: 1 or 2: Mirostat of this version, which steers to a mean information per token, in place of
            all penalties and limits above; 0: off.
        mirostat_tau: The information that Mirostat steers to [bits].
        mirostat_eta: Its learning rate.
        temperature: Logits are divided by this; 0: the most likely token is taken.
        seed: Seed of the random numbers.
        stop: A text, or texts, that end the generation; they are not part of the result.
        ignore_eos: Whether to go on after the model's end-of-text token; a complete form ends the text still.
        logprobs: Number of most likely tokens whose log-probabilities are returned with each token.

    Raises:
        ArgumentError: A number is out of range, or a stop text is empty.
    """

    max_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    repeat_last: int = 64
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: Sequence[str] = ("\n", ":", '"', "*")
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    logit_bias: Mapping[int, float] | None = None
    grammar: str = ""
    json_schema: Mapping[str, Any] | str | None = None
    seed: int = 0
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False
    logprobs: int = 0
    logits_processor: LogitsProcessor | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("max_tokens", -1, 1 << 40), ("temperature", 0, 1e6), ("top_k", 0, 1 << 31), ("top_p", 0, 1),
            ("min_p", 0, 1), ("repeat_penalty", 1e-6, 1e6), ("repeat_last", 0, 1 << 31),
            ("frequency_penalty", -1e6, 1e6), ("presence_penalty", -1e6, 1e6), ("typical_p", 0, 1),
            ("xtc_probability", 0, 1), ("xtc_threshold", 0, 1), ("mirostat", 0, 2), ("mirostat_tau", 0, 1e6),
            ("mirostat_eta", 0, 1e6), ("dry_multiplier", 0, 1e6), ("dry_base", 0, 1e6),
            ("dry_allowed_length", 0, 1 << 31), ("dry_penalty_last_n", -1, 1 << 31),
            ("seed", 0, (1 << 64) - 1), ("logprobs", 0, 1 << 31),
        ):  # fmt: skip
            value = getattr(self, name)
            if not least <= value <= most:
                raise ArgumentError(f"{name} is {value!r}; give {least} to {most}")
        for token, bias in (self.logit_bias or {}).items():
            is_token = isinstance(token, int) and not isinstance(token, bool) and token >= 0
            if not is_token or not (-1e6 <= bias <= 1e6 or bias == -np.inf):
                raise ArgumentError(f"logit_bias has {token!r}: {bias!r}; give -1e6 to 1e6 by token, or -inf")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "dry_sequence_breakers"):
            if "" in (texts := getattr(self, name)):
                raise ArgumentError(f"{name} is {texts!r}; give texts that are not empty")

    @property
    def penalises(self) -> bool:
        """Whether logits of recent tokens are changed."""
        return (self.repeat_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)


class OptionValues(TypedDict, total=False):
    """Options as keywords, as in `generate(prompt, max_tokens=64)`; see `Options`."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last: int
    frequency_penalty: float
    presence_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: Sequence[str]
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    logit_bias: Mapping[int, float] | None
    grammar: str
    json_schema: Mapping[str, Any] | str | None
    seed: int
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int
    logits_processor: LogitsProcessor | None


def changed(options: Options | None, changes: OptionValues) -> Options:
    """Return a copy of options (the defaults if `None`), with those named in `changes` replaced.

    Raises:
        ArgumentError: There is no such option, or it is out of range.
    """
    known = Options.__dataclass_fields__
    for name in changes:
        if name not in known:
            raise ArgumentError(f"{name} is no option{did_you_mean(name, known)}")
    return replace(options or Options(), **changes)


class Sampler:
    """Chooses the next tokens of one sequence from logits.

    Args:
        options: Options of sampling.
        grammar: Sets logits of tokens that are not allowed to -inf.
        breakers: Sequence breakers of DRY.

    Attributes:
        surprise_limit: Mirostat's limit of a token's information [bits].
    """

    def __init__(
        self,
        options: Options,
        grammar: LogitsProcessor | None = None,
        breakers: Breakers = MappingProxyType({}),
    ) -> None:
        self._options = options
        self._breakers = breakers
        self._is_dry = options.dry_multiplier > 0 and options.dry_base >= 1 and not options.mirostat
        self._grammar = grammar
        self._processor = options.logits_processor
        self.surprise_limit = 2 * options.mirostat_tau
        biases = options.logit_bias or {}
        self._biased = np.fromiter(biases, np.int64, len(biases))
        self._biases = np.fromiter(biases.values(), np.float32, len(biases))
        self._random = np.random.Generator(np.random.PCG64(options.seed))

    @property
    def n_best(self) -> int:
        """Number of most likely tokens whose logits are enough to sample; 0: all are needed."""
        s = self._options
        changes_logits = s.logits_processor or self._grammar or s.logit_bias or s.penalises
        if changes_logits or self._is_dry or s.mirostat or s.logprobs:
            return 0
        return 1 if s.temperature == 0 else s.top_k

    def __call__(self, logits: npt.NDArray[Any], tokens: Sequence[int]) -> int:
        """Return the next token.

        Args:
            logits: Of all tokens of the vocabulary; or, if `n_best` is not 0, at least `n_best` `CANDIDATE`s
                by ascending number. Not changed.
            tokens: The tokens so far.

        Raises:
            ArgumentError: The processor did not return the same number of logits, or all tokens are excluded.
        """
        s = self._options
        if logits.dtype == CANDIDATE:  # equal logits have the order that they have in the vocabulary
            return int(logits["id"][self(np.ascontiguousarray(logits["logit"]), tokens)])
        if self._processor is not None:
            logits = _processed(self._processor, logits, tokens)
        if s.logit_bias or self._grammar is not None or s.penalises or self._is_dry:
            logits = logits.copy()
        if s.logit_bias:
            known = self._biased < logits.size
            logits[self._biased[known]] += self._biases[known]
        if self._grammar is not None:
            logits = self._grammar(tokens, logits)
        if (s.logit_bias or self._grammar is not None) and logits.max() == -np.inf:
            raise ArgumentError(
                "no token is left to choose: logit_bias, grammar, json_schema and logits_processor exclude "
                "all; exclude fewer"
            )
        if s.penalises and s.repeat_last and not s.mirostat:
            recent, counts = np.unique(np.asarray(tokens[-s.repeat_last :], np.int64), return_counts=True)
            found = logits[recent]
            found = np.where(found > 0, found / s.repeat_penalty, found * s.repeat_penalty)
            logits[recent] = found - counts * s.frequency_penalty - s.presence_penalty
        if self._is_dry:
            penalise_repetition(logits, tokens, s, self._breakers)
        if s.temperature == 0 or (s.top_k == 1 and not s.mirostat):
            return int(logits.argmax())
        ids, odds = self._surprising(logits) if s.mirostat else self.candidates(logits)
        sums = np.cumsum(odds)
        drawn = min(int(np.searchsorted(sums, self._random.random() * sums[-1], "right")), ids.size - 1)
        if s.mirostat:
            surprise = -float(np.log2(odds[drawn] / sums[-1]))
            self.surprise_limit -= s.mirostat_eta * (surprise - s.mirostat_tau)
        return int(ids[drawn])

    def guesser(self) -> Sampler:
        """Return a copy that guesses the next choices: without the grammar and the processor."""
        found = copy(self)
        found._random, found._grammar, found._processor = deepcopy(self._random), None, None
        return found

    def candidates(self, logits: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Return the tokens to choose from, best first, and their odds (numbers like their probabilities)."""
        s = self._options
        ids, kept, total = self._candidates(logits)
        kept = kept - kept[0]
        odds = np.exp(kept.astype(np.float64))
        if s.typical_p < 1:
            typical = _typical(odds / odds.sum(), s.typical_p)
            ids, kept, total = ids[typical], kept[typical] - kept[typical[0]], 0.0
            odds = np.exp(kept.astype(np.float64))
        if s.top_p < 1:
            before = np.cumsum(odds) - odds
            n = max(1, int(np.count_nonzero(before < s.top_p * (total or odds.sum()))))
            ids, kept, odds = ids[:n], kept[:n], odds[:n]
        if s.min_p > 0:
            n = max(1, int(np.count_nonzero(odds >= s.min_p)))
            ids, kept, odds = ids[:n], kept[:n], odds[:n]
        if s.xtc_probability > 0 and self._random.random() <= s.xtc_probability and s.xtc_threshold <= 0.5:
            first = max(int(np.count_nonzero(odds >= s.xtc_threshold * odds.sum())) - 1, 0)
            ids, kept = ids[first:], kept[first:]
        return ids, np.exp(kept.astype(np.float64) / s.temperature)

    def _surprising(self, logits: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """As `candidates`, for Mirostat 1 or 2."""
        ids, kept = _sorted(logits, logits[np.isfinite(logits)].min())
        kept = (kept - kept[0]).astype(np.float64) / self._options.temperature
        odds = np.exp(kept)
        if self._options.mirostat == 2:
            n = int(np.count_nonzero(-np.log2(odds / odds.sum()) <= self.surprise_limit))
            return ids[: max(n, 1)], odds[: max(n, 1)]
        m = np.arange(min(MIROSTAT_TOKENS, ids.size) - 1)
        logs = np.log((m + 2) / (m + 1))
        slope = float((logs * -np.diff(kept[: m.size + 1])).sum() / max((logs**2).sum(), 1e-30))
        with np.errstate(all="ignore"):
            scale = np.float64(slope - 1) / (1 - np.float64(logits.size) ** (1 - slope))
            most = np.power(scale * 2.0**self.surprise_limit, 1 / np.float64(slope))
        n = int(np.clip(np.nan_to_num(most, nan=1, posinf=ids.size), 1, ids.size))
        return ids[:n], odds[:n]

    def _candidates(self, logits: Floats) -> tuple[npt.NDArray[np.int64], Floats, float]:
        """Return the tokens that top-p and min-p may keep, best first, their logits, and the sum of all odds.

        The sum is 0 where top-k limits it to the tokens returned. Sorting a whole vocabulary takes a hundred
        times as long as finding these.
        """
        s = self._options
        if s.typical_p < 1 and not s.top_k:
            return *_sorted(logits, logits[np.isfinite(logits)].min()), 0.0
        if s.top_k:
            return *_likeliest(logits, s.top_k), 0.0
        if s.top_p == 1 and s.min_p == 0:
            return *_sorted(logits, logits.min()), 0.0
        best = logits.max()
        total = float(np.exp(logits - best).sum(dtype=np.float64)) if s.top_p < 1 else 0.0
        if s.min_p > 0:  # with a margin for rounding: the exact limit is applied to the odds
            return *_sorted(logits, best + np.float32(np.log(s.min_p) - 1e-3)), total
        k, found = 8 * BLOCK, _likeliest(logits, 8 * BLOCK)
        while k < logits.size and np.exp(found[1] - best).sum(dtype=np.float64) < s.top_p * total + 1e-3:
            k *= 8
            found = _likeliest(logits, k)
        return *found, total


def _processed(processor: LogitsProcessor, logits: Floats, tokens: Sequence[int]) -> Floats:
    found = np.asarray(processor(tokens, logits.copy()), np.float32)
    if found.shape != logits.shape:
        raise ArgumentError(
            f"logits_processor returned an array of shape {found.shape}; it must return {logits.shape}"
        )
    if not np.isfinite(most := found.max()):
        what = "-inf for every token" if most == -np.inf else f"{most}"
        raise ArgumentError(f"logits_processor returned {what}; give numbers, and -inf for excluded tokens")
    return found


def _typical(p: npt.NDArray[np.float64], most: float) -> npt.NDArray[np.int64]:
    """Return the indices of the most typical of sorted probabilities, as few as sum to over `most`."""
    information = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    order = np.argsort(np.abs(information - (p * information).sum()), kind="stable")
    n = int(np.searchsorted(np.cumsum(p[order]), most, "right")) + 1
    return np.sort(order[:n])


def _likeliest(logits: Floats, k: int) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the `k` most likely tokens (fewer if the vocabulary is smaller) as `_sorted`.

    At least `k` logits reach the k-th largest of the maxima of blocks, so the largest `k` are among these.
    """
    n_blocks = logits.size // BLOCK
    maxima = logits[: n_blocks * BLOCK].reshape(n_blocks, BLOCK).max(axis=1) if n_blocks >= k else logits
    least = np.partition(maxima, maxima.size - k)[maxima.size - k] if k < maxima.size else logits.min()
    ids, found = _sorted(logits, least)
    return ids[:k], found[:k]


def _sorted(logits: Floats, least: np.float32) -> tuple[npt.NDArray[np.int64], Floats]:
    """Return the tokens with logits of at least `least`, best first, equal ones by number, and the logits."""
    ids = np.flatnonzero(logits >= least)
    found = logits[ids]
    order = np.argsort(-found, kind="stable")
    return ids[order], found[order]


def log_probabilities(logits: Floats, n: int) -> tuple[list[int], list[float]]:
    """Return the `n` likeliest tokens, best first, with the natural logarithms of their probabilities."""
    ids, found = _likeliest(logits, n)
    most = float(found[0])
    total = most + float(np.log(np.exp(logits.astype(np.float64) - most).sum()))
    return ids.tolist(), (found.astype(np.float64) - total).tolist()
