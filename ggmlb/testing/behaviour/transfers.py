"""Checks of transfers: the right bytes, and no others, are read and written."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np
import numpy.typing as npt

from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.errors import BoundsError
from ggmlb.core.tensor import Tensor
from ggmlb.interface import tensor_alloc, tensor_copy
from ggmlb.testing.behaviour.rig import Rig, check, expect, expect_equal, expect_error, numbers
from ggmlb.testing.guarded import poison

N = 1000
PIECES = ((0, N), (0, 1), (1, 1), (3, 5), (127, 258), (N - 1, 1), (N - 7, 7))
"""Unaligned offsets and sizes [bytes]."""


def _bytes(n: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def _expect_written(
    rig: Rig, call: str, write: Callable[[Tensor], None], data: npt.NDArray[np.uint8], offset: int
) -> None:
    """Write to a tensor among others, and compare all bytes of their buffer."""
    _before, tensor, _after = rig.neighbours(N)
    whole = rig.over(tensor.placed(call))
    image = poison(whole.nbytes).copy()
    whole.set(image)
    write(tensor)
    start = tensor.offset + offset
    image[start : start + data.size] = data
    expect_equal(whole.get(), image, f"the buffer after {call} of {data.size} bytes at {offset}")


@check("transfers")
def set_writes_its_bytes_only(rig: Rig) -> None:
    """`set_tensor` at any offset writes its bytes and no others."""
    for offset, size in PIECES:
        data = _bytes(size, offset)
        _expect_written(rig, "set_tensor", partial(Tensor.set, data=data, offset=offset), data, offset)


@check("transfers")
def get_reads_from_its_offset(rig: Rig) -> None:
    """`get_tensor` at any offset returns the bytes from there."""
    _, tensor, _ = rig.neighbours(N)
    data = _bytes(N)
    tensor.set(data)
    for offset, size in PIECES:
        expect_equal(tensor.get(offset, size), data[offset : offset + size], f"{size} bytes from {offset}")


@check("transfers")
def memset_writes_its_bytes_only(rig: Rig) -> None:
    """`memset_tensor` sets its bytes and no others."""
    for offset, size in PIECES:
        data = np.full(size, 0x5A, np.uint8)
        memset = partial(Tensor.memset, value=0x5A, offset=offset, size=size)
        _expect_written(rig, "memset", memset, data, offset)


@check("transfers")
def clear_sets_every_byte(rig: Rig) -> None:
    """`clear` sets every byte of a buffer."""
    for size in (1, 255, N, 4096):
        buffer = rig.keep(rig.stream.alloc_buffer(size))
        whole = rig.over(buffer)
        whole.set(poison(size))
        buffer.clear(0x3C)
        expect_equal(whole.get(), np.full(size, 0x3C, np.uint8), f"a buffer of {size} bytes after clear")


@check("transfers")
def two_dimensional_transfers(rig: Rig) -> None:
    """`set_tensor_2d` and `get_tensor_2d` move pieces, and leave the bytes between them."""
    size, n, stride_data, offset = 24, 7, 33, 5
    for is_async, stride_tensor in product((False, True), (24, 40)):
        _, tensor, _ = rig.neighbours(N)
        where, suffix = (rig.stream, "_async") if is_async else (tensor.placed("set_tensor_2d"), "")
        image = poison(N).copy()
        tensor.set(image)
        data = _bytes(n * stride_data)
        args = (offset, size, n, stride_tensor, stride_data)
        getattr(where, f"set_tensor_2d{suffix}")(tensor, data, *args)
        rig.stream.synchronize()
        for i in range(n):
            image[offset + i * stride_tensor :][:size] = data[i * stride_data :][:size]
        expect_equal(tensor.get(), image, f"the tensor after set_tensor_2d{suffix}")
        out = np.full(n * stride_data, 0x77, np.uint8)
        right = out.copy()
        for i in range(n):
            right[i * stride_data :][:size] = image[offset + i * stride_tensor :][:size]
        getattr(where, f"get_tensor_2d{suffix}")(tensor, out, *args)
        rig.stream.synchronize()
        expect_equal(out, right, f"the array after get_tensor_2d{suffix}")


@check("transfers")
def asynchronous_transfers(rig: Rig) -> None:
    """`set_tensor_async` and `get_tensor_async` move the same bytes as the synchronous calls."""
    _, tensor, _ = rig.neighbours(N)
    image = poison(N).copy()
    tensor.set(image)
    for offset, size in PIECES:
        data = _bytes(size, offset)
        rig.stream.set_tensor_async(tensor, data, offset)
        out = np.zeros(size, np.uint8)
        rig.stream.get_tensor_async(tensor, out, offset)
        rig.stream.synchronize()
        image[offset : offset + size] = data
        expect_equal(out, data, f"{size} bytes at {offset}, written and read asynchronously")
    expect_equal(tensor.get(), image, "the tensor after asynchronous writes")


@check("transfers")
def data_of_a_synchronous_write_may_change(rig: Rig) -> None:
    """The data given to a synchronous write may be changed as soon as the call returns."""
    n = 1 << 20
    tensor = rig.tensor(DType.F32, n)
    for start in (1, 2, 3):
        data = numbers(n, start)
        right = data.copy()
        tensor.set(data)
        data[:] = -1
        expect_equal(tensor.to_numpy(), right, "a tensor whose data was changed after set_tensor returned")


@check("transfers")
def data_of_an_asynchronous_write_is_kept(rig: Rig) -> None:
    """The array given to an asynchronous write may be dropped: the backend keeps it alive."""
    n = 1 << 18
    tensor = rig.tensor(DType.F32, n)
    rig.busy()
    rig.stream.set_tensor_async(tensor, numbers(n, 5))
    gc.collect()
    junk = [np.full(n, -1, np.float32) for _ in range(4)]  # reuse the memory of the array, if that was freed
    rig.stream.synchronize()
    del junk
    expect_equal(tensor.to_numpy(), numbers(n, 5), "a tensor whose data was dropped after set_tensor_async")


@check("transfers")
def copies_respect_offsets(rig: Rig) -> None:
    """A copy reads and writes at the offsets of its tensors, in one buffer, between two, and with the CPU."""
    here, other = rig.neighbours(N), rig.neighbours(N)
    host = Context().new_tensor(DType.I8, (N,), "host")
    cpu = rig.cpu()
    tensor_alloc(rig.keep(cpu.alloc_buffer(2 * N + 2 * cpu.alignment)), host, cpu.alignment)
    for tensor in (*here, *other, host):
        tensor.memset(0x11)
    data = _bytes(N)
    here[1].set(data)
    pairs = [(here[1], here[2]), (here[2], other[1]), (other[1], host), (host, other[2])]
    for src, dst in pairs:
        tensor_copy(src, dst)
        expect_equal(dst.get(), data, f"a copy from offset {src.offset} to offset {dst.offset}")
    for tensor in (here[0], other[0]):
        expect_equal(tensor.get(), np.full(N, 0x11, np.uint8), "a tensor beside the copies")


@check("transfers")
def beyond_the_end_is_refused(rig: Rig) -> None:
    """Reads and writes beyond a tensor's end raise `BoundsError` and change nothing."""
    _, tensor, after = rig.neighbours(N)
    after.memset(0x22)
    expect_error(BoundsError, lambda: tensor.set(_bytes(8), N - 7), "a write beyond the end")
    expect_error(BoundsError, lambda: tensor.get(N - 7, 8), "a read beyond the end")
    expect_error(BoundsError, lambda: tensor.memset(0, N - 7, 8), "a memset beyond the end")
    beyond = lambda: rig.stream.set_tensor_async(tensor, _bytes(8), N - 7)  # noqa: E731
    expect_error(BoundsError, beyond, "an asynchronous write beyond the end")
    rig.stream.synchronize()
    expect(bool((after.get() == 0x22).all()), "a refused write changed the next tensor")
