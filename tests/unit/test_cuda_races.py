"""What the PTX machine must find in kernels, and that it finds nothing in ours.

Races, accesses out of bounds, barriers that not all threads reach: a card forgives these at random. OpenCL's
devices have the same texts, so that the portable kernels are shown here for all of them.
"""

from __future__ import annotations

import sys
import zlib
from importlib import resources

import pytest

from ggmlb import Context, DType
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import RULES, Kernel, Param
from ggmlb.backends.gpu.launch import launch
from ggmlb.backends.gpu.source import kernels
from tests.support.golden import CASES, FAMILIES
from tests.support.ptx import BACKWARD, FORWARD, Memory, PtxError
from tests.support.ptx.machine import why_not
from tests.support.ptx.mutants import Mutant, found, mutants, texts
from tests.support.ptx.programs import CARD, PROGRAMS, golden
from tests.support.ptx.runner import place

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

ORDERS = (FORWARD, BACKWARD)
HERE, NEXT = "s[LOCAL_ID]", "s[(LOCAL_ID + 1) % WG]"

# What a kernel does with shared memory s, d, and a, which it may only read: each has 64 floats.
FAULTS = {
    "a barrier left out": (
        f"{HERE} = 1.0f; ST(d, LOCAL_ID, 0, 0, 0, {NEXT});",
        "reads 4 bytes .s,.* (its warp|its block)|nothing has written",
    ),
    "a barrier left out before the next write": (
        f"{HERE} = 1.0f; BARRIER(); float x = {NEXT}; {HERE} = x;",
        "(writes|reads) 4 bytes .s,.* (reads|writes), and nothing orders",
    ),
    "a barrier of the warp for more than a warp": (
        f"{HERE} = 1.0f; __syncwarp(); ST(d, LOCAL_ID, 0, 0, 0, s[LOCAL_ID ^ 32]);",
        "of its block writes|nothing has written",
    ),
    "a shuffle for a barrier": (
        f"{HERE} = 1.0f; __shfl_xor_sync(0xffffffffu, 1, 1); ST(d, LOCAL_ID, 0, 0, 0, s[LOCAL_ID ^ 1]);",
        "of its warp writes|nothing has written",
    ),
    "two threads that write the same": (
        "s[LOCAL_ID/2] = 1.0f; BARRIER(); ST(d, LOCAL_ID, 0, 0, 0, s[LOCAL_ID/2]);",
        "writes 4 bytes .s,.* of its warp writes",
    ),
    "two threads that write the same of a tensor": (
        "ST(d, LOCAL_ID/2, 0, 0, 0, 1.0f);", "of its warp writes"
    ),
    "two blocks that write the same": (
        "if (LOCAL_ID == 0) ST(d, 0, 0, 0, 0, 1.0f);", "of another block writes"
    ),
    "a block that reads what another writes": (
        "if (LOCAL_ID == 0) ST(d, GROUP_ID(0), 0, 0, 0, LD(d, 1 - GROUP_ID(0), 0, 0, 0));",
        "of another block",
    ),
    "a copy that is not waited for": (
        "if (LOCAL_ID == 5) copy16_async(s, a_buf, true); copy_commit(); BARRIER();"
        "ST(d, LOCAL_ID, 0, 0, 0, s[0]);",
        "not waited for",
    ),
    "a copy for all that one thread has waited for": (
        "if (LOCAL_ID == 0) {copy16_async(s, a_buf, true); copy_commit(); copy_commit();"
        "copy_wait_but<1>();}"
        "if (LOCAL_ID == 1) ST(d, 1, 0, 0, 0, s[0]);",
        "of its warp writes|nothing has written",
    ),
    "memory that nothing has written": (f"ST(d, LOCAL_ID, 0, 0, 0, {HERE});", "nothing has written"),
    "a barrier that not all reach": (
        "if (LOCAL_ID < 5) BARRIER(); else WG_REDUCE_ADD(1.0f, s);", "others never reach|different barriers"
    ),
    "barriers that differ": ("if (LOCAL_ID < 32) BARRIER(); else BARRIER();", "wait at different barriers"),
    "part of a warp": ("if (LOCAL_ID < 5) __syncwarp();", "others never reach"),
    "outside of a tensor": ("ST(d, 64, 0, 0, 0, 1.0f);", "writes 4 bytes .* outside of all tensors"),
    "before a tensor": (
        "ST(d, LOCAL_ID, 0, 0, 0, LD(a, -1, 0, 0, 0));", "reads 4 bytes .* outside of all tensors"
    ),
    "far outside": ("ST(d, 1 << 24, 0, 0, 0, 1.0f);", "outside of all tensors"),
    "a tensor to read": ("ST_AT(d, (char *)AT(a, LOCAL_ID, 0, 0, 0), 1.0f);", "given to read"),
    "misaligned": ("*(GLOBAL uint4 *)(d_buf + d_off + 4) = make_uint4(0, 0, 0, 0);", "misaligned access"),
    "an index of shared memory": (
        f"s[LOCAL_ID + d_ne0] = 1.0f; BARRIER(); ST(d, LOCAL_ID, 0, 0, 0, {HERE});",
        "outside of all shared arrays",
    ),
    "a pointer into shared memory": (
        f"float *p = s + LOCAL_ID + 1; *p = 1.0f; BARRIER(); ST(d, LOCAL_ID, 0, 0, 0, {HERE});",
        "outside of all shared arrays",
    ),
    "a pointer far into shared memory": (
        f"float *p = s + 65*LOCAL_ID; *p = 1.0f; BARRIER(); ST(d, LOCAL_ID, 0, 0, 0, {HERE});",
        "outside of all shared arrays",
    ),
}  # fmt: skip

RIGHT = {
    "a barrier": f"{HERE} = 1.0f; BARRIER(); float x = {NEXT}; BARRIER(); {HERE} = x;",
    "a barrier of the warp":
    f"{HERE} = 1.0f; __syncwarp(); float x = s[LOCAL_ID ^ 1]; __syncwarp(); {HERE} = x;",
    "a copy":
    "if (LOCAL_ID < 16) copy16_async((uint4 *)s + LOCAL_ID, a_buf, true); copy_commit(); copy_commit();"
    f"copy_wait_but<1>(); BARRIER(); ST(d, LOCAL_ID, 0, 0, 0, {HERE});",
    "a reduction": "float x = WG_REDUCE_ADD(1.0f, s); x += WG_REDUCE_ADD(x, s); ST(d, LOCAL_ID, 0, 0, 0, x);",
}  # fmt: skip


def run_planted(body: str, monkeypatch: pytest.MonkeyPatch, order: bool, groups: int) -> None:
    """Run a kernel with such a body."""
    texts = sys.modules["ggmlb.backends.gpu.source"]
    text = (
        '#include "tensors.h"\nKERNEL planted(IN(a), OUT(d))\n{\n'
        f"    LOCAL_ARRAY(float, s, WG);\n    {body}\n}}\n"
    )
    family = f"planted_{zlib.crc32(body.encode())}"
    monkeypatch.setattr(
        texts, "_text", lambda p, f, real=texts._text: text if f == f"{family}.knl" else real(p, f)
    )
    ctx = Context()
    a, d = (ctx.new_tensor(DType.F32, (64,)) for _ in "ad")
    place(ctx)
    kernel = Kernel("planted", family, (Param("tensor", "a"), Param("tensor", "d")))
    Memory().run(launch(kernel, [Mem.of(a), Mem.of(d)], (groups, 1, 1), 64), order)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_in_every_order(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, reason = FAULTS[fault]
    for order in ORDERS:
        with pytest.raises(PtxError, match=reason):
            run_planted(body, monkeypatch, order, 2 if "block" in fault else 1)


@pytest.mark.parametrize("body", RIGHT)
def test_what_is_right_is_left_alone(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for order in ORDERS:
        run_planted(RIGHT[body], monkeypatch, order, 1)


def test_a_fault_is_told_with_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    body = f"{HERE} = 1.0f; BARRIER();\n    const float here = {NEXT};\n    {HERE} = here + 1.0f;"
    with pytest.raises(PtxError) as told:
        run_planted(body, monkeypatch, FORWARD, 1)
    assert "const float here = s[(LOCAL_ID + 1) % WG];" in str(told.value)
    assert "s[LOCAL_ID] = here + 1.0f;" in str(told.value)


HERE_ONLY = [name for name in PROGRAMS if not name.startswith("attention")]
"""The rest is in `test_cuda_kernels.py`."""


@pytest.mark.parametrize("program", HERE_ONLY)
def test_our_kernels_have_none(program: str) -> None:
    assert texts(program)


def test_every_kernel_with_shared_memory_is_run() -> None:
    """By the programs above: those of the texts that have such memory, but for one that only CPUs run."""
    run = {kernel.name for program in HERE_ONLY for kernel, _, _ in texts(program)}
    sharing = set()
    for name, kernel in kernels().items():
        text = (resources.files(kernel.package) / f"{kernel.family}.knl").read_text(encoding="utf-8")
        body = text[text.index(f"KERNEL {name}(") :]
        body = body[: body.index("\n}\n")]
        if any(word in body for word in ("LOCAL_ARRAY", "BARRIER", "TILES", "ROW_BEGIN", "MOVE_ROWS")):
            sharing.add(name)
    assert sharing - run == {"mul_mat_panel", "mul_mat_id_panel"}


@pytest.mark.slow
@pytest.mark.parametrize("wg", [CARD.wg, 32])
@pytest.mark.parametrize("family", FAMILIES)
def test_golden_programs_have_none(family: str, wg: int) -> None:
    """By the portable kernels, and by CUDA's own where there are."""
    for case in CASES:
        if case.family == family and not any(RULES.declines(node) for node in case.build().graph.nodes):
            golden(case.id, wg, own=wg == CARD.wg)


@pytest.mark.parametrize("mutant", mutants(), ids=str)
def test_every_barrier_is_needed_and_missed(mutant: Mutant) -> None:
    assert found(mutant), "nothing fails without it: either no program needs it, or none would tell"
