"""Golden programs: small ggml programs with inputs and the outputs that ggml computed.

A folder holds `<family>.jsonl`, a case per line, and `<family>.npz` with the bytes of all leafs and outputs
(`tests/golden/README.md` tells the format). A program is data: its steps are calls of `Context` methods,
so any backend can build, compute and compare it:

    for case in load_cases("tests/golden/programs"):
        built = case.build()
        with alloc_ctx_tensors(built.ctx, backend):
            built.upload()
            backend.graph_compute(built.graph)
            assert all(v.ok for v in built.compare().values())
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.core import dtypes, enums
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import ArgumentError, did_you_mean
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Ne, Tensor
from ggmlb.testing.wrong import WrongElements, of_floats

CONSTANTS: dict[str, type[IntEnum]] = {
    "TYPE_": DType,
    "UNARY_OP_": enums.UnaryOp,
    "GLU_OP_": enums.GluOp,
    "ROPE_TYPE_": enums.RopeType,
    "SORT_ORDER_": enums.SortOrder,
    "OP_POOL_": enums.OpPool,
    "SCALE_MODE_": enums.ScaleMode,
    "SCALE_FLAG_": enums.ScaleFlag,
    "TRI_TYPE_": enums.TriType,
    "PREC_": enums.Prec,
    "HINT_": enums.Hint,
}
"""Enum of a constant of ggml.h, by its prefix."""


FILLED_WITH: Final = 0xFFF1
"""The least upper 16 bits of the NaNs that the kit fills memory with (`guarded.poison`)."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing an output with ggml's.

    Attributes:
        ok: Whether the output is right.
        nmse: The normalised mean squared error, if it was measured.
        reason: Why it is wrong.
        difference: The wrong elements, if there are elements to compare.
    """

    ok: bool
    nmse: float | None
    reason: str = ""
    difference: WrongElements | None = None


class Archive:
    """The bytes of a family's leafs and outputs, read on first access."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def members(self) -> dict[str, npt.NDArray[np.uint8]]:
        """All members by name."""
        with np.load(self.path) as archive:
            return dict(archive)


@dataclass(frozen=True, slots=True)
class Spec:
    """A leaf or an output of a case: its name, type, extents and bytes."""

    name: str
    dtype: DType
    ne: Ne
    member: str
    archive: Archive = field(repr=False, compare=False)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of this leaf or output, contiguous in ggml's layout."""
        return self.archive.members[self.member]


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A call of a `Context` method; `out` names its result, and is None where C returns void."""

    out: str | None
    fn: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A program with its inputs and expected outputs.

    Attributes:
        family: The name of its file: `norm`, `mul_mat`, ...
        op: Label for grouping: an op's name, `UNARY_x`, `GLU_x` or `PROGRAM_x`.
        nmse: The allowed normalised mean squared error; 0 demands equality.
        rule: `dequant`, `gather`, `gather_sorted`, or empty for the plain comparison.
    """

    id: str
    family: str
    op: str
    leafs: tuple[Spec, ...]
    steps: tuple[ProgramStep, ...]
    outputs: tuple[Spec, ...]
    nmse: float
    rule: str = ""

    def build(self, ctx: Context | None = None, leafs: Context | None = None) -> Built:
        """Create the program's tensors (leafs in context `leafs`), and a graph that computes its steps.

        Leafs are marked as inputs, and outputs (with their view sources) as outputs, so that an allocator
        keeps them.

        Args:
            ctx: The context of nodes; by default a new one.
            leafs: The context of leafs, by default `ctx`; another one can be placed separately, as weights.

        Raises:
            ArgumentError: A step calls an unknown function, or names an unknown tensor or constant.
        """
        ctx = Context() if ctx is None else ctx
        home = ctx if leafs is None else leafs
        tensors: dict[str, Tensor] = {}
        for leaf in self.leafs:
            tensors[leaf.name] = ctx.set_input(home.new_tensor(leaf.dtype, leaf.ne, leaf.name))
        results: list[Tensor] = []
        for step in self.steps:
            result = self._call(ctx, step, tensors)
            if step.out is not None:
                results.append(result)
                tensors[step.out] = result
                if not result.name:
                    result.name = step.out
        for output in self.outputs:
            tensor = ctx.set_output(tensors[output.name])
            if tensor.view_src is not None:
                ctx.set_output(tensor.view_src)
        # Last, because a void function may have added a source to the node of an earlier step.
        return Built(self, ctx, Graph().build_forward_expand(*results), tensors)

    def _call(self, ctx: Context, step: ProgramStep, tensors: dict[str, Tensor]) -> Tensor:
        method = getattr(ctx, step.fn, None)
        if method is None:
            known = [name for name in dir(ctx) if not name.startswith("_")]
            raise ArgumentError(f"case {self.id}: no function {step.fn!r}{did_you_mean(step.fn, known)}")
        try:
            result: Tensor = method(*(_argument(arg, tensors) for arg in step.args))
        except KeyError as error:
            raise ArgumentError(
                f"case {self.id}: {step.fn} is given {error}, which is no leaf, earlier result or constant"
            ) from None
        return result

    def output(self, name: str) -> Spec:
        """Return the expected output called `name`.

        Raises:
            ArgumentError: The case has no such output.
        """
        for spec in self.outputs:
            if spec.name == name:
                return spec
        raise ArgumentError(f"case {self.id} has no output {name!r}")


@dataclass(frozen=True, slots=True)
class Built:
    """A case's tensors and graph, in a context.

    Attributes:
        tensors: Leafs and results of steps by name.
    """

    case: Case
    ctx: Context
    graph: Graph
    tensors: dict[str, Tensor]

    def upload(self) -> None:
        """Write the inputs into the placed leafs."""
        for leaf in self.case.leafs:
            self.tensors[leaf.name].set(leaf.data)

    def compare(self) -> dict[str, Verdict]:
        """Return the verdict on each output, by name."""
        return {
            spec.name: compare(self.case, spec.name, self.tensors[spec.name]) for spec in self.case.outputs
        }


def load_cases(path: str | Path) -> list[Case]:
    """Return the cases of a family's file, or of all families in a folder, in the order of their names.

    Raises:
        ArgumentError: The folder holds no program, the file is missing, or a line is not a case.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.glob("*.jsonl"))
    if not files:
        raise ArgumentError(f"load_cases: no golden programs (*.jsonl) in {path}")
    cases = []
    for file in files:
        archive = Archive(file.with_suffix(".npz"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            try:
                cases.append(_case(json.loads(line), file.stem, archive))
            except (KeyError, TypeError, ValueError) as error:
                raise ArgumentError(
                    f"load_cases: {file}, line {number} is not a case in the format of "
                    f"tests/golden/README.md: {error!r}"
                ) from None
    return cases


def _case(record: dict[str, Any], family: str, archive: Archive) -> Case:
    return Case(
        id=record["id"],
        family=family,
        op=record["op"],
        leafs=tuple(_spec(item, archive) for item in record["leafs"]),
        steps=tuple(ProgramStep(s["out"], s["fn"], tuple(s["args"])) for s in record["steps"]),
        outputs=tuple(_spec(item, archive) for item in record["outputs"]),
        nmse=record["nmse"],
        rule=record.get("compare", ""),
    )


def _spec(record: dict[str, Any], archive: Archive) -> Spec:
    a, b, c, d = record["ne"]
    return Spec(record["name"], DType.parse(record["type"]), (a, b, c, d), record["data"], archive)


def _argument(arg: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the value of an argument: a tensor, a constant, a number, a list or None."""
    if isinstance(arg, str):
        if arg.startswith("$"):
            return tensors[arg[1:]]
        values = [_constant(name) for name in arg.removeprefix("#").split("|")]
        return values[0] if len(values) == 1 else sum(values)
    if isinstance(arg, float):
        return float(np.float32(arg))  # as C passes it
    return [_argument(item, tensors) for item in arg] if isinstance(arg, list) else arg


def _constant(name: str) -> IntEnum:
    for prefix, kind in CONSTANTS.items():
        if name.startswith(prefix):
            return kind[name.removeprefix(prefix)]
    raise KeyError(name)


# -- comparison ------------------------------------------------------------------------------------


def compare(case: Case, name: str, out: Tensor) -> Verdict:
    """Compare the computed tensor `out` with ggml's output `name`, by the case's rule and tolerance.

    Raises:
        ArgumentError: The case has no such output.
        NotAllocatedError: `out` is in no buffer.
    """
    spec = case.output(name)
    if out.dtype is not spec.dtype or out.ne != spec.ne:
        return Verdict(False, None, f"is {out.describe()}; expected {spec.dtype.name.lower()}{list(spec.ne)}")
    return compare_bytes(case, name, out.packed())


def compare_bytes(case: Case, name: str, data: npt.NDArray[np.uint8]) -> Verdict:
    """Return the verdict on an output's bytes, contiguous, of the expected type and extents."""
    spec = case.output(name)
    if data.nbytes != spec.data.nbytes:
        return Verdict(False, None, f"has {data.nbytes} bytes; expected {spec.data.nbytes}")
    data = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    if case.rule in ("gather", "gather_sorted"):
        return _compare_gathered(case, spec, data)
    if spec.dtype.is_quantized and case.nmse == 0:
        blocks = (*spec.ne[:0:-1], -1, spec.dtype.type_size)
        return _verdict_equal(data.reshape(blocks), spec.data.reshape(blocks), "blocks")
    out, ref = _values(spec.dtype, spec.ne, data), _values(spec.dtype, spec.ne, spec.data)
    if out.dtype.kind == "i":
        return _verdict_equal(out, ref, "elements")
    verdict = _compare_floats(out.astype(np.float64), ref.astype(np.float64), case.nmse)
    if verdict.difference is None or spec.dtype.is_quantized:
        return verdict
    words = data.view(f"<u{spec.dtype.type_size}") >> (8 * spec.dtype.type_size - 16)
    unwritten = bool((np.isnan(out) & (words >= FILLED_WITH).reshape(out.shape)).any())
    return replace(verdict, difference=replace(verdict.difference, unwritten=unwritten))


def _values(dtype: DType, ne: Ne, data: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return the elements, NumPy order; quantised ones dequantised."""
    if dtype.is_quantized:
        return dtypes.dequantize(data.reshape(*ne[:0:-1], dtype.row_size(ne[0])), dtype)
    return data.view(dtype.numpy).reshape(ne[::-1])


def _compare_floats(out: npt.NDArray[np.float64], ref: npt.NDArray[np.float64], limit: float) -> Verdict:
    if np.isnan(out).any():
        told = f"{int(np.isnan(out).sum())} elements are NaN"
        return Verdict(False, math.nan, told, of_floats(out, ref, limit))
    masked = np.isinf(ref)
    if not np.array_equal(out[masked], ref[masked]):
        told = "other elements are infinite than in the reference"
        return Verdict(False, math.inf, told, of_floats(out, ref, limit))
    mean = float(np.mean(ref[~masked] ** 2)) if not masked.all() else 0.0
    if limit == 0 or mean == 0:
        return _verdict_equal(out, ref, "elements")
    nmse = float(np.mean((out[~masked] - ref[~masked]) ** 2)) / mean
    if nmse <= limit:
        return Verdict(True, nmse)
    return Verdict(False, nmse, f"nmse {nmse:.3g} is above {limit:g}", of_floats(out, ref, limit))


def _verdict_equal(out: npt.NDArray[Any], ref: npt.NDArray[Any], what: str) -> Verdict:
    differ = (out != ref).any(-1) if what == "blocks" else out != ref
    wrong = int(np.count_nonzero(differ))
    if wrong:
        told = f"{wrong} of {differ.size} {what} differ; they must be equal"
        return Verdict(False, None, told, WrongElements(out, ref, differ))
    return Verdict(True, 0.0)


def _compare_gathered(case: Case, spec: Spec, data: npt.NDArray[np.uint8]) -> Verdict:
    """Compare the values selected by indices, per row, from the first argument of the step."""
    step = next(s for s in case.steps if s.out == spec.name)
    source = next((leaf for leaf in case.leafs if f"${leaf.name}" == step.args[0]), None)
    if source is None:
        raise ArgumentError(f"case {case.id}: rule {case.rule} needs a leaf as first argument of {step.fn}")
    rows = _values(source.dtype, source.ne, source.data)
    out, ref = _values(spec.dtype, spec.ne, data), _values(spec.dtype, spec.ne, spec.data)
    if out.min(initial=0) < 0 or out.max(initial=0) >= source.ne[0]:
        return Verdict(False, None, f"an index is not within the {source.ne[0]} elements of a row")
    chosen, expected = np.take_along_axis(rows, out, -1), np.take_along_axis(rows, ref, -1)
    if case.rule == "gather_sorted":
        chosen, expected = np.sort(chosen, -1), np.sort(expected, -1)
    return _verdict_equal(chosen, expected, "chosen values")
