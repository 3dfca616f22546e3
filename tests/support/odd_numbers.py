"""Programs of the kit with odd numbers among their operands, and how their results are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from ggmlb import Backend, Status, alloc_ctx_tensors
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS
from ggmlb.testing.cases import KitCase, cases_of
from ggmlb.testing.draw import Leaf, Program

SMALLEST = {DType.F32: 1e-40, DType.BF16: 1e-40, DType.F16: 1e-6}
"""Numbers that are denormal in a type."""

KINDS: dict[str, tuple[float, ...]] = {
    "nan": (np.nan,),
    "inf": (np.inf,),
    "-inf": (-np.inf,),
    "zeros": (0.0, -0.0),
    "denormals": (),
    "far": (-6.5, -9.0, 10.5, 20.5, -88.5, 88.6, -100.0, 100.0),
}
"""What is put among the operands; "far" is where functions of numbers reach their limits."""

N_CASES, MOST = 3, 20_000
"""Programs of a family, and elements of their leafs."""


@cache
def cases(family: str) -> tuple[KitCase, ...]:
    """Some small programs of a family, the plainest first, that have floats to change."""
    found = [
        case
        for case in cases_of(family)
        if any(leaf.dtype in SMALLEST and np.prod(leaf.ne) for leaf in case.program.leafs)
        and sum(np.prod(leaf.ne) for leaf in case.program.leafs) <= MOST
    ]
    return tuple(found[:N_CASES])


def variants(family: str) -> Iterator[tuple[str, str, Program]]:
    """Yield kind, label and program for each of a family's cases with each kind of odd numbers."""
    for case in cases(family):
        for kind in KINDS:
            leafs = [_changed(leaf, kind, i) for i, leaf in enumerate(case.program.leafs)]
            yield kind, f"{case.id} with {kind}", replace(case.program, leafs=leafs)


def _changed(leaf: Leaf, kind: str, seed: int) -> Leaf:
    if leaf.dtype not in SMALLEST or not np.prod(leaf.ne):
        return leaf
    random = np.random.default_rng((7, seed, leaf.ne[0]))
    values = np.array(leaf.make(), np.float32).reshape(leaf.ne[::-1])
    if kind == "denormals":
        values = values * np.float32(SMALLEST[leaf.dtype])
    else:
        places = random.random(values.shape) < 1 / 12
        places.flat[random.integers(values.size)] = True
        values[places] = random.choice(KINDS[kind], int(places.sum()))
    return replace(leaf, make=lambda: values, _data=values.astype(leaf.dtype.numpy).tobytes())


def computed(backend: Backend, program: Program) -> list[np.ndarray] | None:
    """The outputs on a backend; `None` if it declines a node."""
    built = program.case("odd").build()
    nodes = [node for node in built.graph.nodes if node.op not in NO_OPS]
    if any(backend.device.declines(node) for node in nodes):
        return None
    with alloc_ctx_tensors(built.ctx, backend):
        built.upload()
        assert backend.graph_compute(built.graph) is Status.SUCCESS
        return [built.tensors[name].to_numpy().copy() for name in program.outputs]


def difference(
    found: Any, right: Any, nmse: float, *, step: float = 0.0, signs: bool = False, products: bool = False
) -> str:
    """Return how a result differs from the right one; empty if it does not.

    NaN and infinities must lie in the same places; finite numbers are compared by their normalised mean
    squared error, which tells denormals from zeros too.

    Args:
        found: The result.
        right: What it should be, of the same shape.
        nmse: The error that is allowed.
        step: How much a number may differ besides.
        signs: Whether zeros must have the same signs, too.
        products: Whether any value that is not finite stands for all others.
    """
    found, right = (np.asarray(x).reshape(-1) for x in (found, right))
    if found.dtype.kind in "iu":
        return "" if np.array_equal(found, right) else "other integers"
    found, right = found.astype(np.float64), right.astype(np.float64)
    kinds = [np.select([np.isnan(x), np.isinf(x)], [2.0, np.sign(x)], 0.0) for x in (found, right)]
    if products:
        kinds = [np.abs(kind) > 0 for kind in kinds]
    wrong = np.nonzero(kinds[0] != kinds[1])[0]
    if wrong.size:
        return f"{wrong.size} of {found.size} are of another kind: {_shown(found, right, wrong)}"
    finite = np.isfinite(found) & np.isfinite(right)
    found, right = found[finite], right[finite]
    error = np.sum(np.maximum(np.abs(found - right) - step, 0) ** 2)
    if error > nmse * np.sum(right**2):
        wrong = np.argsort(-np.abs(found - right), kind="stable")
        return f"the error is {error / max(np.sum(right**2), 1e-300):.1e}: {_shown(found, right, wrong)}"
    wrong = np.nonzero((np.signbit(found) != np.signbit(right)) & (found == 0) & (right == 0))[0]
    return f"{wrong.size} zeros have another sign" if signs and wrong.size else ""


def _shown(found: np.ndarray, right: np.ndarray, places: np.ndarray) -> str:
    return ", ".join(f"{found[i]:.6g} for {right[i]:.6g}" for i in places[:3])
