"""The judge itself: how results of ggml's test-backend-ops are read, and its faults are told from ours."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from ggmlb.backends.ggml.params import decode, encode
from ggmlb.core.context import Context
from ggmlb.core.enums import GluOp, Op, Prec, RopeType, UnaryOp
from ggmlb.core.ops import SPECS
from tests.support.ggml_bridge import END
from tests.support.ggml_bridge.suite import Fault, Worker, judge, load_faults, parse, unmatched
from tests.support.outcomes import FAILED, OK, UNJUDGED, UNSUPPORTED, Outcome

CASE = "ADD(type=f32,ne=[10,5,4,3],nr=[1,1,1,1])"

LINES = [
    (f"  {CASE}: \x1b[1;32mOK\x1b[0m\n", Outcome(CASE, OK)),
    (f"  {CASE}: not supported [ggmlb-CPU, CPU] \n", Outcome(CASE, UNSUPPORTED)),
    (f"  {CASE}: not supported [CPU] \n", Outcome(CASE, UNJUDGED)),
    (
        f"[ADD] ERR = 0.5 > 0.000000100   {CASE}: \x1b[1;31mFAIL\x1b[0m\n",
        Outcome(CASE, FAILED, "[ADD] ERR = 0.5 > 0.000000100"),
    ),
    (
        f"[ADD] NaN at index 3 (ggmlb-CPU=nan CPU=1.0)   {CASE}: \x1b[1;31mFAIL\x1b[0m\n",
        Outcome(CASE, FAILED, "[ADD] NaN at index 3 (ggmlb-CPU=nan CPU=1.0)"),
    ),
    # Memory that a callback left as it was may hold the right values.
    (
        f"[ggmlb raised BackendError in graph_compute: no (really)]   {CASE}: \x1b[1;32mOK\x1b[0m\n",
        Outcome(CASE, FAILED, "[ggmlb raised BackendError in graph_compute: no (really)]"),
    ),
    ("  Device memory: 24105 MB (7509 MB free)\n", None),
    ("  1/1 tests passed\n", None),
    (f"  {CASE}\n", None),
]


@pytest.mark.parametrize(("line", "outcome"), LINES)
def test_a_line_is_read(line: str, outcome: Outcome | None) -> None:
    assert parse(line) == outcome


def test_a_failure_that_nothing_explains_is_told() -> None:
    failed, other = Outcome("SUM(a=1)", FAILED), Outcome("SUM(a=2)", FAILED)
    assert judge([failed, other], [Fault(r"SUM\(a=1\)", "of ggml's")]) == ([other], [])


def test_a_fault_that_has_gone_is_told_and_one_that_was_not_reached_is_not() -> None:
    fault = Fault(r"SUM\(a=.*\)", "of ggml's")
    unexplained, gone = judge([Outcome("SUM(a=1)", FAILED), Outcome("SUM(a=2)", OK)], [fault])
    assert not unexplained
    assert len(gone) == 1
    assert gone[0].startswith("SUM(a=2) passes")
    assert judge([Outcome("SUM(a=1)", UNSUPPORTED)], [fault]) == ([], [])


def test_a_fault_is_of_whole_names_that_there_are() -> None:
    faults = [Fault(r"SUM", "half a name"), Fault(r"SUM\(.*\)", "fine")]
    assert unmatched(["SUM(a=1)"], faults) == ["no case is 'SUM'"]


def test_each_fault_of_ggml_has_a_reason() -> None:
    for fault in load_faults():
        assert len(fault.reason) > 20, fault


# -- workers ---------------------------------------------------------------------------------------

PEER = """
import os, re, sys, time
for line in sys.stdin:
    for case in re.findall(r"\\w+\\(.*?\\)", line):
        if case.startswith("DIES"):
            print("ggml.c:1: GGML_ASSERT failed", flush=True)
            os.abort()
        if case.startswith("HANGS"):
            time.sleep(100)
        if not case.startswith("LEFT"):
            print(f"  {case}: OK", flush=True)
    print("END", flush=True)
"""


class OfPeer(Worker):
    """A worker whose process speaks the same language, and dies or hangs when it is told to."""

    n_started = 0

    def _start(self, *options: str) -> subprocess.Popen[str]:
        self.n_started += 1
        code = PEER.replace("END", END + "0")
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("cases", "expected"),
    [
        ("A(1) DIES(2) B(3) DIES(4)", [("A(1)", OK), ("DIES(2)", FAILED), ("B(3)", OK), ("DIES(4)", FAILED)]),
        ("HANGS(1) A(2)", [("HANGS(1)", FAILED), ("A(2)", OK)]),
        ("A(1) A(1) B(2)", [("A(1)", OK), ("B(2)", OK)]),
        ("LEFT(1) A(2)", [("A(2)", OK), ("LEFT(1)", FAILED)]),
    ],
)
def test_each_case_is_told_once_and_has_failed_unless_it_ends_well(
    cases: str, expected: list[tuple[str, str]]
) -> None:
    worker = OfPeer("CPU", timeout_s=2 if "HANGS" in cases else 60)
    try:
        outcomes = list(worker.run(cases.split()))
        assert [(o.case, o.status) for o in outcomes] == expected
        if "DIES" in cases:
            assert outcomes[1].detail == "ended the process: ggml.c:1: GGML_ASSERT failed; signal 6"
            assert worker.n_started == 2
        assert list(worker.run(["C(5)"])) == [Outcome("C(5)", OK)]
    finally:
        worker.close()


# -- parameters: the words of op_params ------------------------------------------------------------


def read(op: Op, *words: float, ne: tuple[int, ...] = (1, 1, 1, 1)) -> dict[str, object]:
    """Read parameters from the words that ggml has for them."""
    raw = b"".join(struct.pack("<f" if isinstance(word, float) else "<i", word) for word in words)
    return decode(op, raw.ljust(64, b"\0"), ne, dict(enumerate(UnaryOp)), dict(enumerate(GluOp)))


WITH_FUNCTIONS = {Op.CUSTOM, Op.MAP_CUSTOM1, Op.MAP_CUSTOM2, Op.MAP_CUSTOM3}


@pytest.mark.parametrize("op", [op for op, spec in SPECS.items() if spec.params and op not in WITH_FUNCTIONS])
def test_every_parameter_of_an_op_is_read(op: Op) -> None:
    assert set(read(op)) == set(SPECS[op].params)


def test_parameters_are_read_as_they_are_written() -> None:
    assert read(Op.SCALE, 2.5, -1.0) == {"scale": 2.5, "bias": -1.0}
    assert read(Op.TOP_K, ne=(7, 1, 1, 1)) == {"k": 7}
    assert read(Op.UNARY, 17, 1.0, 2.0, 3.0, 4.0) == {
        "op": UnaryOp.XIELU, "alpha_n": 1.0, "alpha_p": 2.0, "beta": 3.0, "eps": 4.0,
    }  # fmt: skip
    assert read(Op.GLU, 3, 1, 1.5, 7.0) == {
        "op": GluOp.SWIGLU_OAI,
        "swapped": True,
        "alpha": 1.5,
        "limit": 7.0,
    }
    assert read(Op.GLU, 6, 0, 0.0, 7.0) == {"op": GluOp.SWIGLU_CLAMP, "swapped": False, "limit": 7.0}
    assert read(Op.DSV4_HC_PRE, 0.25, 1) == {"gated": True, "scale": 0.25}
    assert read(Op.DSV4_HC_PRE) == {"gated": False, "scale": 1.0}  # of 0.21, without parameters
    assert read(Op.PAD, 1, 2, 3, 4, 5, 6, 7, 8, 1) == {
        "left": (1, 3, 5, 7), "right": (2, 4, 6, 8), "circular": True,
    }  # fmt: skip
    assert read(Op.MUL_MAT, 10)["prec"] is Prec.F32
    assert read(Op.MUL_MAT, 20)["prec"] is Prec.DEFAULT  # allows f16: no demand
    assert read(Op.MUL_MAT, 0, 1, 0, 30)["prec_src1"] == Prec.Q8
    assert read(Op.MUL_MAT_ID, 0, 0, 0, 20) == {"prec": Prec.DEFAULT, "prec_src1": Prec.F16}
    ctx = Context()
    product = ctx.mul_mat(*(ctx.new_tensor("f32", (4, n)) for n in (3, 2)))
    node = ctx.prec_set_src(product, "f16", 1)
    assert encode(node, {}, {}) == struct.pack("=4i", 0, 0, 0, 20)
    rope = read(Op.ROPE, 0, 64, 2, 0, 4096, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0, 1, 2, 3, 4, 9)
    assert (rope["n_dims"], rope["mode"], rope["freq_base"]) == (64, RopeType.NEOX, 1e4)
    assert (rope["beta_slow"], rope["sections"], rope["offset"]) == (1.0, (1, 2, 3, 4), 9)


def test_what_ggmlb_has_no_words_for_is_declined() -> None:
    with pytest.raises(LookupError, match="no gated linear unit 7"):
        read(Op.GLU, 7)
