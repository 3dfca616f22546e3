"""Emitter of LLVM IR: values with operators, memory accesses, loops and variables over llvmlite's builder.

A Python function emits a kernel by computing with `Value`s like numbers. The code is for one instruction set
and its vector width. Addresses are 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Union

from llvmlite import ir

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

Operand = Union["Value", int, float]


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no stubs
    """LLVM's bfloat, which llvmlite lacks; only intrinsics take it."""

    def _to_string(self) -> str:
        return "bfloat"


BF16 = _BFloat()

_CONTRACT = ("contract",)


def vec(element: Any, n: int) -> Any:
    """The vector type of `n` lanes."""
    return ir.VectorType(element, n)


def element_of(type_: Any) -> Any:
    """The element type of a vector type; a scalar type is returned as it is."""
    return type_.element if isinstance(type_, ir.VectorType) else type_


def lanes_of(type_: Any) -> int:
    """Number of lanes of a vector type; 1 for a scalar."""
    return type_.count if isinstance(type_, ir.VectorType) else 1


def like(type_: Any, element: Any) -> Any:
    """The type with the lanes of `type_` and the element type `element`."""
    return vec(element, type_.count) if isinstance(type_, ir.VectorType) else element


def is_float(type_: Any) -> bool:
    """Whether the type is a float, or a vector of floats."""
    return isinstance(element_of(type_), (ir.HalfType, ir.FloatType, ir.DoubleType))


@dataclass(frozen=True, slots=True)
class Level:
    """An instruction set, such as AVX2, for which the vector layer emits code.

    Attributes:
        name: Its name in GGMLB_SIMD.
        lanes: 32-bit lanes of a vector.
        dot: Instructions for byte dot products: `vnni`, `maddubs`, `sdot` or `widen`.
        tiles: Whether it has tile registers (AMX).
        bf16: Whether it multiplies bfloat16 (`vdpbf16ps`).
        f16: Whether it converts float16 in hardware.
        needs: Required host features, by LLVM's names.
        cpu: LLVM's processor name, if the level is not the host's widest.
        features: Features added to that processor.
    """

    name: str
    lanes: int
    dot: str
    f16: bool
    needs: frozenset[str]
    cpu: str
    features: str
    tiles: bool = False
    bf16: bool = False


class Value:
    """A scalar or vector of the emitted code; operators emit instructions. Integers are signed."""

    __slots__ = ("kernel", "raw")

    def __init__(self, kernel: Emitter, raw: Any) -> None:
        self.kernel = kernel
        self.raw = raw

    @property
    def type(self) -> Any:
        """The LLVM type."""
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
        """The product, never contracted to an FMA."""
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
        """The mask of lanes that are equal."""
        return self._compare("==", other)

    # -- lanes and types ---------------------------------------------------------------------------

    def __getitem__(self, lane: int | Value) -> Value:
        index = lane.raw if isinstance(lane, Value) else ir.Constant(I32, lane)
        return Value(self.kernel, self.kernel.build.extract_element(self.raw, index))

    def put(self, lane: int, value: Value) -> Value:
        """The vector with one lane replaced."""
        build = self.kernel.build
        return Value(self.kernel, build.insert_element(self.raw, value.raw, ir.Constant(I32, lane)))

    def shuffle(self, lanes: Sequence[int], other: Value | None = None) -> Value:
        """A vector of the given lanes of this vector, or of the two concatenated."""
        second = ir.Constant(self.type, ir.Undefined) if other is None else other.raw
        mask = ir.Constant(vec(I32, len(lanes)), list(lanes))
        return Value(self.kernel, self.kernel.build.shuffle_vector(self.raw, second, mask))

    def split(self) -> tuple[Value, Value]:
        """The lower and the upper half."""
        n = self.type.count
        return self.shuffle(range(n // 2)), self.shuffle(range(n // 2, n))

    def join(self, upper: Value) -> Value:
        """The concatenation of this vector and `upper`, of the same length."""
        return self.shuffle(range(2 * self.type.count), upper)

    def splat(self, n: int) -> Value:
        """The scalar broadcast to `n` lanes."""
        one = ir.Constant(vec(self.type, n), ir.Undefined)
        first = Value(self.kernel, self.kernel.build.insert_element(one, self.raw, ir.Constant(I32, 0)))
        return first.shuffle([0] * n)

    def bits(self, type_: Any) -> Value:
        """The same bits reinterpreted as another type."""
        return Value(self.kernel, self.kernel.build.bitcast(self.raw, type_))

    def zext(self, element: Any) -> Value:
        """Integers zero-extended to another element type."""
        return Value(self.kernel, self.kernel.build.zext(self.raw, like(self.type, element)))

    def sext(self, element: Any) -> Value:
        """Integers sign-extended to another element type."""
        return Value(self.kernel, self.kernel.build.sext(self.raw, like(self.type, element)))

    def trunc(self, element: Any) -> Value:
        """Integers truncated, or floats rounded, to a narrower element type."""
        build, type_ = self.kernel.build, like(self.type, element)
        cut = build.fptrunc if is_float(self.type) else build.trunc
        return Value(self.kernel, cut(self.raw, type_))

    def to_float(self, element: Any = F32) -> Value:
        """Signed integers, or narrower floats, converted to floats."""
        build, type_ = self.kernel.build, like(self.type, element)
        return Value(self.kernel, (build.fpext if is_float(self.type) else build.sitofp)(self.raw, type_))

    def to_int(self, element: Any = I32) -> Value:
        """Floats converted to integers, towards zero."""
        return Value(self.kernel, self.kernel.build.fptosi(self.raw, like(self.type, element)))


class Variable:
    """A mutable variable, such as an accumulator; LLVM keeps it in a register."""

    def __init__(self, kernel: Emitter, start: Value) -> None:
        self._kernel = kernel
        with kernel.build.goto_entry_block():
            self._slot = kernel.build.alloca(start.type)
        self.set(start)

    def set(self, value: Value) -> None:
        """Emit a store of a value to this variable of the kernel."""
        self._kernel.build.store(value.raw, self._slot)

    @property
    def now(self) -> Value:
        """The variable's current value."""
        return Value(self._kernel, self._kernel.build.load(self._slot))


class Emitter:
    """Emits the body of a kernel: a function `(args, chunk, n_chunks, thread)` that computes one chunk.

    Attributes:
        level: The target instruction set.
        args: Address of the kernel's arguments, 8 bytes each.
        chunk: Index of the chunk of work that a call computes.
        n_chunks: Number of chunks.
        thread: Index of the thread, for scratch memory.
    """

    def __init__(self, module: ir.Module, name: str, level: Level) -> None:
        self.module = module
        self.level = level
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * 4), name)
        self.build = ir.IRBuilder(function.append_basic_block("entry"))
        with self.build.goto_entry_block():
            body = function.append_basic_block("body")
        self.build.branch(body)
        self.build.position_at_end(body)
        self.function = function
        self.args, self.chunk, self.n_chunks, self.thread = (Value(self, a) for a in function.args)
        self._n_args = 0

    def finish(self) -> None:
        """Emit the return."""
        self.build.ret_void()

    # -- kernel arguments, read in order -------------------------------------------------------------

    def int_arg(self) -> Value:
        """Read the next kernel argument as a 64-bit integer: an address, a size or a count."""
        self._n_args += 1
        return self.load(I64, self.args + 8 * (self._n_args - 1), align=8)

    def ints(self, n: int) -> list[Value]:
        """Read the next `n` kernel arguments as integers."""
        return [self.int_arg() for _ in range(n)]

    def named(self, *names: str) -> dict[str, Value]:
        """Read the next kernel arguments as integers, by these names."""
        return {name: self.int_arg() for name in names}

    def float_arg(self) -> Value:
        """Read the next kernel argument as float32."""
        return self.int_arg().bits(F64).trunc(F32)

    # -- constants, memory -------------------------------------------------------------------------

    def const(self, type_: Any, value: float) -> Value:
        """A constant of a scalar type, or of a vector type with `value` in all lanes."""
        value = float(value) if is_float(type_) else int(value)
        if isinstance(type_, ir.VectorType):
            return Value(self, ir.Constant(type_, [value] * type_.count))
        return Value(self, ir.Constant(type_, value))

    def table(self, type_: Any, values: Sequence[float]) -> Value:
        """A constant vector with the given values as lanes."""
        return Value(self, ir.Constant(type_, list(values)))

    def i64(self, value: int) -> Value:
        """A 64-bit integer constant."""
        return self.const(I64, value)

    def load(self, type_: Any, address: Value, align: int = 1) -> Value:
        """Read a scalar or vector from an address that is a multiple of `align` [bytes]."""
        pointer = self.build.inttoptr(address.raw, type_.as_pointer())
        return Value(self, self.build.load(pointer, align=align, typ=type_))

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        """Write a scalar or vector to an address that is a multiple of `align` [bytes]."""
        pointer = self.build.inttoptr(address.raw, value.type.as_pointer())
        self.build.store(value.raw, pointer, align=align)

    def store_past_caches(self, value: Value, address: Value, align: int) -> None:
        """Write a vector by a non-temporal store; call `fence` before other threads read it."""
        pointer = self.build.inttoptr(address.raw, value.type.as_pointer())
        store = self.build.store(value.raw, pointer, align=align)
        store.set_metadata("nontemporal", self.module.add_metadata([ir.Constant(I32, 1)]))

    def fence(self) -> None:
        """Make earlier non-temporal stores visible to other threads."""
        self.build.fence("seq_cst")

    def local(self, nbytes: int) -> Value:
        """Reserve stack memory, aligned to 64 bytes; at most some tens of thousands of bytes."""
        with self.build.goto_entry_block():
            slot = self.build.alloca(ir.ArrayType(I8, nbytes))
            slot.align = 64
            return Value(self, self.build.ptrtoint(slot, I64))

    def constants(self, name: str, values: Sequence[float], element: Any = F64) -> Value:
        """The address of a read-only array, defined once per module by its name."""
        found = self.module.globals.get(name)
        if found is None:
            type_ = ir.ArrayType(element, len(values))
            found = ir.GlobalVariable(self.module, type_, name)
            found.initializer = ir.Constant(type_, list(values))
            found.global_constant, found.linkage = True, "internal"
        return Value(self, self.build.ptrtoint(found, I64))

    def any(self, mask: Value) -> Value:
        """Whether a lane of the mask is set."""
        return mask.bits(ir.IntType(mask.type.count)).zext(I64) > 0

    def first_lanes(self, n: int, count: Value) -> Value:
        """A mask of `n` lanes of which the first `count` are set."""
        return self.table(vec(I32, n), range(n)) < count.trunc(I32).splat(n)

    def load_masked(self, type_: Any, address: Value, mask: Value) -> Value:
        """Read the lanes that are set in a mask; the others are 0."""
        name = f"llvm.masked.load.{_suffix(type_)}.p0"
        pointer = self.build.inttoptr(address.raw, type_.as_pointer())
        return self.call(name, type_, Value(self, pointer), self.const(I32, 1), mask, self.const(type_, 0))

    def store_masked(self, value: Value, address: Value, mask: Value) -> None:
        """Write the lanes that are set in a mask."""
        name = f"llvm.masked.store.{_suffix(value.type)}.p0"
        pointer = self.build.inttoptr(address.raw, value.type.as_pointer())
        self.call(name, ir.VoidType(), value, Value(self, pointer), self.const(I32, 1), mask)

    def prefetch(self, address: Value, hint: int = 3) -> None:
        """Prefetch the cache line at an address, which need not be valid; `hint`: LLVM's locality, 0 to 3."""
        pointer = Value(self, self.build.inttoptr(address.raw, I8.as_pointer()))
        read, locality, data = (self.const(I32, n) for n in (0, hint, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, read, locality, data)

    def keep_order(self) -> None:
        """Let LLVM move no memory access across this place."""
        barrier = ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", side_effect=True)
        self.build.call(barrier, [])

    def call(self, name: str, result: Any, *args: Value) -> Value:
        """Call an LLVM intrinsic, or a C function loaded in the process; `result`: type of its result."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return Value(self, self.build.call(function, [a.raw for a in args]))

    def generic(self, name: str, *args: Value) -> Value:
        """Call the LLVM intrinsic `llvm.NAME.TYPE`; TYPE is that of its first argument and its result."""
        return self.call(f"llvm.{name}.{_suffix(args[0].type)}", args[0].type, *args)

    def opaque(self, x: Value) -> Value:
        """Return an x86 vector unchanged, as an optimisation barrier for LLVM."""
        function = ir.FunctionType(x.type, [x.type])
        return Value(self, self.build.call(ir.InlineAsm(function, "", "=x,0"), [x.raw]))

    # -- choices -----------------------------------------------------------------------------------

    def select(self, mask: Value, yes: Value, no: Operand) -> Value:
        """`yes` where the mask is set, else `no`."""
        other = no.raw if isinstance(no, Value) else self.const(yes.type, no).raw
        return Value(self, self.build.select(mask.raw, yes.raw, other))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """`a * b + c`, fused where the instruction set has FMA."""
        return self.generic("fma", a, b, c) if self.level.dot != "widen" else a * b + c

    def maximum(self, a: Value, b: Operand) -> Value:
        """The greater of `a` and `b` in each lane; `b` where `a` is NaN."""
        other = b if isinstance(b, Value) else self.const(a.type, b)
        return self.select(a > other, a, other)

    def minimum(self, a: Value, b: Operand) -> Value:
        """The lesser of `a` and `b` in each lane; `b` where `a` is NaN."""
        other = b if isinstance(b, Value) else self.const(a.type, b)
        return self.select(a < other, a, other)

    # -- control -----------------------------------------------------------------------------------

    def variable(self, start: Value) -> Variable:
        """Declare a mutable variable with its initial value."""
        return Variable(self, start)

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """Context manager: code in its body runs for `i` in `range(start, stop, step)`; yields `i`."""
        first = start if isinstance(start, Value) else self.i64(int(start))
        last = stop if isinstance(stop, Value) else self.i64(int(stop))
        head = self.build.append_basic_block("head")
        body = self.build.append_basic_block("turn")
        after = self.build.append_basic_block("after")
        before = self.build.block
        self.build.branch(head)
        self.build.position_at_end(head)
        index = self.build.phi(I64)
        index.add_incoming(first.raw, before)
        self.build.cbranch(self.build.icmp_signed("<", index, last.raw), body, after)
        self.build.position_at_end(body)
        yield Value(self, index)
        following = self.build.add(index, ir.Constant(I64, step), flags=("nsw",))
        index.add_incoming(following, self.build.block)
        self.build.branch(head)
        self.build.position_at_end(after)

    def units(self, n: Value) -> AbstractContextManager[Value]:
        """Context manager: a loop over the chunk's part of `n` units of work; yields a unit's number."""
        return self.loop(n * self.chunk // self.n_chunks, n * (self.chunk + 1) // self.n_chunks)

    @contextmanager
    def while_(self) -> Iterator[tuple[Any, Any]]:
        """Context manager: code in its body loops; yields the basic blocks to continue and to leave it."""
        head = self.build.append_basic_block("again")
        after = self.build.append_basic_block("done")
        self.build.branch(head)
        self.build.position_at_end(head)
        yield head, after
        if not self.build.block.is_terminated:
            self.build.branch(head)
        self.build.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """Context manager: code in its body runs only if the condition is true."""
        with self.build.if_then(condition.raw):
            yield

    def least(self, a: Value, b: Operand) -> Value:
        """The lesser of two integers."""
        return self.minimum(a, b)


def _suffix(type_: Any) -> str:
    """The type's suffix in names of overloaded intrinsics, such as `v16f32`."""
    element = element_of(type_)
    name = {F16: "f16", F32: "f32", F64: "f64"}.get(element) if is_float(type_) else f"i{element.width}"
    return f"v{type_.count}{name}" if isinstance(type_, ir.VectorType) else str(name)
