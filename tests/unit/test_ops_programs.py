"""Golden programs: loading, building in order, and the rules of comparison."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ggmlb
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import ArgumentError
from ggmlb.testing.programs import Archive, Case, ProgramStep, Spec, compare_bytes, load_cases
from tests.support.golden import CASES as GOLDEN
from tests.support.golden import FOLDER

CASES = {case.id: case for case in GOLDEN}


def make(out, *, nmse=1e-6, rule="", dtype=DType.F32, leafs=(), steps=()):
    """Make a case with one output `y` of one row, and that value expected."""
    archive = Archive(Path())
    archive.members = {"y": np.ascontiguousarray(out).view(np.uint8).reshape(-1)}
    specs = []
    for name, array in leafs:
        archive.members[name] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        specs.append(Spec(name, DType.F32, (*array.shape[::-1], 1, 1, 1)[:4], name, archive))
    n = archive.members["y"].nbytes // dtype.type_size * dtype.block_size
    y = Spec("y", dtype, (n, 1, 1, 1), "y", archive)
    return Case("made", "made", "MADE", tuple(specs), tuple(steps), (y,), nmse, rule)


def verdict(case, out):
    return compare_bytes(case, "y", np.ascontiguousarray(out).view(np.uint8).reshape(-1))


F = np.float32


@pytest.mark.parametrize(
    ("ref", "out", "nmse", "ok"),
    [
        (F([1, 2, 3]), F([1, 2, 3]), 0.0, True),
        (F([1, 2, 3]), F([1, 2, np.nextafter(F(3), F(4))]), 0.0, False),
        (F([1, 2, 3]), F([1, 2, 3.001]), 1e-6, True),
        (F([1, 2, 3]), F([1, 2, 3.01]), 1e-6, False),
        (F([1, 2, 3]), F([1, 2, np.nan]), 1e6, False),
        (F([1, 2, 3]), F([1, 2, np.inf]), 1e6, False),
        (F([1, np.inf, -np.inf]), F([1, np.inf, -np.inf]), 1e-6, True),
        (F([1, np.inf]), F([1, -np.inf]), 1e-6, False),
        (F([1, np.inf]), F([1, 3e38]), 1e6, False),
        (F([np.inf, -np.inf]), F([np.inf, -np.inf]), 1e-6, True),
        (F([np.inf, 1]), F([np.inf, 2]), 1e-6, False),
        (F([0, 0]), F([0, 0]), 1e-6, True),
        (F([0, 0]), F([0, 1e-30]), 1e6, False),
        (F([]), F([]), 1e-6, True),
        # A denormal error must not vanish when it is squared.
        (F([0, 1e-45]), F([0, 3e-45]), 0.0, False),
    ],
)
def test_floats(ref, out, nmse, ok):
    result = verdict(make(ref, nmse=nmse), out)
    assert result.ok is ok
    assert bool(result.reason) is not ok


def test_nmse_is_the_error_over_the_power_of_the_reference():
    result = verdict(make(F([3, 4, 0, 0])), F([3, 4, 0, 0.5]))
    assert result.nmse == pytest.approx(0.25 / 25)
    assert result.reason == "nmse 0.01 is above 1e-06"
    assert math.isnan(verdict(make(F([1])), F([np.nan])).nmse)


def test_half_types_are_compared_as_floats():
    half = make(np.float16([1, 2]), dtype=DType.F16, nmse=1e-5)
    assert verdict(half, np.float16([1, 2])).ok
    assert not verdict(half, np.float16([1, 2.1])).ok
    bf16 = DType.BF16.numpy
    assert verdict(make(np.array([1, 2], bf16), dtype=DType.BF16), np.array([1, 2], bf16)).ok


def test_integers_must_be_equal():
    case = make(np.int32([1, 2]), dtype=DType.I32, nmse=1e6)
    assert verdict(case, np.int32([1, 2])).ok
    result = verdict(case, np.int32([1, 3]))
    assert not result.ok
    assert result.reason == "1 of 2 elements differ; they must be equal"


def test_quantised_outputs_are_compared_dequantised_or_block_by_block():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 32)).astype(F)
    blocks = ggmlb.core.dtypes.quantize(x, DType.Q8_0)
    near = ggmlb.core.dtypes.quantize(x * F(1.001), DType.Q8_0)
    loose = make(blocks, dtype=DType.Q8_0, rule="dequant", nmse=1e-4)
    exact = make(blocks, dtype=DType.Q8_0, rule="dequant", nmse=0.0)
    assert verdict(loose, blocks).ok
    assert verdict(loose, near).ok
    assert not verdict(loose, ggmlb.core.dtypes.quantize(x * F(1.1), DType.Q8_0)).ok
    assert verdict(exact, blocks).ok
    assert not verdict(exact, near).ok


ROWS = F([[5, 1, 4], [7, 9, 8]])
STEP = [ProgramStep("y", "argsort", ("$a", "#SORT_ORDER_ASC"))]


@pytest.mark.parametrize(
    ("rule", "out", "ok"),
    [
        ("gather", [1, 2, 0, 0, 2, 1], True),
        ("gather", [2, 1, 0, 0, 2, 1], False),
        ("gather_sorted", [2, 1, 0, 1, 0, 2], True),
        ("gather_sorted", [2, 1, 1, 1, 0, 2], False),
        ("gather", [1, 2, 3, 0, 2, 1], False),
        ("gather", [1, 2, -3, 0, 2, 1], False),
    ],
)
def test_indices_are_compared_by_what_they_choose(rule, out, ok):
    case = make(np.int32([1, 2, 0, 0, 2, 1]), rule=rule, dtype=DType.I32, leafs=[("a", ROWS)], steps=STEP)
    y = case.outputs[0]
    case = replace(case, outputs=(replace(y, ne=(3, 2, 1, 1)),))
    assert verdict(case, np.int32(out)).ok is ok


def test_gathering_needs_a_leaf():
    case = make(np.int32([0]), rule="gather", dtype=DType.I32, steps=STEP)
    with pytest.raises(ArgumentError, match="needs a leaf as first argument of argsort"):
        verdict(case, np.int32([0]))


def test_outputs_of_another_size_fail():
    assert not verdict(make(F([1, 2])), F([1, 2, 3])).ok
    with pytest.raises(ArgumentError, match="has no output 'z'"):
        compare_bytes(make(F([1])), "z", np.zeros(4, np.uint8))


@pytest.mark.parametrize("family", sorted({case.family for case in CASES.values()}))
def test_the_reference_agrees_with_itself_and_with_nothing_else(family):
    tried = 0
    for case in CASES.values():
        for spec in case.outputs if case.family == family else ():
            tried += 1
            assert compare_bytes(case, spec.name, spec.data).ok, case.id
            assert not compare_bytes(case, spec.name, spec.data[:-1]).ok, case.id
            if spec.dtype in (DType.F32, DType.F16, DType.BF16):
                values = spec.data.view(spec.dtype.numpy)
                with np.errstate(over="ignore"):
                    wrong = (values * spec.dtype.numpy.type(1.25) + spec.dtype.numpy.type(1)).view(np.uint8)
                assert not compare_bytes(case, spec.name, wrong).ok, case.id
    assert tried


# -- building --------------------------------------------------------------------------------------


def test_leafs_may_be_made_in_a_context_of_their_own():
    weights, ctx = Context(), Context()
    built = CASES["bert-f32"].build(ctx, weights)
    assert {t.op for t in weights} == {Op.NONE}
    assert {t.name for t in weights} == {leaf.name for leaf in built.case.leafs}
    assert not any(t.op is Op.NONE for t in ctx)
    assert all(t.flags & TensorFlag.INPUT for t in weights)


@pytest.mark.parametrize(
    ("step", "part"),
    [
        (ProgramStep("y", "rms_nrom", ("$a", 1e-6)), "no function 'rms_nrom'; did you mean 'rms_norm'"),
        (ProgramStep("y", "neg", ("$b",)), "neg is given 'b', which is no leaf"),
        (ProgramStep("y", "unary", ("$a", "#UNARY_OP_GULE")), "unary is given 'GULE', which is no leaf"),
        (
            ProgramStep("y", "unary", ("$a", "#UNITARY_OP_NEG")),
            "unary is given 'UNITARY_OP_NEG', which is no leaf",
        ),
    ],
)
def test_unknown_names(step, part):
    case = CASES["norm-0"]
    with pytest.raises(ArgumentError, match=part):
        replace(case, steps=(step,), outputs=()).build()


def test_an_output_of_another_type_or_shape_fails():
    case = CASES["norm-0"]
    ctx = Context()
    spec = case.outputs[0]
    a = ctx.new_tensor("f16", spec.ne)
    b = ctx.new_tensor("f32", (spec.ne[0], spec.ne[1]))
    for tensor in (a, b):
        result = ggmlb.testing.programs.compare(case, spec.name, tensor)
        assert not result.ok
        assert "expected f32" in result.reason


# -- loading ---------------------------------------------------------------------------------------


def test_a_folder_without_programs(tmp_path):
    with pytest.raises(ArgumentError, match="no golden programs"):
        load_cases(tmp_path)


@pytest.mark.parametrize("change", ["{", '{"id": "x"}', "types", "ne"])
def test_a_line_that_is_no_case(tmp_path, change):
    line = (FOLDER / "norm.jsonl").read_text().splitlines()[0]
    record = json.loads(line)
    if change == "types":
        record["leafs"][0]["type"] = "f99"
    elif change == "ne":
        record["leafs"][0]["ne"] = [1, 2]
    bad = change if change.startswith("{") else json.dumps(record)
    (tmp_path / "x.jsonl").write_text(f"{line}\n{bad}\n")
    with pytest.raises(ArgumentError, match="line 2 is not a case"):
        load_cases(tmp_path)


def test_data_is_read_when_it_is_asked_for(tmp_path):
    (tmp_path / "norm.jsonl").write_text((FOLDER / "norm.jsonl").read_text())
    case = load_cases(tmp_path)[0]
    with pytest.raises(FileNotFoundError):
        _ = case.leafs[0].data
