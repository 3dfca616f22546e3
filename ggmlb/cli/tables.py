"""Tables of the kit's results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from textwrap import indent
from typing import TYPE_CHECKING

from ggmlb.cli.frame import Column, Row, print_table
from ggmlb.testing.results import CaseResult, Outcome, counts

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "bold red",
    Outcome.SKIPPED: "dim",
    Outcome.XFAILED: "yellow",
    Outcome.XPASSED: "bold red",
}
PERF = (
    Column("Op", style="bold"), Column("Time", right=True), Column("GB/s", right=True),
    Column("GFLOP/s", right=True, drop=2), Column("Of its limit", right=True, drop=1),
    Column("Operands", wraps=True, drop=3),
)  # fmt: skip
CHANGE = (Column("Change", right=True), Column("Noise", right=True), Column("Is"))
"""Further columns beside a baseline: the change of the time, and the noise of both."""
N_REASONS = 8
"""Most reasons for skipping shown."""


def print_results(out: Console, results: Sequence[CaseResult], verbose: bool = False) -> None:
    """Print results per family, failures with their reasons, and a summary line."""
    for (device, mode), group in groupby(results, lambda r: (r.device, r.mode)):
        cases = list(group)
        if mode == "perf":
            _print_perf(out, device, cases)
            if verbose:
                _print_cases(out, [r for r in cases if r.outcome is Outcome.SKIPPED])
        elif verbose or mode == "behaviour":
            _print_cases(out, cases)
        else:
            _print_families(out, device, mode, cases)
        print_failures(out, cases, verbose)
        _print_reasons(out, cases)
        _print_sum(out, device, mode, cases)


def _print_families(out: Console, device: str, mode: str, cases: Sequence[CaseResult]) -> None:
    figures = ("Passed", "Failed", "Skipped", "Supported" if mode == "support" else "Largest NMSE")
    columns = (Column("Op", style="bold"), *(Column(name, right=True) for name in figures))
    rows = []
    grouped = [list(group) for _, group in groupby(cases, lambda r: r.family)]
    declined = [of for of in grouped if is_declined(of)]
    for of in grouped:
        if len(declined) > 1 and is_declined(of):
            continue
        family, n = of[0].family, counts(of)
        bad = n[Outcome.FAILED] + n[Outcome.XPASSED]
        skipped = n[Outcome.SKIPPED] + n[Outcome.XFAILED]
        if mode == "support":
            last = f"{sum(bool(r.facts.get('supported')) for r in of)} of {len(of)}"
        else:
            errors = [r.nmse for r in of if r.nmse is not None]
            last = f"{max(errors):.1e}" if errors else "-"
        style = "red" if bad else "dim" if skipped == len(of) else ""
        numbers = [str(x) if x else "-" for x in (n[Outcome.PASSED], bad, skipped)]
        rows.append(Row((family, *numbers, last), style))
    if len(declined) > 1:
        skipped = sum(map(len, declined))
        last = f"0 of {skipped}" if mode == "support" else "-"
        label = f"{len(declined)} {'others' if rows else 'in all'}, declined"
        rows.append(Row((label, "-", "-", str(skipped), last), "dim"))
    print_table(out, f"{device}, mode {mode}", columns, rows)


def is_declined(cases: Sequence[CaseResult]) -> bool:
    """Whether a device declines all cases of a family."""
    return all(r.outcome is Outcome.SKIPPED for r in cases)


def _print_cases(out: Console, cases: Sequence[CaseResult]) -> None:
    from rich.text import Text

    shown = list[CaseResult]()
    for _, group in groupby(cases, lambda r: r.family):
        of = list(group)
        if is_declined(of) and len(of) > 1 and of[0].mode != "behaviour":
            of = [replace(of[0], id=f"{of[0].family} ({len(of)} cases)", time_s=None)]
        shown += of
    for r in shown:
        took = f"  {1000 * r.time_s:.1f} ms" if r.time_s is not None else ""
        nmse = f"  nmse {r.nmse:.1e}" if r.nmse is not None else ""
        why = f"  {r.reason}" if r.outcome in (Outcome.SKIPPED, Outcome.XFAILED) else ""
        name = f"{r.family}/{r.id}" if r.mode == "behaviour" else r.id
        word = Text(f"{r.outcome.value:8}", style=STYLES[r.outcome])
        out.print(Text.assemble(word, " ", name, (f"{took}{nmse}{why}", "dim")), soft_wrap=True)


def _print_perf(out: Console, device: str, cases: Sequence[CaseResult]) -> None:
    measured = [r for r in cases if r.outcome.ran and r.time_s is not None]
    rows = []
    for memory, group in groupby(measured, lambda r: str(r.facts["memory"])):
        if memory:
            rows.append(Row((f"weights in {memory}:",), "dim"))
        rows += [Row(_perf_cells(r, memory)) for r in group]
    if rows:
        columns = (*PERF, *CHANGE) if any("slowdown" in r.facts for r in measured) else PERF
        print_table(out, f"{device}, mode perf", columns, rows)
    for limits in dict.fromkeys(_limits(r) for r in measured):
        out.print(limits, style="dim", markup=False, soft_wrap=True)


def _perf_cells(r: CaseResult, memory: str) -> tuple[str, ...]:
    f = r.facts
    name = f"  {r.id.removesuffix(f' in {memory}')}" if memory else r.id
    rate = three_digits(f["gflop_s"]) if f["gflop_s"] else "-"
    share = f"{f['percent_of_limit']:.0f} % of {f['limit']:7}" if f["limit"] else "-"
    cells = (name, microseconds(r.time_s or 0), three_digits(f["gb_s"]), rate, share, f["size"])
    return (*cells, *((f"{f['slowdown']:+.1%}", f"{f['noise']:.1%}", f["change"]) if "slowdown" in f else ()))


def _limits(r: CaseResult) -> str:
    f = r.facts
    told = [f"copy {three_digits(f['copy_gb_s'])} GB/s"] if f["copy_gb_s"] else []
    if f["product_gflop_s"]:
        told.append(f"product {three_digits(f['product_gflop_s'])} GFLOP/s ({f['product_type']} weights)")
    return f"Measured limits: {', '.join(told) or 'none, for it neither copies nor multiplies'}"


def print_failures(out: Console, cases: Sequence[CaseResult], verbose: bool = False) -> None:
    """Print failures with their reasons; if `verbose`, with tracebacks, wrong elements and programs."""
    from rich.text import Text

    for r in cases:
        if r.outcome.is_bad:
            head = Text(f"{r.outcome.value.upper()} {r.id}", style=STYLES[r.outcome])
            told = [r.reason, *((r.detail, r.program) if verbose else ())]
            body = "\n\n".join(indent(text, "  ") for text in told if text)
            out.print(Text.assemble(head, f"\n{body}"), soft_wrap=True)


def _print_reasons(out: Console, cases: Sequence[CaseResult]) -> None:
    reasons = Counter(r.reason for r in cases if r.outcome is Outcome.SKIPPED and r.mode != "behaviour")
    for reason, n in reasons.most_common(N_REASONS):
        out.print(f"  {n:4} skipped: {reason}", style="dim", markup=False, soft_wrap=True)
    rest = reasons.total() - sum(n for _, n in reasons.most_common(N_REASONS))
    if rest:
        out.print(f"  {rest:4} skipped for other reasons (-v shows them)", style="dim", markup=False)


def _print_sum(out: Console, device: str, mode: str, cases: Sequence[CaseResult]) -> None:
    n = counts(cases)
    told = ", ".join(f"{n[o]} {o.value}" for o in Outcome if n[o] or o in (Outcome.PASSED, Outcome.FAILED))
    bad = any(n[o] for o in Outcome if o.is_bad)
    took = sum(r.time_s or 0 for r in cases) if mode != "perf" else 0
    time = f"; the cases took {took:.1f} s together" if took else ""  # of all processes
    families = {r.family for r in cases}
    ran = {r.family for r in cases if r.outcome.ran}
    told += f"; {len(ran)} of {len(families)} families ran" if ran != families else ""
    out.print(f"{device} {mode}: {told}{time}", style="bold red" if bad else "bold green", markup=False)


def microseconds(seconds: float) -> str:
    """Format a time [s] with a unit: `"12.3 us"`, `"4.56 ms"`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def three_digits(value: float) -> str:
    """Format a figure with three significant digits: `"0.123"`, `"45.6"`, `"1,234"`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
