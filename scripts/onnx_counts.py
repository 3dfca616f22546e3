"""Counts ONNX's own backend tests: passed, failed, not supported by op; writes the table of docs/onnx.md.

python -m scripts.onnx_counts [--write] [device]
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from ggmlb import Error, UnsupportedOpError
from ggmlb.models.onnx import OnnxModel

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
PAGE = Path(__file__).parents[1] / "docs" / "onnx.md"
BEGIN, END = "<!-- counts: begin -->\n", "<!-- counts: end -->\n"


class Case(NamedTuple):
    """One model and its sets of inputs and results."""

    name: str
    kind: str
    model: onnx.ModelProto
    data: list[tuple[list[Any], list[Any]]]
    rtol: float
    atol: float


def cases(kind: str) -> Iterator[Case]:
    """Yield ONNX's tests of one kind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tests = load_model_tests(kind=kind)
    for test in tests:
        if test.model_dir is None:
            sets = [([*map(_array, x)], [*map(_array, y)]) for x, y in test.data_sets]
            yield Case(test.name, kind, test.model, sets, test.rtol, test.atol)
            continue
        folder = Path(test.model_dir)
        model = onnx.load(folder / "model.onnx")
        data = []
        for each in sorted(folder.glob("test_data_set_*")):
            data.append(tuple(_read(each, role, infos) for role, infos in
                              (("input", model.graph.input), ("output", model.graph.output))))  # fmt: skip
        yield Case(test.name, kind, model, data, test.rtol, test.atol)  # type: ignore[arg-type]


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _read(folder: Path, role: str, infos: Any) -> list[Any]:
    found = []
    for i in range(len(list(folder.glob(f"{role}_*.pb")))):
        content = (folder / f"{role}_{i}.pb").read_bytes()
        is_tensor = infos[i].type.HasField("tensor_type")
        found.append(numpy_helper.to_array(onnx.load_tensor_from_string(content)) if is_tensor else None)
    return found


def outcome(case: Case, devices: list[str]) -> tuple[str, str]:
    """Run a case; return `passed`, `not supported` or `failed`, and the reason."""
    try:
        with OnnxModel(case.model, devices=devices) as model, np.errstate(all="ignore"):
            for inputs, expected in case.data:
                given = dict(zip(model.inputs, inputs, strict=False))
                found = list(model.run(given).values())
                Runner.assert_similar_outputs(expected, found, rtol=case.rtol, atol=case.atol)
    except UnsupportedOpError as error:
        return "not supported", error.message
    except (Error, AssertionError) as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "passed", ""


def ops(case: Case) -> str:
    """Return the op that a node test is of, by its first node."""
    return case.model.graph.node[0].op_type if case.model.graph.node else "none"


def table(devices: list[str]) -> tuple[str, list[str]]:
    """Return the table in Markdown, and the failures."""
    totals, by_op = defaultdict(Counter), defaultdict(Counter)
    reasons: dict[str, str] = {}
    failures = []
    for kind in KINDS:
        for case in cases(kind):
            what, why = outcome(case, devices)
            totals[kind][what] += 1
            if kind == "node" and "_expanded" not in case.name:
                by_op[ops(case)][what] += 1
                if what == "not supported":
                    reasons.setdefault(ops(case), why)
            if what == "failed":
                failures.append(f"{case.name}: {why}")
    lines = [
        f"The package is onnx {onnx.__version__}.",
        "",
        "| tests | passed | not supported | failed |",
        "|---|---|---|---|",
    ]
    lines += [f"| {k} | {c['passed']} | {c['not supported']} | {c['failed']} |" for k, c in totals.items()]
    some = {op: c for op, c in by_op.items() if c["passed"]}
    lines += [
        "",
        f"Ops with passed node tests: {len(some)}.",
        "",
        "| op | passed | not supported | a reason |",
        "|---|---|---|---|",
    ]
    for op, c in sorted(some.items()):
        why = reasons.get(op, "").partition(" is not supported here: ")[2].partition(" (node")[0]
        lines.append(f"| {op} | {c['passed']} | {c['not supported']} | {why.replace('|', '/')[:90]} |")
    none = ", ".join(f"{op} ({c['not supported']})" for op, c in sorted(by_op.items()) if not c["passed"])
    return "\n".join([*lines, "", f"Not supported (node tests): {none}.", ""]), failures


def main() -> None:
    """Print the table, or write it to the page."""
    arguments = [a for a in sys.argv[1:] if a != "--write"]
    text, failures = table([*arguments, "CPU"] if arguments else ["CPU"])
    print(text)
    print(f"{len(failures)} failures", *failures, sep="\n")
    if "--write" in sys.argv:
        page = PAGE.read_text()
        before, after = page.partition(BEGIN)[0], page.partition(END)[2]
        PAGE.write_text(before + BEGIN + text + END + after)


if __name__ == "__main__":
    main()
