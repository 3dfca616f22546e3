"""The driver: threads run the steps of a plan, without Python between them.

A plan is a table of steps: the address of a kernel, the address of its arguments, how many chunks its work
is cut into, and how many threads may share it. The thread that computes the plan goes from step to step;
the others watch one word, which holds the number of the step that is open and the next chunk that nobody
has taken. A step is done when all its chunks are: nobody waits for a thread that has not come.

The control block, in words of 8 bytes, each group in a cache line of its own:

    0    the word: number of the step << 20 | next chunk; CLOSED for a chunk while a step is written
    8    chunks that are done
    16   kernel, arguments and chunks of the open step
    24   1 while a plan is computed; 1 to stop; the address of sched_yield, or 0
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir

from ggmlb.backends.numba.llvm.emit import I64, Kernel, Value

if TYPE_CHECKING:
    from typing import Any

WORD, DONE, STEP, STATE = 0, 8, 16, 24
CONTROL_WORDS = 32
STEP_WORDS = 4
CHUNK_BITS = 20
CLOSED = (1 << CHUNK_BITS) - 1
"""No step has as many chunks."""
SPINS_BEFORE_YIELD = 4096


def run(k: Kernel) -> None:
    """Compute the steps from `first` on below `last`: `(control, table, first, last)`."""
    control, table, first, last = k.args, k.chunk, k.n_chunks, k.thread
    k.store(k.i64(1), control + 8 * STATE, 8)
    with k.loop(first, last) as i:
        step = table + i * (8 * STEP_WORDS)
        kernel, args, n_chunks, threads = (k.load(I64, step + 8 * j, 8) for j in range(4))
        with k.build.if_else((threads < 2).raw) as (alone, together):
            with alone, k.loop(0, n_chunks) as chunk:
                _call(k, kernel, args, chunk, n_chunks, k.i64(0))
            with together:
                _share(k, control, kernel, args, n_chunks)
    k.store(k.i64(0), control + 8 * STATE, 8)


def _share(k: Kernel, control: Value, kernel: Value, args: Value, n_chunks: Value) -> None:
    # The new number comes first, with nothing to take: a thread that read the word before would else claim
    # a chunk of the old step by the new one's limit.
    number = ((_atomic_load(k, control + 8 * WORD) >> CHUNK_BITS) + 1) << CHUNK_BITS
    _atomic(k, "xchg", control + 8 * WORD, number | CLOSED)
    for j, value in enumerate((kernel, args, n_chunks)):
        k.store(value, control + 8 * (STEP + j), 8)
    _atomic(k, "xchg", control + 8 * DONE, k.i64(0))
    _atomic(k, "xchg", control + 8 * WORD, number)
    with k.while_() as (again, end):
        _take(k, control, k.i64(0), again, end)
    spins = k.variable(k.i64(0))
    with k.while_() as (_, end):
        done = _atomic_load(k, control + 8 * DONE) >= n_chunks
        wait = k.build.append_basic_block("wait")
        k.build.cbranch(done.raw, end, wait)
        k.build.position_at_end(wait)
        _pause(k)
        spins.set(spins.now + 1)
        with k.when(spins.now > SPINS_BEFORE_YIELD):
            _yield(k, control)


def serve(k: Kernel) -> None:
    """Take chunks until nothing came for `limit` turns: `(control, thread, limit, unused)`."""
    control, thread, limit = k.args, k.chunk, k.n_chunks
    idle = k.variable(k.i64(0))
    with k.while_() as (again, end):
        with k.while_() as (more, none):
            _take(k, control, thread, more, none, lambda: idle.set(k.i64(0)))
        _pause(k)
        idle.set(idle.now + 1)
        stop = k.load(I64, control + 8 * (STATE + 1), 8)
        busy = _atomic_load(k, control + 8 * STATE)
        with k.when((idle.now % SPINS_BEFORE_YIELD).equals(0)):
            _yield(k, control)
        waited = k.select(idle.now > limit, k.i64(1) - busy, 0)
        k.build.cbranch(((stop | waited) > 0).raw, end, again)


def _take(k: Kernel, control: Value, thread: Value, again: Any, none: Any, found: Any = None) -> None:
    """Take a chunk and do it, and branch to `again`; or branch to `none`."""
    word = _atomic_load(k, control + 8 * WORD)
    chunk = word & ((1 << CHUNK_BITS) - 1)
    kernel, args, n_chunks = (k.load(I64, control + 8 * (STEP + j), 8) for j in range(3))
    claim = k.build.append_basic_block("claim")
    k.build.cbranch((chunk < n_chunks).raw, claim, none)
    k.build.position_at_end(claim)
    pointer = _pointer(k, control + 8 * WORD)
    pair = k.build.cmpxchg(pointer, word.raw, (word + 1).raw, "acq_rel", "acquire")
    mine = k.build.append_basic_block("mine")
    k.build.cbranch(k.build.extract_value(pair, 1), mine, again)
    k.build.position_at_end(mine)
    if found is not None:
        found()
    _call(k, kernel, args, chunk, n_chunks, thread)
    _atomic(k, "add", control + 8 * DONE, k.i64(1))
    k.build.branch(again)
    k.build.position_at_end(k.build.append_basic_block("unreached"))
    k.build.unreachable()


def _call(k: Kernel, kernel: Value, *args: Value) -> None:
    pointer = k.build.inttoptr(kernel.raw, ir.FunctionType(ir.VoidType(), [I64] * 4).as_pointer())
    k.build.call(pointer, [a.raw for a in args])


def _pointer(k: Kernel, address: Value) -> Any:
    return k.build.inttoptr(address.raw, I64.as_pointer())


def _atomic(k: Kernel, how: str, address: Value, value: Value) -> None:
    k.build.atomic_rmw(how, _pointer(k, address), value.raw, "acq_rel")


def _atomic_load(k: Kernel, address: Value) -> Value:
    return Value(k, k.build.load_atomic(_pointer(k, address), "acquire", 8, typ=I64))


def _pause(k: Kernel) -> None:
    """Tell the processor that it waits; costs other threads of the core nothing."""
    if k.level.dot in ("vnni", "maddubs"):
        k.call("llvm.x86.sse2.pause", ir.VoidType())


def _yield(k: Kernel, control: Value) -> None:
    function = k.load(I64, control + 8 * (STATE + 2), 8)
    with k.when(function > 0):
        pointer = k.build.inttoptr(function.raw, ir.FunctionType(ir.VoidType(), []).as_pointer())
        k.build.call(pointer, [])
