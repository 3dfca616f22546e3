"""Context: creates leaf tensors and, with one method per op, the nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ggmlb.core.arguments import named
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op, TensorFlag
from ggmlb.core.errors import ArgumentError, UnknownOpError, did_you_mean
from ggmlb.core.foreign_names import op_for
from ggmlb.core.ops.attention import AttentionOps
from ggmlb.core.ops.base import full_ne
from ggmlb.core.ops.binary import BinaryOps
from ggmlb.core.ops.constant import ConstantOps
from ggmlb.core.ops.conv import ConvOps
from ggmlb.core.ops.conv_direct import ConvDirectOps
from ggmlb.core.ops.copy import CopyOps
from ggmlb.core.ops.custom import CustomOps
from ggmlb.core.ops.deepseek import DeepSeekOps
from ggmlb.core.ops.glu import GluOps
from ggmlb.core.ops.matmul import MatmulOps
from ggmlb.core.ops.norm import NormOps
from ggmlb.core.ops.pool import PoolOps
from ggmlb.core.ops.recurrent import RecurrentOps
from ggmlb.core.ops.reduce import ReduceOps
from ggmlb.core.ops.resize import ResizeOps
from ggmlb.core.ops.rope import RopeOps
from ggmlb.core.ops.rows import RowOps
from ggmlb.core.ops.scale import ScaleOps
from ggmlb.core.ops.select import SelectOps
from ggmlb.core.ops.shape import ShapeOps
from ggmlb.core.ops.softmax import SoftmaxOps
from ggmlb.core.ops.train import TrainOps
from ggmlb.core.ops.unary import UnaryOps
from ggmlb.core.ops.views import ViewOps
from ggmlb.core.ops.window import WindowOps
from ggmlb.core.placement import placement_clock
from ggmlb.core.tensor import Ne, Tensor

Extents = Sequence[int] | int
"""One to four extents, innermost first."""


@named("a Context, which holds tensors")
class Context(
    AttentionOps,
    BinaryOps,
    ConstantOps,
    ConvDirectOps,
    ConvOps,
    CopyOps,
    CustomOps,
    DeepSeekOps,
    GluOps,
    MatmulOps,
    NormOps,
    PoolOps,
    RecurrentOps,
    ReduceOps,
    ResizeOps,
    RopeOps,
    RowOps,
    ScaleOps,
    SelectOps,
    ShapeOps,
    SoftmaxOps,
    TrainOps,
    UnaryOps,
    ViewOps,
    WindowOps,
):
    """Factory of tensors (ggml_context).

    `new_tensor` and its variants create leafs. Each ggml op is a method that creates a node: it has the
    name in ggml.h without the `ggml_` prefix and the C arguments in order, without ctx. An op checks its
    operands and describes its result; it computes nothing and allocates no memory.

    Every op raises `ShapeError`, `DTypeError` or `ArgumentError` when its operands do not fit, and leaves the
    context as it was.
    """

    array_importer: ClassVar[Callable[[Any, DType | None, bool | None], Tensor]]
    """Hook that creates a leaf from an array; set by `ggmlb`, which knows the devices."""

    if not TYPE_CHECKING:  # to type checkers, an unknown method is an error already

        def __getattr__(self, name: str) -> Any:
            """Raise UnknownOpError for an unknown op, naming the nearest one."""
            known = [op for op in dir(type(self)) if not op.startswith("_")]
            op = None if name.startswith("__") else op_for(name)
            if op is not None:
                does = str(getattr(type(self), op).__doc__).partition("\n")[0]
                raise UnknownOpError(f"Context has no op {name!r}; did you mean {op!r}? {does}")
            raise UnknownOpError(f"Context has no op {name!r}{did_you_mean(name, known)}")

    def new_tensor(self, dtype: DType | str, ne: Extents, name: str = "") -> Tensor:
        """Return a new leaf with one to four extents, innermost first (ggml_new_tensor).

        Raises:
            DTypeError: There is no such type.
            ShapeError: Extents are missing, too many or negative, or a row is not whole blocks.
        """
        return self._leaf(DType.parse(dtype), full_ne(ne, "new_tensor"), name)

    def new_tensor_1d(self, dtype: DType | str, ne0: int) -> Tensor:
        """Return a new leaf with ne `[ne0]`; errors as in `new_tensor` (ggml_new_tensor_1d)."""
        return self._leaf(DType.parse(dtype), full_ne((ne0,), "new_tensor_1d"))

    def new_tensor_2d(self, dtype: DType | str, ne0: int, ne1: int) -> Tensor:
        """Return a new leaf with ne `[ne0, ne1]`; errors as in `new_tensor` (ggml_new_tensor_2d)."""
        return self._leaf(DType.parse(dtype), full_ne((ne0, ne1), "new_tensor_2d"))

    def new_tensor_3d(self, dtype: DType | str, ne0: int, ne1: int, ne2: int) -> Tensor:
        """Return a new leaf with ne `[ne0, ne1, ne2]`; errors as in `new_tensor` (ggml_new_tensor_3d)."""
        return self._leaf(DType.parse(dtype), full_ne((ne0, ne1, ne2), "new_tensor_3d"))

    def new_tensor_4d(self, dtype: DType | str, ne0: int, ne1: int, ne2: int, ne3: int) -> Tensor:
        """Return a new leaf with four extents; errors as in `new_tensor` (ggml_new_tensor_4d)."""
        return self._leaf(DType.parse(dtype), full_ne((ne0, ne1, ne2, ne3), "new_tensor_4d"))

    def dup_tensor(self, src: Tensor) -> Tensor:
        """Return a new contiguous leaf of the type and shape of `src` (ggml_dup_tensor)."""
        return self._leaf(src.dtype, src.ne)

    def from_array(
        self, array: Any, dtype: DType | str | None = None, *, copy: bool | None = None, name: str = ""
    ) -> Tensor:
        """Return a new leaf that holds an array's values, sharing its memory where possible.

        Args:
            array: A NumPy array, anything that NumPy reads (nested lists, PyTorch tensors on the CPU), or
                an object with DLPack or `__cuda_array_interface__`, or a `pyopencl.array.Array`. At most
                four dimensions; NumPy shape `(3, 4)` becomes ne `[4, 3]`.
            dtype: The type of the leaf; by default the array's own, but f32 for float64 (NumPy's default) and
                i32 for Python's integers. Values are converted or quantised to it. With a quantised type,
                uint8 of shape `(..., row_size)` are its blocks, used unchanged.
            copy: `False`: share the memory or raise. `True`: copy. `None`: copy where it cannot be shared.
            name: The leaf's name.

        Returns:
            A leaf placed on the array's device or in host memory. Writes to shared memory are visible on
            both sides; it stays allocated as long as either exists.

        Raises:
            ArgumentError: `copy=False`, and the memory cannot be shared; the message says why.
            DTypeError: ggml has no such type, and `dtype` names none.
            ShapeError: More than four dimensions, or rows that are not whole blocks.
        """
        tensor = type(self).array_importer(array, None if dtype is None else DType.parse(dtype), copy)
        tensor.name = name
        return self._take(tensor)

    def from_dlpack(self, array: Any, *, copy: bool | None = None, name: str = "") -> Tensor:
        """Return a new leaf over the memory of an object with `__dlpack__`; see `from_array`.

        Raises:
            ArgumentError: The object has no `__dlpack__`, or its memory cannot be shared and `copy=False`.
        """
        if not hasattr(array, "__dlpack__"):
            raise ArgumentError(f"from_dlpack: {type(array).__name__} has no __dlpack__; try from_array")
        return self.from_array(array, copy=copy, name=name)

    def _leaf(self, dtype: DType, ne: Ne, name: str = "") -> Tensor:
        return self._take(Tensor(dtype, ne, name=name))

    # -- names ---------------------------------------------------------------------------------

    def set_name(self, tensor: Tensor, name: str) -> Tensor:
        """Name a tensor; return it (ggml_set_name)."""
        tensor.name = name
        return tensor

    def format_name(self, tensor: Tensor, fmt: str, *args: Any) -> Tensor:
        """Name a tensor `fmt % args`; return it (ggml_format_name)."""
        tensor.name = fmt % args
        return tensor

    def get_tensor(self, name: str) -> Tensor:
        """Return the first tensor of that name (ggml_get_tensor).

        Raises:
            ArgumentError: No tensor has the name.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        names = [t.name for t in self.tensors if t.name]
        raise ArgumentError(f"the context has no tensor named {name!r}{did_you_mean(name, names)}")

    # -- flags ---------------------------------------------------------------------------------

    def set_input(self, tensor: Tensor) -> Tensor:
        """Mark a tensor that the user writes before each computation; return it (ggml_set_input).

        Its memory is allocated at the start of the graph and is not reused before the last node has read it.
        """
        return _flag(tensor, TensorFlag.INPUT)

    def set_output(self, tensor: Tensor) -> Tensor:
        """Mark a result: its memory is not reused, so that it can be read afterwards (ggml_set_output)."""
        return _flag(tensor, TensorFlag.OUTPUT)

    def set_param(self, tensor: Tensor) -> Tensor:
        """Mark a leaf that training changes; return it (ggml_set_param).

        Raises:
            ArgumentError: The tensor is a node.
        """
        if tensor.op is not Op.NONE:
            raise ArgumentError(f"set_param: {tensor.describe()} is a node; parameters are leafs")
        return _flag(tensor, TensorFlag.PARAM)

    def set_loss(self, tensor: Tensor) -> Tensor:
        """Mark a scalar that training minimises; return it (ggml_set_loss).

        Raises:
            ArgumentError: The tensor is not an f32 scalar.
        """
        if tensor.ne != (1, 1, 1, 1) or tensor.dtype is not DType.F32:
            raise ArgumentError(f"set_loss: {tensor.describe()} is not an f32 scalar")
        return _flag(tensor, TensorFlag.LOSS)

    # -- data ----------------------------------------------------------------------------------

    def set_zero(self, tensor: Tensor) -> Tensor:
        """Set all bytes of an allocated tensor to zero; return it (ggml_set_zero).

        Raises:
            NotAllocatedError: The tensor is in no buffer.
        """
        tensor.memset(0)
        return tensor

    # -- contents ------------------------------------------------------------------------------

    def reset(self) -> None:
        """Remove all tensors from the context (ggml_reset); tensors that the caller holds stay valid."""
        self.tensors.clear()

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __repr__(self) -> str:
        return f"<Context {len(self.tensors)} tensors>"


def _flag(tensor: Tensor, flag: int) -> Tensor:
    if not tensor.flags & flag:
        tensor.flags |= flag
        if tensor.buffer is not None:
            placement_clock.tick()  # a plan may have fused the node, so that its result is not stored
    return tensor
