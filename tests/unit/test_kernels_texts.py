"""Kernel texts and launches: what can be said of them without a device."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import ggmlb.backends.gpu
from ggmlb import Context, DType, Graph
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu import Target, declines, families, lower, source
from ggmlb.backends.gpu.launch import flattened, row_length
from ggmlb.backends.gpu.source import _param, kernels
from ggmlb.core.errors import BackendBroken
from tests.support.golden import CASES

FOLDER = Path(ggmlb.backends.gpu.__file__).parent / "kernels"
GPU, CPU = Target(False, 2, 128), Target(True, 2, 1)


def claimed_launches(target: Target) -> list[ggmlb.backends.gpu.Launch]:
    nodes = [node for case in CASES for node in case.build().graph.nodes if declines(node) is None]
    return [launch for node in nodes for launch in lower(node, target)]


def test_parameter_lists_are_read_from_the_text() -> None:
    soft_max = kernels()["soft_max"]
    assert soft_max.family == "softmax"
    assert [(p.kind, p.name) for p in soft_max.params][:6] == [
        ("tensor", "a"), ("tensor", "m"), ("tensor", "s"), ("tensor", "d"),
        ("float", "scale"), ("float", "max_bias"),
    ]  # fmt: skip
    n_heads = re.findall(r"^KERNEL ", "".join((FOLDER / f"{f}.knl").read_text() for f in families()), re.M)
    assert len(n_heads) == len(kernels())
    with pytest.raises(BackendBroken, match="double x"):
        _param("k", "double x")


@pytest.mark.parametrize("language", ["opencl", "cuda"])
def test_a_source_holds_one_kernel_and_each_header_once(language: ggmlb.backends.gpu.source.Language) -> None:
    for kernel in kernels().values():
        text = source(kernel, language)
        assert re.findall(r"^KERNEL (\w+)", text, re.M) == [kernel.name]
        assert "#include" not in text
        assert text.count("#define ROW(x, i1, i2, i3)") == 1


def test_no_two_places_share_six_lines() -> None:
    seen: dict[tuple[str, ...], str] = {}
    for file in sorted([*FOLDER.glob("*.knl"), *FOLDER.glob("*.h")]):
        lines = [" ".join(line.split()) for line in file.read_text().splitlines() if len(line.strip()) > 3]
        for i in range(len(lines) - 5):
            block = tuple(lines[i : i + 6])
            assert block not in seen, f"{file.name} repeats {seen[block]}:\n" + "\n".join(block)
            seen[block] = file.name


def test_every_kernel_is_reached_from_the_golden_programs() -> None:
    reached = {launch.kernel.name for target in (GPU, CPU) for launch in claimed_launches(target)}
    assert reached == set(kernels())


@pytest.mark.parametrize("target", [GPU, CPU], ids=["gpu", "cpu"])
def test_launches_fit_their_kernels(target: Target) -> None:
    for launch in claimed_launches(target):
        assert all(
            isinstance(a, Mem) == (p.kind == "tensor")
            for a, p in zip(launch.args, launch.kernel.params, strict=True)
        )
        assert min(launch.groups) >= 1
        assert launch.wg == 1 or launch.wg % 32 == 0
        names = [name for name, _ in launch.defines]
        assert names == sorted(set(names))


def test_dimensions_are_merged_where_strides_allow() -> None:
    ctx = Context()
    a = Mem.of(ctx.new_tensor(DType.F32, (8, 4, 3, 2)))
    (whole,) = flattened(GPU, [a])
    assert (whole.ne, whole.nb[0]) == ((192, 1, 1, 1), 4)
    row = Mem.of(ctx.new_tensor(DType.F32, (8,))).tiled_to(a.ne)
    first, second = flattened(GPU, [a, row])
    assert first.ne == (8, 24, 1, 1)
    assert second.nb == (4, 0, 0, 0)
    swapped = Mem.of(ctx.permute(ctx.new_tensor(DType.F32, (4, 8, 3, 2)), 1, 0, 2, 3))
    assert [m.ne for m in flattened(GPU, [swapped, a])] == [(8, 4, 6, 1)] * 2


def test_long_rows_are_cut_for_cores() -> None:
    assert row_length(1000) == 1000
    assert row_length(1 << 20) == 4096
    assert row_length(384 * 31) == 384 * 31 // 3
    assert row_length(384 * 640) == 4096
    assert row_length(65537) == 65537  # a prime
    ctx = Context()
    (m,) = flattened(CPU, [Mem.of(ctx.new_tensor(DType.F32, (8192, 4)))])
    assert m.ne == (4096, 8, 1, 1)
    assert m.nb[1] == 4 * 4096


def test_an_empty_result_needs_no_launch() -> None:
    ctx = Context()
    y = ctx.relu(ctx.new_tensor(DType.F32, (4, 0)))
    assert declines(y) is None
    assert lower(y, GPU) == []


def test_reasons_name_the_operand() -> None:
    ctx = Context()
    w = ctx.new_tensor(DType.F32, (8, 8), "w")
    x = ctx.new_tensor(DType.F32, (8, 8), "x")
    assert declines(ctx.mul_mat(w, x)) is None
    why = declines(ctx.mul_mat(w, ctx.transpose(x)))
    assert why is not None
    assert "x (transposed)" in why
    assert "apply cont" in why
    double = ctx.new_tensor(DType.F64, (8,), "u")
    assert declines(ctx.relu(double)) == "src0 ('u') is f64: only f32, f16 and bf16"
    custom = ctx.map_custom1(x, lambda *_: None, 1, None)
    assert declines(custom) == "no kernel for MAP_CUSTOM1"


def test_more_elements_than_an_index_counts_are_declined() -> None:
    ctx = Context()
    assert declines(ctx.relu(ctx.new_tensor(DType.F32, (1 << 20, (1 << 11) - 1)))) is None
    why = declines(ctx.relu(ctx.new_tensor(DType.F32, (1 << 20, 1 << 11), "big")))
    assert why is not None
    assert "'big'" in why or "RELU" in why
    assert "more than 2147483647 elements" in why


def test_declining_is_fast() -> None:
    import timeit

    ctx = Context()
    x = ctx.new_tensor(DType.F32, (8, 8))
    nodes = [
        ctx.mul_mat(x, x),
        ctx.add(x, x),
        ctx.norm(x, 1e-5),
        ctx.soft_max(x),
        ctx.cont(x),
        ctx.view_1d(x, 4),
    ]
    Graph().build_forward_expand(*nodes)
    times = timeit.repeat(lambda: [declines(n) for n in nodes], number=200, repeat=7)
    assert min(times) / 200 / len(nodes) < 20e-6  # some 1 us on a quiet machine


def test_extents_of_neighbours_are_not_mixed_up() -> None:
    ctx = Context()
    a = ctx.new_tensor(DType.F32, (6, 4, 3, 2))
    y = ctx.pad_ext(a, 1, 2, 0, 3, 1, 1, 0, 1)
    (launch,) = lower(y, GPU)
    assert launch.args[2:] == (1, 0, 1, 0)
    ends = [m.ne for m in launch.args if isinstance(m, Mem)]
    assert [b >= a for a, b in pairwise(ends)] == [True]
