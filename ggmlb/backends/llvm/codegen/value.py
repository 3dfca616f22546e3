"""Values of a kernel: scalars and vectors with operators, over LLVM's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

from llvmlite import ir

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

Operand = Union["Value", int, float]

_CONTRACT = ("contract",)


def vec(element: Any, n: int) -> Any:
    """The type of `n` lanes."""
    return ir.VectorType(element, n)


def element_of(type_: Any) -> Any:
    """The type of a lane, or of the scalar itself."""
    return type_.element if isinstance(type_, ir.VectorType) else type_


def lanes_of(type_: Any) -> int:
    """The lanes of a vector type; 1 of a scalar."""
    return type_.count if isinstance(type_, ir.VectorType) else 1


def like(type_: Any, element: Any) -> Any:
    """The type with as many lanes of another element."""
    return vec(element, type_.count) if isinstance(type_, ir.VectorType) else element


def is_float(type_: Any) -> bool:
    """Whether lanes are floats."""
    return isinstance(element_of(type_), (ir.HalfType, ir.FloatType, ir.DoubleType))


class Value:
    """A scalar or vector that the code will have; operators emit instructions. Integers are signed."""

    __slots__ = ("kernel", "raw")

    def __init__(self, kernel: Emitter, raw: Any) -> None:
        self.kernel = kernel
        self.raw = raw

    @property
    def type(self) -> Any:
        """LLVM's type."""
        return self.raw.type

    def _other(self, other: Operand) -> Any:
        if isinstance(other, Value):
            return other.raw
        return self.kernel.const(self.type, other).raw

    def _binary(self, other: Operand, floats: str, ints: str, swap: bool = False) -> Value:
        a, b = self.raw, self._other(other)
        if swap:
            a, b = b, a
        build = self.kernel.build
        if is_float(self.type):
            return Value(self.kernel, getattr(build, floats)(a, b, flags=_CONTRACT))
        return Value(self.kernel, getattr(build, ints)(a, b))

    def __add__(self, other: Operand) -> Value:
        return self._binary(other, "fadd", "add")

    __radd__ = __add__

    def __sub__(self, other: Operand) -> Value:
        return self._binary(other, "fsub", "sub")

    def __rsub__(self, other: Operand) -> Value:
        return self._binary(other, "fsub", "sub", swap=True)

    def __mul__(self, other: Operand) -> Value:
        return self._binary(other, "fmul", "mul")

    __rmul__ = __mul__

    def times(self, other: Operand) -> Value:
        """The product, rounded by itself: it is not fused with a sum."""
        return Value(self.kernel, self.kernel.build.fmul(self.raw, self._other(other)))

    def __truediv__(self, other: Operand) -> Value:
        return self._binary(other, "fdiv", "sdiv")

    def __rtruediv__(self, other: Operand) -> Value:
        return self._binary(other, "fdiv", "sdiv", swap=True)

    def __floordiv__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.udiv(self.raw, self._other(other)))

    def __mod__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.urem(self.raw, self._other(other)))

    def __neg__(self) -> Value:
        return self._binary(-1.0, "fmul", "mul") if is_float(self.type) else 0 - self

    def __and__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.and_(self.raw, self._other(other)))

    def __or__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.or_(self.raw, self._other(other)))

    def __xor__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.xor(self.raw, self._other(other)))

    def __lshift__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.shl(self.raw, self._other(other)))

    def __rshift__(self, other: Operand) -> Value:
        return Value(self.kernel, self.kernel.build.lshr(self.raw, self._other(other)))

    def _compare(self, how: str, other: Operand) -> Value:
        build, b = self.kernel.build, self._other(other)
        compare = build.fcmp_ordered if is_float(self.type) else build.icmp_signed
        return Value(self.kernel, compare(how, self.raw, b))

    def __lt__(self, other: Operand) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Operand) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Operand) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Operand) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Operand) -> Value:
        """Lane by lane."""
        return self._compare("==", other)

    # -- lanes and types ---------------------------------------------------------------------------

    def __getitem__(self, lane: int | Value) -> Value:
        index = lane.raw if isinstance(lane, Value) else ir.Constant(I32, lane)
        return Value(self.kernel, self.kernel.build.extract_element(self.raw, index))

    def put(self, lane: int, value: Value) -> Value:
        """The vector with another value in a lane."""
        build = self.kernel.build
        return Value(self.kernel, build.insert_element(self.raw, value.raw, ir.Constant(I32, lane)))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """Lanes of this vector, and of the other one after them, in any order."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.raw
        mask = ir.Constant(vec(I32, len(lanes)), list(lanes))
        return Value(self.kernel, self.kernel.build.shuffle_vector(self.raw, second, mask))

    def split(self) -> tuple[Value, Value]:
        """The lower and the upper half."""
        n = self.type.count
        return self.shuffle(range(n // 2)), self.shuffle(range(n // 2, n))

    def join(self, upper: Value) -> Value:
        """This vector, and another of its length after it."""
        return self.shuffle(range(2 * self.type.count), upper)

    def splat(self, n: int) -> Value:
        """The scalar in `n` lanes."""
        one = ir.Constant(vec(self.type, n), ir.Undefined)
        first = Value(self.kernel, self.kernel.build.insert_element(one, self.raw, ir.Constant(I32, 0)))
        return first.shuffle([0] * n)

    def bits(self, type_: Any) -> Value:
        """The same bits as another type."""
        return Value(self.kernel, self.kernel.build.bitcast(self.raw, type_))

    def zext(self, element: Any) -> Value:
        """Wider integers, zeros above."""
        return Value(self.kernel, self.kernel.build.zext(self.raw, like(self.type, element)))

    def sext(self, element: Any) -> Value:
        """Wider integers, the sign above."""
        return Value(self.kernel, self.kernel.build.sext(self.raw, like(self.type, element)))

    def trunc(self, element: Any) -> Value:
        """The lower bits, or a narrower float."""
        build, type_ = self.kernel.build, like(self.type, element)
        cut = build.fptrunc if is_float(self.type) else build.trunc
        return Value(self.kernel, cut(self.raw, type_))

    def to_float(self, element: Any = F32) -> Value:
        """Integers, or narrower floats, as floats."""
        build, type_ = self.kernel.build, like(self.type, element)
        return Value(self.kernel, (build.fpext if is_float(self.type) else build.sitofp)(self.raw, type_))

    def to_int(self, element: Any = I32) -> Value:
        """Floats as integers, towards zero."""
        return Value(self.kernel, self.kernel.build.fptosi(self.raw, like(self.type, element)))
