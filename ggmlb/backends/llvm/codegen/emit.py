"""Emitter of LLVM code: memory, loops and variables over LLVM's builder.

A Python function emits a kernel by computing with `Value`s like numbers. The LLVM code is for one
instruction set, with its vector width. Addresses are 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from ggmlb.backends.llvm.codegen.value import (
    F16,
    F32,
    F64,
    I8,
    I32,
    I64,
    Operand,
    Value,
    element_of,
    is_float,
    vec,
)

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.host import Level


class Variable:
    """A variable that changes between iterations of a loop; LLVM keeps it in a register."""

    def __init__(self, kernel: Emitter, start: Value) -> None:
        self._kernel = kernel
        with kernel.build.goto_entry_block():
            self._slot = kernel.build.alloca(start.type)
        self.set(start)

    def set(self, value: Value) -> None:
        """Give it another value."""
        self._kernel.build.store(value.raw, self._slot)

    @property
    def now(self) -> Value:
        """Its value."""
        return Value(self._kernel, self._kernel.build.load(self._slot))


class Emitter:
    """The body of a function `(args, chunk, n_chunks, thread)` that is being written.

    Attributes:
        level: The instruction set it is for.
        args: Address of its arguments, 8 bytes each.
        chunk: Index of the call's part of the work.
        n_chunks: Number of parts.
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
        """End the function."""
        self.build.ret_void()

    # -- arguments, in the order in which they are asked for -----------------------------------------

    def int_arg(self) -> Value:
        """The next argument: an address, a size or a count."""
        self._n_args += 1
        return self.load(I64, self.args + 8 * (self._n_args - 1), align=8)

    def ints(self, n: int) -> list[Value]:
        """The next `n` arguments."""
        return [self.int_arg() for _ in range(n)]

    def float_arg(self) -> Value:
        """The next argument, a number: float32."""
        return self.int_arg().bits(F64).trunc(F32)

    # -- constants, memory -------------------------------------------------------------------------

    def const(self, type_: Any, value: float) -> Value:
        """A number, in all lanes."""
        value = float(value) if is_float(type_) else int(value)
        if isinstance(type_, ir.VectorType):
            return Value(self, ir.Constant(type_, [value] * type_.count))
        return Value(self, ir.Constant(type_, value))

    def table(self, type_: Any, values: Sequence[float]) -> Value:
        """A vector of numbers."""
        return Value(self, ir.Constant(type_, list(values)))

    def i64(self, value: int) -> Value:
        """A 64-bit number."""
        return self.const(I64, value)

    def load(self, type_: Any, address: Value, align: int = 1) -> Value:
        """Read from memory."""
        pointer = self.build.inttoptr(address.raw, type_.as_pointer())
        return Value(self, self.build.load(pointer, align=align, typ=type_))

    def store(self, value: Value, address: Value, align: int = 1) -> None:
        """Write to memory."""
        pointer = self.build.inttoptr(address.raw, value.type.as_pointer())
        self.build.store(value.raw, pointer, align=align)

    def store_past_caches(self, value: Value, address: Value, align: int) -> None:
        """Write to memory, of the vector's alignment; `fence` must follow before other threads read it."""
        pointer = self.build.inttoptr(address.raw, value.type.as_pointer())
        store = self.build.store(value.raw, pointer, align=align)
        store.set_metadata("nontemporal", self.module.add_metadata([ir.Constant(I32, 1)]))

    def fence(self) -> None:
        """Order writes past the caches before later writes, for other threads."""
        self.build.fence("seq_cst")

    def local(self, nbytes: int) -> Value:
        """The address of memory of the call's own, aligned to 64 bytes; up to some tens of thousands."""
        with self.build.goto_entry_block():
            slot = self.build.alloca(ir.ArrayType(I8, nbytes))
            slot.align = 64
            return Value(self, self.build.ptrtoint(slot, I64))

    def constants(self, name: str, values: Sequence[float]) -> Value:
        """The address of float64 numbers in memory that is only read, by a name in the module."""
        found = self.module.globals.get(name)
        if found is None:
            type_ = ir.ArrayType(F64, len(values))
            found = ir.GlobalVariable(self.module, type_, name)
            found.initializer = ir.Constant(type_, list(values))
            found.global_constant, found.linkage = True, "internal"
        return Value(self, self.build.ptrtoint(found, I64))

    def any(self, mask: Value) -> Value:
        """Whether a lane of the mask is set."""
        return mask.bits(ir.IntType(mask.type.count)).zext(I64) > 0

    def first_lanes(self, n: int, count: Value) -> Value:
        """A mask of `n` lanes: the first `count` of them."""
        return self.table(vec(I32, n), range(n)) < count.trunc(I32).splat(n)

    def load_masked(self, type_: Any, address: Value, mask: Value) -> Value:
        """Read the lanes that a mask has; the others are 0."""
        name = f"llvm.masked.load.{_suffix(type_)}.p0"
        pointer = self.build.inttoptr(address.raw, type_.as_pointer())
        return self.call(name, type_, Value(self, pointer), self.const(I32, 1), mask, self.const(type_, 0))

    def store_masked(self, value: Value, address: Value, mask: Value) -> None:
        """Write the lanes that a mask has."""
        name = f"llvm.masked.store.{_suffix(value.type)}.p0"
        pointer = self.build.inttoptr(address.raw, value.type.as_pointer())
        self.call(name, ir.VoidType(), value, Value(self, pointer), self.const(I32, 1), mask)

    def prefetch(self, address: Value) -> None:
        """Prefetch the cache line at an address, which need not be valid."""
        pointer = Value(self, self.build.inttoptr(address.raw, I8.as_pointer()))
        read, locality, data = (self.const(I32, n) for n in (0, 3, 1))
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, read, locality, data)

    def call(self, name: str, result: Any, *args: Value) -> Value:
        """Call an intrinsic, or a function of the process."""
        function = self.module.globals.get(name)
        if function is None:
            function = ir.Function(self.module, ir.FunctionType(result, [a.type for a in args]), name)
        return Value(self, self.build.call(function, [a.raw for a in args]))

    def generic(self, name: str, *args: Value) -> Value:
        """Call an intrinsic that LLVM has for vectors of any length: `llvm.name.type`."""
        return self.call(f"llvm.{name}.{_suffix(args[0].type)}", args[0].type, *args)

    def opaque(self, x: Value) -> Value:
        """A vector of x86 as it is, of whose making LLVM knows nothing, so that it undoes none of it."""
        function = ir.FunctionType(x.type, [x.type])
        return Value(self, self.build.call(ir.InlineAsm(function, "", "=x,0"), [x.raw]))

    # -- choices -----------------------------------------------------------------------------------

    def select(self, mask: Value, yes: Value, no: Operand) -> Value:
        """`yes` where the mask is set, else `no`."""
        other = no.raw if isinstance(no, Value) else self.const(yes.type, no).raw
        return Value(self, self.build.select(mask.raw, yes.raw, other))

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """`a b + c`."""
        return self.generic("fma", a, b, c) if self.level.dot != "widen" else a * b + c

    def maximum(self, a: Value, b: Operand) -> Value:
        """The greater; `b` where `a` is NaN."""
        other = b if isinstance(b, Value) else self.const(a.type, b)
        return self.select(a > other, a, other)

    def minimum(self, a: Value, b: Operand) -> Value:
        """The lesser; `b` where `a` is NaN."""
        other = b if isinstance(b, Value) else self.const(a.type, b)
        return self.select(a < other, a, other)

    # -- control -----------------------------------------------------------------------------------

    def variable(self, start: Value) -> Variable:
        """A value that loops change."""
        return Variable(self, start)

    @contextmanager
    def loop(self, start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
        """Run the block for each number from `start` on, below `stop`."""
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

    @contextmanager
    def while_(self) -> Iterator[tuple[Any, Any]]:
        """Run the block in a loop; yields its first basic block and the block to branch to at the end."""
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
        """Run the block if the condition holds."""
        with self.build.if_then(condition.raw):
            yield

    def least(self, a: Value, b: Operand) -> Value:
        """The lesser of two integers."""
        return self.minimum(a, b)


def _suffix(type_: Any) -> str:
    """As LLVM's overloaded intrinsics are named: `v16f32`."""
    element = element_of(type_)
    name = {F16: "f16", F32: "f32", F64: "f64"}.get(element) if is_float(type_) else f"i{element.width}"
    return f"v{type_.count}{name}" if isinstance(type_, ir.VectorType) else str(name)
