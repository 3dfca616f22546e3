"""Memory for weights, beside a device's own: extra buffer types, and rows that are split over devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from ggmlb import dtypes
from ggmlb.alloc import alloc_ctx_tensors, alloc_tensors
from ggmlb.context import Context
from ggmlb.dtypes import DType
from ggmlb.enums import BufferUsage
from ggmlb.errors import AllocationError, BackendError, BoundsError, FreedError
from ggmlb.graph import Graph
from ggmlb.interface import tensor_copy
from ggmlb.scheduler import Scheduler
from ggmlb.testing.behaviour.rig import Rig, check, expect, expect_equal, expect_error, unsupported
from ggmlb.testing.devices import weight_memories

if TYPE_CHECKING:
    from ggmlb.interface import BufferType
    from ggmlb.tensor import Tensor

K, M, N = 512, 70, 3
TYPES: Final = (DType.F32, DType.F16, DType.Q8_0, DType.Q4_0, DType.Q4_K)
PIECES: Final = ((40, M), (0, 1), (3, 40), (1, 3))
"""Rows that are written one after the other: from, up to."""
TOLERANCE: Final = 0.03
"""Error of a product's elements, of 512 terms each; activations may be rounded to 8 bits."""


def _memories(rig: Rig) -> list[BufferType]:
    found = weight_memories(rig.device)
    if not found:
        unsupported("the device has no memory for weights beside its own")
    return found


def _blocks(dtype: DType, seed: int = 0) -> npt.NDArray[np.uint8]:
    """A matrix's bytes."""
    values = np.random.default_rng((int(dtype), seed)).uniform(-0.2, 1, (M, K)).astype(np.float32)
    return dtypes.quantize(values, dtype).view(np.uint8).reshape(-1)


def _weights(rig: Rig, buft: BufferType, dtype: DType, n: int = 1) -> list[Tensor]:
    """Matrices side by side in memory of a type."""
    ctx = Context()
    tensors = [ctx.new_tensor(dtype, (K, M), f"w{i}") for i in range(n)]
    rig.keep(alloc_tensors(tensors, buft)).usage = BufferUsage.WEIGHTS
    return tensors


def _expect_product(rig: Rig, weight: Tensor, blocks: npt.NDArray[np.uint8], what: str) -> bool:
    """Compare a product with what NumPy makes of the same blocks; false if the device declines it."""
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
    matrix = dtypes.dequantize(blocks.reshape(M, -1), weight.dtype).astype(np.float64)
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
    """Compare a weight's bytes; memory that does not keep them says so by a `BackendError`."""
    try:
        got = weight.get()
    except BackendError:
        return
    expect_equal(got, blocks, f"{what}: the bytes of {weight.describe()}")


@check("weights")
def memory_for_weights_is_sound(rig: Rig) -> None:
    """Each kind of memory for weights has a name of its own, and is one that the device can use."""
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
    """A weight gives the right products from memory for weights, and its bytes come back or are refused."""
    for buft in _memories(rig):
        taken = 0
        for dtype in TYPES:
            (weight,) = _weights(rig, buft, dtype)
            blocks = _blocks(dtype)
            weight.set(blocks)
            taken += _expect_product(rig, weight, blocks, buft.name)
            _expect_bytes(weight, blocks, buft.name)
        expect(taken > 0, f"no product reads {buft.name} memory")


@check("weights")
def weights_are_written_by_rows(rig: Rig) -> None:
    """Rows of a weight can be written in any order; the others stay as they are."""
    for buft in _memories(rig):
        for dtype in TYPES:
            (weight,) = _weights(rig, buft, dtype)
            weight.set(_blocks(dtype, 1))
            blocks, row = _blocks(dtype, 2), dtype.row_size(K)
            for first, last in PIECES:
                weight.set(blocks[first * row : last * row], first * row)
            _expect_product(rig, weight, blocks, f"{buft.name}, written by rows")
            _expect_bytes(weight, blocks, f"{buft.name}, written by rows")
            expect_error(
                BoundsError,
                partial(weight.set, np.zeros(row, np.uint8), weight.nbytes),
                f"a write beyond a weight in {buft.name} memory",
            )


@check("weights")
def weights_do_not_touch_each_other(rig: Rig) -> None:
    """Weights that lie side by side in one buffer are written each by itself."""
    for buft in _memories(rig):
        for dtype in TYPES:
            weights = _weights(rig, buft, dtype, 3)
            for i in (1, 0, 2):
                weights[i].set(_blocks(dtype, i))
            weights[1].set(_blocks(dtype, 9))
            for i, seed in ((0, 0), (1, 9), (2, 2)):
                told = f"{buft.name}, weight {i} of 3"
                _expect_product(rig, weights[i], _blocks(dtype, seed), told)
                _expect_bytes(weights[i], _blocks(dtype, seed), told)


@check("weights")
def weights_are_copied_in(rig: Rig) -> None:
    """A weight can be copied from host memory, and out again where the memory keeps its bytes."""
    cpu = rig.cpu()
    for buft in _memories(rig):
        for dtype in TYPES:
            (weight,) = _weights(rig, buft, dtype)
            source, back = (rig.tensor(dtype, K, M, stream=cpu) for _ in range(2))
            blocks = _blocks(dtype, 4)
            source.set(blocks)
            weight.memset(0)
            tensor_copy(source, weight)
            _expect_product(rig, weight, blocks, f"{buft.name}, copied from the CPU")
            _expect_bytes(weight, blocks, f"{buft.name}, copied from the CPU")
            try:
                tensor_copy(weight, back)
            except BackendError:
                continue
            expect_equal(back.get(), blocks, f"the bytes of {weight.describe()} after a copy to the CPU")


@check("weights")
def a_scheduler_leaves_products_where_weights_are(rig: Rig) -> None:
    """A scheduler gives a product to the device in whose memory for weights the weight lies."""
    others = [] if rig.device.name == "CPU" else [rig.cpu()]
    for buft in _memories(rig):
        for dtype in TYPES:
            (weight,) = _weights(rig, buft, dtype)
            ctx = Context()
            x = ctx.set_input(ctx.new_tensor(DType.F32, (K, N), "x"))
            y = ctx.mul_mat(weight, x)
            if not rig.device.supports_op(y):
                continue
            blocks, graph = _blocks(dtype, 5), Graph().build_forward_expand(y)
            weight.set(blocks)
            with Scheduler([rig.stream, *others]) as scheduler:
                scheduler.alloc_graph(graph)
                (placed,) = scheduler.placement
                expect(placed.device == rig.device.name, f"the product runs on {placed.device}")
                what = f"{buft.name}, in a scheduler"
                _compare(x, weight, blocks, what, partial(scheduler.graph_compute, graph), y)


@check("weights")
def memory_for_weights_ends(rig: Rig) -> None:
    """What is too large for memory for weights is an `AllocationError`; what was freed, a `FreedError`."""
    for buft in _memories(rig):
        huge = Context().new_tensor(DType.F32, (1 << 30, 1 << 20), "huge")
        expect_error(AllocationError, partial(alloc_tensors, [huge], buft), f"{huge.nbytes} bytes")
        expect(huge.buffer is None, "a weight that could not be placed has a buffer")
        (weight,) = _weights(rig, buft, DType.F16)
        assert weight.buffer is not None
        weight.buffer.free()
        expect_error(FreedError, partial(weight.set, _blocks(DType.F16)), "a write to a freed weight")
        expect_error(FreedError, weight.get, "a read of a freed weight")
