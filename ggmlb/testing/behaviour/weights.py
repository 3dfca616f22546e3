"""Checks of weight memories: extra buffer types, and rows split over devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Final

import numpy as np
import numpy.typing as npt

from ggmlb.core import dtypes
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import BufferUsage
from ggmlb.core.errors import AllocationError, BackendError, BoundsError, FreedError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import BufferType, tensor_copy, tensor_copy_async
from ggmlb.runtime.alloc import alloc_ctx_tensors, alloc_tensors
from ggmlb.runtime.scheduler import Scheduler
from ggmlb.testing.behaviour.rig import Rig, check, expect, expect_equal, expect_error, unsupported
from ggmlb.testing.devices import weight_memories

K, N = 512, 3
TYPES: Final = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
KINDS: Final = (
    *((DType[name], 80) for name in TYPES),
    *((dtype, 70) for dtype in (DType.F32, DType.F16, DType.Q8_0, DType.Q4_0, DType.Q4_K)),
)
"""Types of weights and numbers of rows; memory may interleave groups of rows."""
Kind = tuple[DType, int]
PIECES: Final = ((40, None), (0, 1), (3, 40), (1, 3))
"""Row ranges written one after the other: start, stop."""
TOLERANCE: Final = 0.03
"""Allowed error of a product of 512 terms, with activations rounded to 8 bits."""


def _memories(rig: Rig) -> list[BufferType]:
    found = weight_memories(rig.device)
    if not found:
        unsupported("the device has no extra memory for weights")
    return found


@cache
def _blocks(kind: Kind, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return the bytes of a random matrix."""
    dtype, m = kind
    values = np.random.default_rng((int(dtype), seed)).uniform(-0.2, 1, (m, K)).astype(np.float32)
    return dtypes.quantize(values, dtype).view(np.uint8).reshape(-1)


def _weights(rig: Rig, buft: BufferType, kind: Kind, n: int = 1) -> list[Tensor]:
    """Return adjacent matrices in memory of a type."""
    ctx = Context()
    dtype, m = kind
    tensors = [ctx.new_tensor(dtype, (K, m), f"w{i}") for i in range(n)]
    rig.keep(alloc_tensors(tensors, buft)).usage = BufferUsage.WEIGHTS
    return tensors


def _expect_product(rig: Rig, weight: Tensor, blocks: npt.NDArray[np.uint8], what: str) -> bool:
    """Compare a product with NumPy's of the same blocks; return false if the device declines it."""
    ctx = Context()
    x = ctx.new_tensor(DType.F32, (K, N), "x")
    y = ctx.mul_mat(weight, x)
    if not rig.device.supports_op(y):
        return False
    rig.keep(alloc_ctx_tensors(ctx, rig.stream))
    _compare(x, weight, blocks, what, partial(rig.stream.graph_compute, Graph().build_forward_expand(y)), y)
    return True


def _compare(
    x: Tensor,
    weight: Tensor,
    blocks: npt.NDArray[np.uint8],
    what: str,
    compute: Callable[[], object],
    y: Tensor,
) -> None:
    values = np.random.default_rng(7).uniform(-0.2, 1, (N, K)).astype(np.float32)
    x.set_array(values)
    compute()
    matrix = dtypes.dequantize(blocks.reshape(weight.ne[1], -1), weight.dtype).astype(np.float64)
    right = values @ matrix.T
    wrong = np.abs(y.to_numpy() - right) / np.abs(right)
    wrong[~np.isfinite(wrong)] = np.inf
    row = int(wrong.max(axis=0).argmax())
    expect(
        float(wrong.max()) < TOLERANCE,
        f"{what}: row {row} of the product with {weight.describe()} is {y.to_numpy()[:, row]}, "
        f"{right[:, row]} is right",
    )


def _expect_bytes(weight: Tensor, blocks: npt.NDArray[np.uint8], what: str) -> None:
    """Compare a weight's bytes; memory that cannot be read back must raise `BackendError`."""
    try:
        got = weight.get()
    except BackendError:
        return
    expect_equal(got, blocks, f"{what}: the bytes of {weight.describe()}")


@check("weights")
def memory_for_weights_is_sound(rig: Rig) -> None:
    """Each kind of memory for weights has a unique name, and the device can use it."""
    names = {rig.device.buffer_type.name}
    for buft in _memories(rig):
        expect(buft.name not in names, f"two kinds of memory are named {buft.name}")
        names.add(buft.name)
        step = buft.alignment
        expect(step > 0 and step & (step - 1) == 0, f"the alignment of {buft.name} is {step}")
        expect(rig.device.supports_buft(buft), f"the device cannot use its {buft.name} memory")
        expect(buft.device is rig.device, f"{buft.name} memory belongs to {buft.device.name}")


@check("weights")
def weights_give_right_products(rig: Rig) -> None:
    """Products with a weight are right in each weight buffer type; reading gives its bytes, or raises."""
    for buft in _memories(rig):
        taken = 0
        for kind in KINDS:
            (weight,) = _weights(rig, buft, kind)
            blocks = _blocks(kind)
            weight.set(blocks)
            taken += _expect_product(rig, weight, blocks, buft.name)
            _expect_bytes(weight, blocks, buft.name)
        expect(taken > 0, f"no product reads {buft.name} memory")


@check("weights")
def weights_are_written_by_rows(rig: Rig) -> None:
    """Rows of a weight can be written in any order; rows not written keep their values."""
    for buft in _memories(rig):
        for kind in KINDS:
            (weight,) = _weights(rig, buft, kind)
            weight.set(_blocks(kind, 1))
            rows = _blocks(kind, 2).reshape(kind[1], -1)
            blocks, row = rows.reshape(-1), rows.shape[1]
            for first, last in PIECES:
                weight.set(rows[first:last], first * row)
            _expect_product(rig, weight, blocks, f"{buft.name}, written by rows")
            _expect_bytes(weight, blocks, f"{buft.name}, written by rows")
            expect_error(
                BoundsError,
                partial(weight.set, np.zeros(row, np.uint8), weight.nbytes),
                f"a write beyond a weight in {buft.name} memory",
            )


@check("weights")
def weights_do_not_touch_each_other(rig: Rig) -> None:
    """Adjacent weights in one buffer are written independently."""
    for buft in _memories(rig):
        for kind in KINDS:
            weights = _weights(rig, buft, kind, 3)
            for i in (1, 0, 2):
                weights[i].set(_blocks(kind, i))
            weights[1].set(_blocks(kind, 9))
            for i, seed in ((0, 0), (1, 9), (2, 2)):
                told = f"{buft.name}, weight {i} of 3"
                _expect_product(rig, weights[i], _blocks(kind, seed), told)
                _expect_bytes(weights[i], _blocks(kind, seed), told)


@check("weights")
def weights_are_copied_in(rig: Rig) -> None:
    """A weight can be copied from CPU and device memory; and back, if its memory can be read back."""
    cpu, other = rig.cpu(), rig.new_stream()
    for buft in _memories(rig):
        for kind in KINDS:
            (weight,), blocks = _weights(rig, buft, kind), _blocks(kind, 4)
            for near, where in ((cpu, "the CPU"), (rig.stream, "the device")):
                source, back = (rig.tensor(kind[0], K, kind[1], stream=near) for _ in range(2))
                source.set(blocks)
                weight.memset(0)
                tensor_copy(source, weight)
                what = f"{buft.name}, copied from {where}"
                _expect_product(rig, weight, blocks, what)
                _expect_bytes(weight, blocks, what)
                told = f"the bytes of {weight.describe()} in {buft.name}, copied to {where}"
                try:
                    tensor_copy(weight, back)
                except BackendError:  # it cannot be read back
                    continue
                expect_equal(back.get(), blocks, told)
                back.memset(0)
                again, last = _weights(rig, buft, kind, 2)
                tensor_copy_async(rig.stream, other, weight, again)
                tensor_copy_async(other, rig.stream, again, last)
                tensor_copy_async(rig.stream, near, last, back)
                for stream in (rig.stream, other, near):
                    stream.synchronize()
                expect_equal(back.get(), blocks, f"{told} as it was queued")


@check("weights")
def any_bytes_of_weights_are_written_and_read(rig: Rig) -> None:
    """Any range of a weight's bytes can be read and written, if its memory can be read back."""
    for buft in _memories(rig):
        for kind in KINDS:
            (weight,) = _weights(rig, buft, kind)
            weight.set(_blocks(kind))
            try:
                weight.get()
            except BackendError:  # it cannot be read back
                continue
            blocks = _blocks(kind).copy()
            weight.set(blocks[:200], 1003)
            blocks[1003:1203] = blocks[:200]
            weight.memset(7, 31, 500)
            blocks[31:531] = 7
            rig.stream.set_tensor_async(weight, blocks[900:990], 4000)
            blocks[4000:4090] = blocks[900:990]
            rig.stream.synchronize()
            what = f"{buft.name}, written within rows"
            _expect_bytes(weight, blocks, what)
            out = np.empty(777, np.uint8)
            rig.stream.get_tensor_async(weight, out, 101)
            rig.stream.synchronize()
            expect_equal(out, blocks[101:878], f"{what}: some bytes of {weight.describe()}")


@check("weights")
def a_scheduler_leaves_products_where_weights_are(rig: Rig) -> None:
    """A scheduler runs a product on the device whose memory holds the weight."""
    others = [] if rig.device.name == "CPU" else [rig.cpu()]
    for buft in _memories(rig):
        for kind in KINDS:
            (weight,) = _weights(rig, buft, kind)
            ctx = Context()
            x = ctx.set_input(ctx.new_tensor(DType.F32, (K, N), "x"))
            y = ctx.mul_mat(weight, x)
            if not rig.device.supports_op(y):
                continue
            blocks, graph = _blocks(kind, 5), Graph().build_forward_expand(y)
            weight.set(blocks)
            with Scheduler([rig.stream, *others]) as scheduler:
                scheduler.alloc_graph(graph)
                (placed,) = scheduler.placement
                expect(placed.device == rig.device.name, f"the product runs on {placed.device}")
                what = f"{buft.name}, in a scheduler"
                _compare(x, weight, blocks, what, partial(scheduler.graph_compute, graph), y)


@check("weights")
def weight_allocation_errors(rig: Rig) -> None:
    """A too large weight raises `AllocationError`; access to a freed weight raises `FreedError`."""
    for buft in _memories(rig):
        huge = Context().new_tensor(DType.F32, (1 << 30, 1 << 20), "huge")
        expect_error(AllocationError, partial(alloc_tensors, [huge], buft), f"{huge.nbytes} bytes")
        expect(huge.buffer is None, "a weight that could not be placed has a buffer")
        kind = DType.F16, 80
        (weight,) = _weights(rig, buft, kind)
        weight.placed("free").free()
        expect_error(FreedError, partial(weight.set, _blocks(kind)), "a write to a freed weight")
        expect_error(FreedError, weight.get, "a read of a freed weight")
