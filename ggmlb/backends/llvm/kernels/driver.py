"""The driver: machine code in which threads run the steps of a plan.

A plan is a table of steps: the address of a kernel, the address of its arguments, and the number of
chunks of its work. The thread that computes the plan opens one step after another; the others poll. Each
thread has a word with the remaining chunks of its share of the open step. It takes those first, which
reuse its cache from the previous step, in alternating order; then it steals chunks of others, from the
far end. A step is done when all its chunks are done, without waiting for threads that took none.

The control block, in words of 8 bytes, each group in cache lines of its own:

    0    kernel, arguments and chunks of the open step
    8    chunks that are done
    16   1 while a plan is computed; 1 to stop; the address of sched_yield, or 0; threads; number of the step
    24   for each thread: number of the step << 40 | last chunk of its share + 1 << 20 | first

A word with a chunk belongs to the open step: a thread that takes a chunk by compare-and-exchange of the
word has therefore read the kernel and arguments of that step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

from ggmlb.backends.llvm.codegen.value import I64, Value

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Kernel, Variable

STEP, DONE, STATE, WORDS = 0, 8, 16, 24
STEP_WORDS = 3
CHUNK_BITS = 20
SPINS_BEFORE_YIELD = 4096

_STOP, _YIELD, _THREADS, _NUMBER = (8 * (STATE + i) for i in range(1, 5))


def control_words(n_threads: int) -> int:
    """Words of the control block."""
    return WORDS + -(-n_threads // 8) * 8


def run(k: Kernel) -> None:
    """Compute the steps from `first` on below `last`: `(control, table, first, last)`."""
    control, table, first, last = k.args, k.chunk, k.n_chunks, k.thread
    k.store(k.i64(1), control + 8 * STATE, 8)
    with k.loop(first, last) as i:
        step = table + i * (8 * STEP_WORDS)
        kernel, args, n_chunks = (k.load(I64, step + 8 * j, 8) for j in range(3))
        with k.build.if_else((n_chunks < 2).raw) as (alone, together):
            with alone:
                _call(k, kernel, args, k.i64(0), n_chunks, k.i64(0))
            with together:
                _share(k, control, kernel, args, n_chunks)
    k.store(k.i64(0), control + 8 * STATE, 8)


def _share(k: Kernel, control: Value, kernel: Value, args: Value, n_chunks: Value) -> None:
    for j, value in enumerate((kernel, args, n_chunks)):
        k.store(value, control + 8 * (STEP + j), 8)
    k.store(k.i64(0), control + 8 * DONE, 8)
    number, n_threads = k.load(I64, control + _NUMBER, 8) + 1, k.load(I64, control + _THREADS, 8)
    k.store(number, control + _NUMBER, 8)
    first = k.variable(k.i64(0))
    with k.loop(0, n_threads) as thread:
        end = n_chunks * (thread + 1) // n_threads
        word = (number << 2 * CHUNK_BITS) | (end << CHUNK_BITS) | first.now
        k.build.store_atomic(word.raw, _pointer(k, _word(control, thread)), "release", 8)
        first.set(end)
    _work(k, control, k.i64(0))
    spins = k.variable(k.i64(0))
    with k.while_() as (_, end_):
        done = _atomic_load(k, control + 8 * DONE) >= n_chunks
        wait = k.build.append_basic_block("wait")
        k.build.cbranch(done.raw, end_, wait)
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
        _work(k, control, thread, idle)
        _pause(k)
        idle.set(idle.now + 1)
        stop = k.load(I64, control + _STOP, 8)
        busy = _atomic_load(k, control + 8 * STATE)
        with k.when((idle.now % SPINS_BEFORE_YIELD).equals(0)):
            _yield(k, control)
        waited = k.select(idle.now > limit, k.i64(1) - busy, 0)
        k.build.cbranch(((stop | waited) > 0).raw, end, again)


def _work(k: Kernel, control: Value, thread: Value, idle: Variable | None = None) -> None:
    """Take chunks and do them, the thread's own first, until nobody has any; then `idle` begins anew."""
    n_threads = k.load(I64, control + _THREADS, 8)
    owner, left = k.variable(thread), k.variable(n_threads)
    low = (1 << CHUNK_BITS) - 1
    with k.while_() as (again, end):
        word = _atomic_load(k, _word(control, owner.now))
        first, last = word & low, (word >> CHUNK_BITS) & low
        claim, following = (k.build.append_basic_block(name) for name in ("claim", "following"))
        k.build.cbranch((first < last).raw, claim, following)

        k.build.position_at_end(claim)
        kernel, args, n_chunks = (k.load(I64, control + 8 * (STEP + j), 8) for j in range(3))
        number = word >> 2 * CHUNK_BITS
        others = k.select(owner.now.equals(thread), k.i64(0), 1)
        backwards = ((number ^ others) & 1) > 0
        rest = k.select(backwards, word - (1 << CHUNK_BITS), word + 1)
        pair = k.build.cmpxchg(
            _pointer(k, _word(control, owner.now)), word.raw, rest.raw, "acq_rel", "acquire"
        )
        mine = k.build.append_basic_block("mine")
        k.build.cbranch(k.build.extract_value(pair, 1), mine, again)
        k.build.position_at_end(mine)
        if idle is not None:
            idle.set(k.i64(0))
        _call(k, kernel, args, k.select(backwards, last - 1, first), n_chunks, thread)
        k.build.atomic_rmw("add", _pointer(k, control + 8 * DONE), ir.Constant(I64, 1), "acq_rel")
        k.build.branch(again)

        k.build.position_at_end(following)
        left.set(left.now - 1)
        owner.set(k.select((owner.now + 1).equals(n_threads), k.i64(0), owner.now + 1))
        k.build.cbranch((left.now > 0).raw, again, end)
        k.build.position_at_end(k.build.append_basic_block("unreached"))
        k.build.unreachable()


def _word(control: Value, thread: Value) -> Value:
    return control + 8 * WORDS + thread * 8


def _call(k: Kernel, kernel: Value, *args: Value) -> None:
    pointer = k.build.inttoptr(kernel.raw, ir.FunctionType(ir.VoidType(), [I64] * 4).as_pointer())
    k.build.call(pointer, [a.raw for a in args])


def _pointer(k: Kernel, address: Value) -> Any:
    return k.build.inttoptr(address.raw, I64.as_pointer())


def _atomic_load(k: Kernel, address: Value) -> Value:
    return Value(k, k.build.load_atomic(_pointer(k, address), "acquire", 8, typ=I64))


def _pause(k: Kernel) -> None:
    """Tell the processor that it waits; costs other threads of the core nothing."""
    if k.level.dot in ("vnni", "maddubs"):
        k.call("llvm.x86.sse2.pause", ir.VoidType())


def _yield(k: Kernel, control: Value) -> None:
    function = k.load(I64, control + _YIELD, 8)
    with k.when(function > 0):
        pointer = k.build.inttoptr(function.raw, ir.FunctionType(ir.VoidType(), []).as_pointer())
        k.build.call(pointer, [])
