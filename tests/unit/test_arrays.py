"""Arrays in and out: whose memory a tensor has, proved by writing on one side and reading on the other."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DType, Tensor

Array = np.ndarray[Any, Any]


def numbers(dtype: Any = "f4", *shape: int) -> Array:
    shape = shape or (3, 4)
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


# -- in ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f2", "f8", "i1", "i2", "i4", "i8", ml_dtypes.bfloat16])
def test_an_array_and_its_tensor_share_memory(dtype: Any) -> None:
    array = numbers(dtype)
    tensor = Context().from_array(array, array.dtype, copy=False, name="a")
    assert (tensor.ne, tensor.name, tensor.dtype.numpy) == ((4, 3, 1, 1), "a", array.dtype)
    assert tensor.nb == Context().new_tensor(tensor.dtype, tensor.ne).nb
    array[1, 2] = 100
    assert tensor.to_numpy()[1, 2] == 100
    tensor.memset(0)
    assert not array.any()


@pytest.mark.parametrize(
    "view",
    [lambda a: a.T, lambda a: a[:, ::2], lambda a: a[1:, 1:], lambda a: a[:, None], lambda a: a[:0]],
    ids=["transposed", "every second", "corner", "new axis", "empty"],
)
def test_a_strided_array_is_shared_as_it_lies(view: Callable[[Array], Array]) -> None:
    array = view(numbers())
    tensor = Context().from_array(array, copy=False)
    np.testing.assert_array_equal(tensor.to_numpy().reshape(array.shape), array)
    array[...] += 1
    np.testing.assert_array_equal(tensor.to_numpy().reshape(array.shape), array)
    np.testing.assert_array_equal(np.asarray(tensor).reshape(array.shape), array)


@pytest.mark.parametrize("shape", [(3,), (1, 4), (3, 1), (1, 1), (2, 1, 4), (1, 2, 1, 3)])
def test_extents_of_one_have_the_strides_of_a_new_tensor(shape: tuple[int, ...]) -> None:
    tensor = Context().from_array(numbers("f4", *shape), copy=False)
    assert tensor.nb == Context().new_tensor("f32", shape[::-1]).nb
    assert not tensor.is_transposed()


class Elsewhere:
    """An array on some device, by nothing but DLPack: NumPy cannot read it."""

    dtype, shape, strides, ndim = np.dtype("f4"), (2, 3), (12, 4), 2

    def __dlpack_device__(self) -> tuple[int, int]:
        return (4, 0)


def test_an_array_on_an_unknown_device_is_not_fetched_unasked() -> None:
    with pytest.raises(ggmlb.ArgumentError, match="is on a device; copy it to the host first"):
        Context().from_array(Elsewhere())
    with pytest.raises(ggmlb.ArgumentError, match=r"no device can use the memory of .*Elsewhere"):
        Context().from_array(Elsewhere(), copy=False)


def test_ops_compute_on_shared_memory() -> None:
    ctx, array = Context(), numbers()
    y = ctx.sqr(ctx.from_array(array.T, copy=False))
    np.testing.assert_array_equal(ggmlb.evaluate(y, devices="CPU"), array.T**2)
    array[0, 0] = 9
    assert ggmlb.evaluate(y, devices="CPU")[0, 0] == 81


def test_a_copy_is_made_where_asked_for_or_needed() -> None:
    array = numbers()
    for tensor in (
        Context().from_array(array, copy=True),
        Context().from_array(array, "f16"),
        Context().from_array(array[::-1, ::-1]),
        Context().from_array(np.broadcast_to(array[0], (3, 4))),
    ):
        before = tensor.to_numpy()
        array += 1
        np.testing.assert_array_equal(tensor.to_numpy(), before)


@pytest.mark.parametrize(
    ("value", "dtype", "shape"),
    [
        ([[1.5, 2], [3, 4]], "f32", (2, 2)),
        ([1, 2], "i32", (2,)),
        (3.5, "f32", (1,)),
        (np.arange(6.0).reshape(3, 2) / 8, "f32", (3, 2)),
        (np.float64(0.5), "f32", (1,)),
        (np.arange(3), "i64", (3,)),
    ],
)
def test_numbers_become_the_types_that_ops_take(value: Any, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = Context().from_array(value)
    assert (str(tensor.dtype), tensor.shape) == (f"{tensor.dtype}", shape) == (dtype, shape)
    np.testing.assert_array_equal(tensor.to_numpy(), np.reshape(value, shape))


@pytest.mark.parametrize(("value", "dtype"), [(0.1, "f64"), ([2**40], "i64"), (np.array(0.1), "f64")])
def test_a_type_that_is_named_keeps_every_bit(value: Any, dtype: str) -> None:
    assert Context().from_array(value, dtype).to_numpy().tolist() == np.reshape(value, -1).tolist()


def test_numpys_default_type_computes_and_f64_says_what_to_do() -> None:
    ctx, x = Context(), np.random.default_rng(0).random((4, 3))
    np.testing.assert_allclose(ggmlb.evaluate(ctx.from_array(x) * 2), 2 * x, rtol=1e-6)
    with pytest.raises(ggmlb.UnsupportedOpError, match=r"SCALE f64(.|\n)*cast it to f32"):
        ggmlb.evaluate(ctx.from_array(x, "f64") * 2)
    assert ggmlb.evaluate(ctx.cast(ctx.from_array(x, "f64"), "f32") * 2).shape == (4, 3)


@pytest.mark.parametrize("dtype", ["i8", "i16", "i32", "i64"])
@pytest.mark.parametrize("value", [2**63, 1.7, math.nan, math.inf, -1e30])
def test_an_integer_tensor_takes_equal_values_only(dtype: str, value: Any) -> None:
    tensor = Context().from_array(np.zeros(2), dtype)
    for array in ([value, 0], np.array([value, 0], np.float32)):
        with pytest.raises(ggmlb.DTypeError, match=f"cannot be stored as {dtype}; round and clip"):
            tensor.set_array(array)
        with pytest.raises(ggmlb.DTypeError, match=f"cannot be stored as {dtype}"):
            Context().from_array(array, dtype)
    for equal in ([1.0, 2], [True, False], np.array([3, 4], np.uint64), np.array([-5, 6])):
        tensor.set_array(equal)
        assert tensor.to_numpy().tolist() == list(equal)


def test_a_read_only_array_stays_so() -> None:
    array = numbers()
    array.flags.writeable = False
    tensor = Context().from_array(array, copy=False)
    with pytest.raises(ggmlb.BackendError, match="read-only"):
        tensor.memset(1)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(tensor)[0, 0] = 1


@pytest.mark.parametrize(
    ("array", "options", "error", "match"),
    [
        (numbers()[::-1], {"copy": False}, ggmlb.ArgumentError, "negative or 0"),
        (numbers(), {"copy": False, "dtype": "f16"}, ggmlb.ArgumentError, "converted to f16"),
        (numbers("f8"), {"copy": False}, ggmlb.ArgumentError, "float64 must be converted to f32"),
        (numbers() > 1, {}, ggmlb.DTypeError, "no type for bool"),
        (numbers("c8"), {}, ggmlb.DTypeError, "no type for complex64"),
        (np.zeros((1,) * 5), {}, ggmlb.ShapeError, "5 dimensions"),
    ],
)
def test_what_cannot_be_taken_leaves_the_context_as_it_was(
    array: Array, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    ctx = Context()
    with pytest.raises(error, match=match):
        ctx.from_array(array, **options)
    assert len(ctx) == 0


def test_the_array_lives_as_long_as_the_tensor() -> None:
    class Watched(np.ndarray):  # type: ignore[type-arg]
        pass

    array = numbers().view(Watched)
    alive = weakref.ref(array)
    tensor = Context().from_array(array, copy=False)
    del array
    gc.collect()
    assert alive() is not None
    assert tensor.to_numpy()[2, 3] == 11
    del tensor
    gc.collect()
    assert alive() is None


# -- out ---------------------------------------------------------------------------------------------


@pytest.fixture
def placed() -> Tensor:
    return Context().from_array(numbers(), copy=True, name="x")


@pytest.mark.parametrize("see", [np.asarray, np.from_dlpack, Tensor.as_array], ids=lambda f: f.__name__)
def test_numpy_sees_the_memory_itself(placed: Tensor, see: Callable[[Tensor], Array]) -> None:
    array = see(placed)
    placed.set(np.float32([41]))
    assert array[0, 0] == 41
    if see is np.from_dlpack and np.lib.NumpyVersion(np.__version__) < "2.2.0":
        assert not array.flags.writeable  # as it was of all objects then, NumPy's own too
        return
    array[0, 0] = 42
    assert placed.to_numpy()[0, 0] == 42


class OldProtocol:
    """An object with nothing but `__array_interface__`."""

    def __init__(self, tensor: Tensor) -> None:
        self.__array_interface__ = tensor.__array_interface__


def test_memory_seen_by_the_old_protocol_outlives_the_tensor() -> None:
    tensor = Context().from_array(numbers().T, copy=True)
    seen = np.asarray(OldProtocol(tensor))
    seen[0, 1] = 42
    assert tensor.to_numpy()[0, 1] == 42
    assert tensor.buffer is not None
    tensor.buffer.free()
    del tensor
    gc.collect()
    assert seen[0, 1] == 42


def test_numpys_rules_of_copies(placed: Tensor) -> None:
    assert np.shares_memory(np.array(placed, copy=False), placed.as_array())
    assert not np.shares_memory(np.array(placed), placed.as_array())
    assert np.asarray(placed, "f8").dtype == "f8"
    with pytest.raises(ValueError, match="copy"):
        np.asarray(placed, "f8", copy=False)


def test_blocks_are_not_passed_off_as_numbers() -> None:
    tensor = Context().from_array(np.zeros((2, 64), "f4"), "q4_0")
    assert tensor.as_array().shape == (2, 36)
    assert tensor.as_array().dtype == np.uint8
    batch = Context().from_array(np.zeros((3, 2, 64), "f4"), "q4_0")
    assert batch.as_array().shape == (3, 2, 36)
    for see in (np.asarray, np.from_dlpack):
        with pytest.raises(ggmlb.DTypeError, match="blocks"):
            see(tensor)
    assert not hasattr(tensor, "__array_interface__")


def blocks_of(dtype: str, *shape: int) -> Array:
    return ggmlb.quantize(np.random.default_rng(0).standard_normal(shape).astype("f4"), dtype)


@pytest.mark.parametrize("dtype", ["q4_0", "q4_K", "iq2_xs"])
@pytest.mark.parametrize("shape", [(256,), (3, 512), (2, 1, 3, 256)])
def test_blocks_become_a_tensor_as_they_are(dtype: str, shape: tuple[int, ...]) -> None:
    dtype_ = ggmlb.DType.parse(dtype)
    rows = (*shape[:-1], dtype_.row_size(shape[-1]))
    blocks = np.random.default_rng(0).integers(0, 60, rows, np.uint8)
    tensor = Context().from_array(blocks, dtype)
    assert (tensor.dtype, tensor.shape) == (dtype_, shape)
    assert tensor.is_contiguous()
    assert np.shares_memory(tensor.as_array(), blocks)
    assert tensor.to_numpy().tolist() == ggmlb.dequantize(blocks, dtype).reshape(shape).tolist()
    copied = Context().from_array(blocks, dtype, copy=True)
    assert not np.shares_memory(copied.as_array(), blocks)
    assert copied.get().tolist() == blocks.reshape(-1).tolist()


def test_blocks_on_a_device_are_shared_and_copied() -> None:
    blocks = blocks_of("q4_0", 3, 64)
    ctx = Context()
    tensor = ctx.new_tensor("q4_0", (64, 3))
    with ggmlb.init_by_name("OpenCL0") as stream, ggmlb.alloc_ctx_tensors(ctx, stream):
        tensor.set(blocks)
        shared = Context().from_array(tensor.as_array(), "q4_0", copy=False)
        assert shared.buffer is not None and shared.buffer.name == "OpenCL0"
        assert shared.get().tolist() == blocks.reshape(-1).tolist()
        copied = Context().from_array(tensor.as_array(), "q4_0", copy=True)
        shared.memset(0)
        assert not tensor.get().any()
        assert copied.get().tolist() == blocks.reshape(-1).tolist()


def test_blocks_with_gaps_between_rows_are_shared_and_with_gaps_inside_are_copied() -> None:
    blocks = blocks_of("q8_0", 4, 64)
    apart = np.zeros((4, 100), np.uint8)
    apart[:, :68] = blocks
    tensor = Context().from_array(apart[:, :68], "q8_0", copy=False)
    assert tensor.nb[:2] == (34, 100)
    assert tensor.to_numpy().tolist() == ggmlb.dequantize(blocks, "q8_0").tolist()
    turned = np.asfortranarray(blocks)
    with pytest.raises(ggmlb.ArgumentError, match="the bytes of a row are not contiguous"):
        Context().from_array(turned, "q8_0", copy=False)
    assert Context().from_array(turned, "q8_0").get().tolist() == blocks.reshape(-1).tolist()


def test_blocks_are_written_when_their_type_is_told() -> None:
    ctx = Context()
    tensor = ctx.new_tensor("q8_0", (64, 3))
    blocks, other = blocks_of("q8_0", 3, 64), blocks_of("q4_0", 3, 64)
    with ggmlb.alloc_ctx_tensors(ctx, ggmlb.cpu_buffer_type()):
        tensor.set_array(blocks, dtype="q8_0")
        assert tensor.get().tolist() == blocks.reshape(-1).tolist()
        tensor.set_array(other[None], ggmlb.DType.Q4_0)  # converted
        right = ggmlb.quantize(ggmlb.dequantize(other, "q4_0"), "q8_0")
        assert tensor.get().tolist() == right.reshape(-1).tolist()
        tensor.set_array(np.ones((3, 64), "f2"), dtype="f16")
        assert (tensor.to_numpy() > 0.99).all()
        for array, dtype, kind, why in (
            (blocks[:2], "q8_0", ggmlb.ShapeError, r"give blocks of shape \(3, 68\), for 64 elements a row"),
            (blocks, "q4_0", ggmlb.ShapeError, r"shape \(3, 68\); give blocks of shape \(3, 36\)"),
            (np.ones((3, 64), "f4"), "q8_0", ggmlb.DTypeError, "holds float32; give uint8, or omit dtype"),
            (np.ones((3, 64), "f4"), "f16", ggmlb.DTypeError, "holds float32; give float16"),
            (blocks, None, ggmlb.ShapeError, r"set_array\(blocks, dtype='Q8_0'\) writes blocks"),
        ):
            with pytest.raises(kind, match=why):
                tensor.set_array(array, dtype)


def test_a_type_that_dlpack_has_no_name_for_is_our_error() -> None:
    tensor = Context().from_array(numbers(ml_dtypes.bfloat16))
    with pytest.raises(ggmlb.DTypeError, match="convert it first"):
        np.from_dlpack(tensor)


def test_memory_in_another_layout_is_not_shown(placed: Tensor) -> None:
    device = ggmlb.device_by_name("CPU")
    (buft,) = device.reg.get_proc_address("dev_get_extra_bufts")(device)
    ctx = Context()
    weight = ctx.new_tensor("f32", (4, 3))
    with (
        ggmlb.alloc_ctx_tensors(ctx, buft),
        pytest.raises(ggmlb.ArgumentError, match="another type or layout"),
    ):
        weight.as_array()


@pytest.mark.parametrize("see", [np.asarray, np.from_dlpack, Tensor.as_array])
def test_without_memory_there_is_nothing_to_see(see: Callable[[Tensor], Array]) -> None:
    with pytest.raises(ggmlb.NotAllocatedError):
        see(Context().new_tensor("f32", 4))


# -- other libraries ---------------------------------------------------------------------------------


@pytest.fixture
def on_opencl() -> Iterator[Tensor]:
    ctx = Context()
    tensor = ctx.new_tensor("f32", (4, 3))
    with ggmlb.init_by_name("OpenCL0") as backend, ggmlb.alloc_ctx_tensors(ctx, backend):
        tensor.set_array(numbers())
        yield tensor


def test_opencl_memory_is_seen_by_pyopencl_and_not_copied_unasked(on_opencl: Tensor) -> None:
    array = on_opencl.as_array()
    np.testing.assert_array_equal(array.get(), numbers())
    array[1, 1] = 42
    array.finish()
    assert on_opencl.to_numpy()[1, 1] == 42
    for see in (np.asarray, np.from_dlpack):
        with pytest.raises(ggmlb.ArgumentError, match="to_numpy"):
            see(on_opencl)
    assert not hasattr(on_opencl, "__array_interface__")
    assert not hasattr(on_opencl, "__cuda_array_interface__")


def test_a_pyopencl_array_of_our_context_is_shared(on_opencl: Tensor) -> None:
    import pyopencl.array

    assert on_opencl.buffer is not None
    device: Any = on_opencl.buffer.buft.device
    free_bytes = device.memory[0]
    array = pyopencl.array.to_device(device.transfers, numbers())
    tensor = Context().from_array(array[1:], copy=False)
    np.testing.assert_array_equal(tensor.to_numpy(), numbers()[1:])
    tensor.memset(0)
    assert not array.get()[1:].any()
    assert array.get()[0].any()
    assert device.memory[0] == free_bytes  # the memory is the user's


def test_a_pyopencl_array_of_another_context_is_copied() -> None:
    import pyopencl as cl
    import pyopencl.array

    device: Any = ggmlb.device_by_name("OpenCL0")
    array = pyopencl.array.to_device(cl.CommandQueue(cl.Context([device.cl_device])), numbers())
    with pytest.raises(ggmlb.ArgumentError, match="no device can use the memory"):
        Context().from_array(array, copy=False)
    np.testing.assert_array_equal(Context().from_array(array).to_numpy(), numbers())


def test_torch_on_the_cpu_both_ways() -> None:
    torch = pytest.importorskip("torch")
    theirs = torch.arange(6.0).reshape(2, 3)
    ours = Context().from_array(theirs, copy=False)
    theirs[0, 0] = 42
    assert ours.to_numpy()[0, 0] == 42
    back = torch.from_dlpack(ours)
    back[1, 1] = 43
    assert theirs[1, 1] == 43
    with pytest.raises(ggmlb.ArgumentError, match="detach"):
        Context().from_array(torch.ones(2, requires_grad=True))


def test_from_dlpack_asks_for_what_it_is_named_for() -> None:
    array = numbers()
    assert Context().from_dlpack(array).to_numpy()[2, 3] == 11
    with pytest.raises(ggmlb.ArgumentError, match="no __dlpack__"):
        Context().from_dlpack([1, 2])


def test_what_a_library_says_of_memory_on_cuda_becomes_our_error() -> None:
    class Parameter:
        """As PyTorch's tensor on a card that requires its gradient."""

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 0

        @property
        def __cuda_array_interface__(self) -> dict[str, Any]:
            raise RuntimeError("use var.detach()")

    with pytest.raises(ggmlb.ArgumentError, match=r"gives no access to its memory: use var.detach"):
        Context().from_array(Parameter())


class Bfloat16:
    """Exports bfloat16 by DLPack, as PyTorch and JAX do, and NumPy does not."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __dlpack__(self, **options: object) -> object:
        capsule = self.values.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = 4  # kDLBfloat
        return capsule


def test_bfloat16_of_other_libraries_is_shared() -> None:
    memory = np.arange(6, dtype=np.uint16).reshape(2, 3) + 0x3F80
    leaf = Context().from_array(Bfloat16(memory), copy=False)
    assert (leaf.dtype, leaf.ne) == (DType.BF16, (3, 2, 1, 1))
    assert leaf.to_numpy().view(np.uint16).tolist() == memory.tolist()
    memory[0, 0] = 0x4000
    assert leaf.to_numpy()[0, 0] == 2
