"""Finds the equal parts of a graph, on its numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import copysign
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ggmlb.core.placement import are_equal, zeros_of
from ggmlb.core.repeats import KEPT, Repeats
from ggmlb.runtime.indexed_graph import IndexedGraph

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.core.enums import Op
    from ggmlb.runtime.scheduler.program import Signature

    Numbers = npt.NDArray[np.int64]

LEAST_PARTS: Final = 4
"""Parts that a graph must have: an op of fewer is not one of a layer."""

LEAST_LEFT_OUT: Final = 40
"""Nodes that must be left out: with fewer, looking for parts costs more than it saves."""


class ShortGraph(IndexedGraph):
    """The graph of the tensors of a few parts, which read those that stand for others."""

    def __init__(self, graph: Signature, repeats: Repeats) -> None:
        kept, origins = repeats.kept, repeats.origins
        self.tensors = [graph.tensors[i] for i in kept]
        self.ops = [graph.ops[i] for i in kept]
        self.flags = [graph.flags[i] for i in kept]
        self.buffers = [graph.buffers[i] for i in kept]
        self.params = [graph.params[i] for i in kept]
        self.listed, self.unlisted = range(len(kept)), range(0)
        self.n_leafs = graph.n_leafs - repeats.leafs[1:-1].size
        self.bases = [origins[graph.bases[i]] for i in kept]
        first, last = (i - graph.n_leafs for i in repeats.gap)
        sources = graph.sources[: sum(graph.n_sources[:first])] + graph.sources[sum(graph.n_sources[:last]) :]
        self.sources = [origins[s] for s in sources]
        self.n_sources = graph.n_sources[:first] + graph.n_sources[last:]
        self.outside = [i for i, b in enumerate(self.buffers) if b is not None and self.bases[i] < 0]
        self.requests = {origins[i]: b for i, b in graph.requests.items()}


def find_repeats(graph: Signature) -> Repeats | None:
    """Return the longest run of equal parts of a graph; `None` if leaving some out would not pay."""
    n_before, n_tensors = graph.n_leafs, len(graph.tensors)
    n = _period(graph.ops[n_before:])
    if not n or graph.unlisted or not isinstance(graph.listed, range):
        return None
    reads = _reads(graph)
    kinds = _kinds(graph)[reads]
    is_moved = (reads[n:] - reads[:-n] == n) & (reads[:-n] >= n_before)
    same = ((kinds[n:] == kinds[:-n]) | is_moved).all(axis=1)
    special = [i - n_before for i in (*graph.outside, *graph.requests) if i >= n_before]
    same[[j for i in special for j in (i, i - n) if 0 <= j < len(same)]] = False
    start, end = _longest(same)
    while unlike := _unlike(graph, start, end, n):
        same[unlike] = False
        start, end = _longest(same)
    start = _place_to_cut(reads, start, end, n, n_before)
    n_parts = (end - start + n) // n
    if (n_parts - KEPT) * n < LEAST_LEFT_OUT:
        return None
    end = start + n_parts * n
    leafs = _leafs_of_parts(reads[start:end].reshape(n_parts, -1), n_before + start, n_before, n)
    if leafs is None or not _are_apart(graph, reads, leafs, start, end, n):
        return None
    if not graph.requests.keys().isdisjoint(leafs.ravel().tolist()):
        return None
    if _overlaps(graph):
        return None
    return Repeats(n_before + start, n, leafs, n_before, n_tensors)


def _place_to_cut(reads: Numbers, start: int, end: int, n: int, n_before: int) -> int:
    """Return where parts may begin: not between nodes that read a leaf or its views.

    Of the nodes that are no whole part, half come first: parts lie amid nodes like theirs.

    Args:
        reads: What each node reads.
        start: The first node that is equal to the one a part later.
        end: The end of those.
        n: Nodes of a part.
        n_before: Number of leafs.
    """
    here = reads[start : start + 2 * n]
    views = here >= n_before
    leafs = here.copy()
    leafs[views] = reads[here[views] - n_before, -1]
    readers: dict[int, list[int]] = {}
    nodes, places = np.nonzero((leafs >= 0) & (leafs < n_before))
    for node, leaf in zip(nodes.tolist(), leafs[nodes, places].tolist(), strict=True):
        readers.setdefault(leaf, []).append(node)
    spans = [range(found[0] + 1, found[-1] + 1) for found in readers.values() if found[-1] - found[0] < n]
    parted = {place % n for span in spans for place in span}
    half = (end - start) % n // 2
    return start + next((i % n for i in range(half, half + n) if i % n not in parted), 0)


def _leafs_of_parts(reads: Numbers, node: int, n_before: int, n: int) -> Numbers | None:
    """Return the leafs of each part, a row for each; `None` if parts read others than they may.

    Args:
        reads: What the nodes of each part read, a row for each.
        node: The number of the first part's first node.
        n_before: Number of the graph's leafs.
        n: Nodes of a part.
    """
    grown, first = reads[1:] - reads[:-1], reads[0]
    common = (grown == 0).all(axis=0)
    numbers = node + np.arange(n).repeat(reads.shape[1] // n)
    is_moved = (grown == n).all(axis=0) & (first >= n_before) & (first >= node - n) & (first < numbers)
    rest = ~common & ~is_moved
    leafs = np.array(sorted({*map(tuple, reads[:, rest].T.tolist())}), np.int64).reshape(-1, len(reads)).T
    numbers_of, others = {*leafs.ravel().tolist()}, {*first[common].tolist()}
    fits = (
        max(others, default=-1) < node
        and len(numbers_of) == leafs.size
        and 0 <= min(numbers_of, default=0) <= max(numbers_of, default=0) < n_before
        and not numbers_of & others
    )
    return leafs if fits else None


def _are_apart(graph: Signature, reads: Numbers, leafs: Numbers, start: int, end: int, n: int) -> bool:
    """Whether the other tensors read, or are views of, nothing of the parts but the last one's nodes.

    Nor may a part read a view of a leaf of the part before: for the last part, another leaf stands there.
    """
    n_before = graph.n_leafs
    is_own = np.zeros(n_before + len(reads) + 1, np.bool_)
    is_own[leafs] = True
    before, after = np.append(reads[:start], graph.bases[:n_before]), reads[end:]
    second = reads[start + n : start + 2 * n] - n_before
    crossing = second[(second >= start) & (second < start + n)]
    return not (
        is_own[before].any()
        or is_own[after].any()
        or is_own[reads[crossing, -1]].any()
        or (before >= n_before + start).any()
        or ((after >= n_before + start) & (after < n_before + end - n)).any()
    )


def _kinds(graph: Signature) -> Numbers:
    """Return a number for each tensor, the same for equal leafs in memory of one kind; -1 for `None`."""
    numbers: dict[object, int] = {}
    memory = {
        b: numbers.setdefault((b.buft, b.usage, b.is_read_only), i) for i, b in enumerate(graph.foreign)
    }
    kinds = np.arange(len(graph.tensors) + 1)
    kinds[-1] = -1
    leafs = graph.outside[: bisect_left(graph.outside, graph.n_leafs)]
    layouts, flags, buffers, first = graph.layouts, graph.flags, graph.buffers, numbers.setdefault
    kinds[leafs] = [first((layouts[i], flags[i], memory[buffers[i]]), i) for i in leafs]  # type: ignore[index]
    return kinds


def _overlaps(graph: Signature) -> bool:
    """Whether any two of the user's tensors share a byte."""
    n = len(graph.outside)
    buffers = np.fromiter([id(graph.buffers[i]) for i in graph.outside], np.int64, n)
    starts = np.fromiter(graph.offsets, np.int64, n)
    ends = starts + np.fromiter([graph.layouts[i].nbytes for i in graph.outside], np.int64, n)
    order = np.lexsort([starts, buffers])
    buffers, starts, ends = buffers[order], starts[order], ends[order]
    return bool(((buffers[1:] == buffers[:-1]) & (starts[1:] < ends[:-1])).any())


def _period(ops: Sequence[Op]) -> int:
    """Return the distance at which a rare op comes again most often; 0 if none does."""
    often = [(n, op) for op, n in Counter(ops).items() if n >= LEAST_PARTS]
    if not often:
        return 0
    _, rare = min(often)
    places = [i for i, op in enumerate(ops) if op is rare]
    return Counter(b - a for a, b in pairwise(places)).most_common(1)[0][0]


def _reads(graph: Signature) -> Numbers:
    """Return what each node reads: its sources, and last what it is a view of; -1 where there is none."""
    counts = np.fromiter(graph.n_sources, np.int64)
    reads = np.full((len(counts), counts.max(initial=0) + 1), -1, np.int64)
    nodes = np.repeat(np.arange(len(counts)), counts)
    reads[nodes, np.arange(len(nodes)) - np.repeat(np.cumsum(counts) - counts, counts)] = np.fromiter(
        graph.sources, np.int64
    )
    reads[:, -1] = np.fromiter(graph.bases[graph.n_leafs :], np.int64)
    return reads


def _longest(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the start and the end of the longest run; equal if there is none."""
    padded = np.zeros(len(same) + 2, np.bool_)
    padded[1:-1] = same
    starts, ends = (padded[1:] != padded[:-1]).nonzero()[0].reshape(-1, 2).T
    if not starts.size:
        return 0, 0
    longest = (ends - starts).argmax()
    return int(starts[longest]), int(ends[longest])


def _unlike(graph: Signature, start: int, end: int, period: int) -> list[int]:
    """Return nodes of a run that are not equal to those a period later, sources aside; none if all are."""
    nodes = slice(graph.n_leafs + start, graph.n_leafs + end + period)
    n, params = end - start, graph.params[nodes]
    facts: tuple[list[Any], ...] = (graph.flags, graph.ops, graph.layouts, graph.view_offs)
    for fact in (*[x[nodes] for x in facts], graph.n_sources[start : end + period], params):
        if are_equal(fact[:-period], fact[period:]):
            continue
        parts = [fact[i : i + period] for i in range(0, n + period, period)]  # most are equal
        odd = [k * period for k, pair in enumerate(pairwise(parts)) if not are_equal(*pair)]
        nodes_of = (i for k in odd for i in range(k, min(k + period, n)))
        found = [start + i for i in nodes_of if not are_equal(fact[i], fact[i + period])]
        if found:
            return found
    return [
        start + i - period
        for k, name, sign in zeros_of(params[:period])
        for i in range(k + period, n + period, period)
        if copysign(1.0, params[i][name]) != sign
    ]
