"""Finds the equal parts of a graph, on its numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import eq
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ggmlb.core.repeats import KEPT, Repeats
from ggmlb.runtime.indexed_graph import IndexedGraph

if TYPE_CHECKING:
    import numpy.typing as npt

    from ggmlb.core.enums import Op
    from ggmlb.core.tensor import Tensor
    from ggmlb.runtime.scheduler.program import Signature

    Numbers = npt.NDArray[np.int64]

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
        self.n_leafs = graph.n_leafs - repeats.n_left_out * repeats.n_leafs
        self.bases = [origins[graph.bases[i]] for i in kept]
        ends = [0, *accumulate(graph.n_sources)]
        first, last = (i - graph.n_leafs for i in repeats.third)
        sources = graph.sources[: ends[first]] + graph.sources[ends[last] :]
        self.sources = [origins[s] for s in sources]
        self.n_sources = graph.n_sources[:first] + graph.n_sources[last:]
        self.outside = [i for i, b in enumerate(self.buffers) if b is not None and self.bases[i] < 0]
        self.requests = {origins[i]: b for i, b in graph.requests.items()}


def find_repeats(graph: Signature) -> Repeats | None:
    """Return the longest run of equal parts of a graph; `None` if leaving some out would not pay."""
    n_leafs, n = graph.n_leafs, len(graph.tensors)
    period = _period(graph.ops[n_leafs:])
    if not period or graph.unlisted or not isinstance(graph.listed, range):
        return None
    reads = _reads(graph)
    grown = reads[period:] - reads[:-period]
    is_node, is_leaf = reads[:-period] >= n_leafs, (reads[:-period] >= 0) & (reads[:-period] < n_leafs)
    growths, times = np.unique(grown[is_leaf & (grown > 0)], return_counts=True)
    growth = int(growths[times.argmax()]) if growths.size else 0
    equal = (grown == 0) | (is_node & (grown == period)) | (is_leaf & (grown == growth))
    same = equal.all(axis=1) & _same_nodes(graph, period)
    starts, ends = np.flatnonzero(np.diff(np.pad(same.view(np.int8), 1))).reshape(-1, 2).T
    if not starts.size:
        return None
    longest = (ends - starts).argmax()
    start, n_parts = int(starts[longest]), int(ends[longest] - starts[longest]) // period + 1
    if (n_parts - KEPT) * period < LEAST_LEFT_OUT:
        return None
    own = reads[start : start + period][(is_leaf & (grown > 0))[start : start + period]]
    leaf = int(own.min(initial=n_leafs))
    found = Repeats(n_leafs + start, leaf, period, growth if own.size else 0, n_parts, n_leafs, n)
    return found if _are_apart(found, reads) and _same_leafs(graph, found) else None


def _are_apart(found: Repeats, reads: Numbers) -> bool:
    """Whether a part reads nothing but its leafs, itself, the part before, and what all parts read alike."""
    n, node, leaf = found.n_nodes, found.node, found.leaf
    start, end = node - found.n_before, node - found.n_before + found.n_parts * n
    leafs_end, nodes_end = leaf + found.n_parts * found.n_leafs, node + found.n_parts * n
    is_own_leaf = (reads >= leaf) & (reads < leafs_end)
    is_of_part = (reads >= node) & (reads < nodes_end)
    before, rows, after = reads[:start], reads[start:end], reads[end:]
    part = (np.arange(len(rows)) // n)[:, None]
    is_moved = np.concatenate([rows[n:] != rows[:-n], rows[n : 2 * n] != rows[:n]])
    first_leaf, first_node = leaf + part * found.n_leafs, node + (part - 1) * n
    is_leaf = rows < found.n_before
    fits = np.where(
        is_moved,
        (is_leaf & (rows >= first_leaf) & (rows < first_leaf + found.n_leafs))
        | (~is_leaf & (rows >= first_node)),
        ~is_own_leaf[start:end] & ~is_of_part[start:end],
    )
    # A view of a part's leaf that the next part reads would be that of another leaf.
    second = rows[n : 2 * n]
    crossing = second[(second >= node) & (second < node + n)] - found.n_before
    roots = reads[crossing, -1]
    return bool(
        fits.all()
        and (rows < node + part * n + np.arange(len(rows))[:, None] % n).all()
        and not (is_own_leaf[:start].any() or is_own_leaf[end:].any() or (before >= node).any())
        and (after[is_of_part[end:]] >= nodes_end - n).all()
        and not ((roots >= leaf) & (roots < leafs_end)).any()
    )


def _same_leafs(graph: Signature, found: Repeats) -> bool:
    """Whether parts' leafs are equal, lie in memory of one kind, and share no byte with another tensor."""
    n = found.n_leafs
    own = slice(found.leaf, found.leaf + n * found.n_parts)
    kinds = {b: (b.buft, b.usage, b.is_read_only) for b in graph.foreign}
    memory = [kinds[b] if b is not None else None for b in graph.buffers[own]]
    rows = list(zip(graph.layouts[own], graph.flags[own], memory, strict=True))
    is_placed = graph.outside[bisect_left(graph.outside, own.start) :][: len(rows)] == [
        *range(own.start, own.stop)
    ]
    return not n or (
        is_placed and rows[n:] == rows[:-n] and not _overlaps([graph.tensors[i] for i in graph.outside])
    )


def _overlaps(placed: Sequence[Tensor]) -> bool:
    """Whether any two tensors share a byte."""
    buffers = np.fromiter([id(t.buffer) for t in placed], np.int64)
    starts, sizes = (
        np.fromiter(x, np.int64) for x in ([t.offset for t in placed], [t.nbytes for t in placed])
    )
    order = np.lexsort([starts, buffers])
    follow = np.diff(buffers[order]) == 0
    return bool((follow & (np.diff(starts[order]) < sizes[order][:-1])).any())


def _period(ops: Sequence[Op]) -> int:
    """Return the distance at which a rare op comes again most often; 0 if none does."""
    often = [(n, op) for op, n in Counter(ops).items() if n > KEPT]
    if not often:
        return 0
    _, rare = min(often)
    places = [i for i, op in enumerate(ops) if op is rare]
    return Counter(b - a for a, b in pairwise(places)).most_common(1)[0][0]


def _reads(graph: Signature) -> Numbers:
    """Return what each node reads: its sources, and last what it is a view of; -1 where there is none."""
    counts = np.array(graph.n_sources)
    reads = np.full((len(counts), counts.max(initial=0) + 1), -1, np.int64)
    nodes = np.repeat(np.arange(len(counts)), counts)
    reads[nodes, np.arange(len(nodes)) - np.repeat(np.cumsum(counts) - counts, counts)] = graph.sources
    reads[:, -1] = graph.bases[graph.n_leafs :]
    return reads


def _same_nodes(graph: Signature, period: int) -> npt.NDArray[np.bool_]:
    """Return for each node whether that a period later is equal, sources aside."""
    n = graph.n_leafs
    facts: list[list[Any]] = [graph.ops, graph.layouts, graph.flags, graph.view_offs, graph.params]
    rows: list[tuple[object, ...]] = list(zip(*[x[n:] for x in facts], graph.n_sources, strict=True))
    same = np.fromiter(map(eq, rows, rows[period:]), np.bool_, len(rows) - period)
    zeros = {(i - n, name, sign) for i, name, sign in graph.zeros if i >= n}
    special = [i - n for i in (*graph.outside, *graph.requests) if i >= n]
    special += [i for i, name, sign in zeros if (i + period, name, sign) not in zeros]
    same[[j for i in special for j in (i, i - period) if 0 <= j < len(same)]] = False
    return same
