"""The golden programs: which a device claims, and whether it computes what ggml computed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

from ggmlb import Backend, Device, Graph, alloc_ctx_tensors
from ggmlb.testing.programs import Case, load_cases

FOLDER = Path(__file__).parents[1] / "golden/programs"
CASES = load_cases(FOLDER)
FAMILIES = sorted({case.family for case in CASES})
POISON = 0xFF
"""NaN in every float type, so that an element that is not written shows."""


def claimed(device: Device, family: str) -> list[Case]:
    """Return the cases of a family whose every node the device computes."""
    cases = [case for case in CASES if case.family == family]
    return [case for case in cases if all(map(device.supports_op, case.build().graph.nodes))]


def too_few(device: Device, at_least: dict[str, int]) -> dict[str, int]:
    """Return the families of which a device claims fewer cases than it should, with how many it claims."""
    found = {family: len(claimed(device, family)) for family in at_least}
    return {family: n for family, n in found.items() if n < at_least[family]}


def wrong(cases: Iterable[Case], stream: Backend, n_runs: int = 1) -> str:
    """Return what is wrong with the outputs of cases, one a line; each run starts from the same memory."""
    return "\n".join(why for case in cases if (why := _wrong(case, stream, n_runs)))


def _wrong(case: Case, stream: Backend, n_runs: int) -> str | None:
    built = case.build()
    with alloc_ctx_tensors(built.ctx, stream) as buffer:
        plan = stream.graph_plan_create(built.graph)
        for i in range(n_runs):
            buffer.clear(POISON)
            built.upload()
            stream.graph_plan_compute(plan)
            stream.synchronize()
            bad = {name: v.reason for name, v in built.compare().items() if not v.ok}
            if bad:
                return f"{case.id}, run {i}: {bad}"
    return None


def first_of_their_kind(cases: Iterable[Case], kinds: Callable[[Graph], set[Hashable]]) -> list[Case]:
    """Return the cases that reach something for the first time, as `kinds` tells of each graph."""
    seen: set[Hashable] = set()
    chosen = []
    for case in cases:
        found = kinds(case.build().graph)
        if not found <= seen:
            seen |= found
            chosen.append(case)
    return chosen
