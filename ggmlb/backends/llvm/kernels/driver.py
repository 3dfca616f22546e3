"""The driver: machine code by which threads run the steps of a plan, with work stealing.

A plan is a table of steps: address of a kernel, address of its arguments, and number of chunks. The thread
that computes the plan starts one step after another; the workers poll. Each thread has a word with the
remaining chunks of its share of the step. It runs those first, in alternating order, to reuse its cache from
the previous step; then it steals chunks of other threads, from the far end. A step ends when all its chunks
are done, without waiting for threads that took none.

A cache line written by another core takes 0.1 to 0.25 microseconds to arrive, as long as a small chunk. So
all that a thread needs for a step is in cache lines of its own, an idle thread polls only those, and a thread
adds its finished chunks to the common count only once it finds no more.

Control block, in words of 8 bytes, each group in its own cache lines:

    0    chunks done by workers, of all steps
    16   1 while a plan is computed
    32   1 to stop; the address of sched_yield, or 0; number of threads
    48   only of the calling thread: step number; chunks done by workers before the step
    64   per thread: step number << 40 | end of its share << 20 | first chunk of it;
         kernel, arguments and number of chunks of the step

A share that is not empty belongs to the current step: so a thread that takes a chunk by compare-and-exchange
of the word has read the kernel and arguments of that step.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ggmlb.backends.llvm.codegen.emit import I64, Emitter, Value, Variable

DONE, STATE, STOP, NUMBER, WORDS, THREAD_WORDS = 0, 16, 32, 48, 64, 16
YIELD, THREADS, BEFORE = STOP + 1, STOP + 2, NUMBER + 1
STEP_WORDS = 3
CHUNK_BITS = 20
POLLS_BEFORE_HELP, SPINS_BEFORE_YIELD = 64, 4096


def control_words(n_threads: int) -> int:
    """Size of the control block (state that threads share) for `n_threads` threads, in words of 8 bytes."""
    return WORDS + n_threads * THREAD_WORDS


def run(k: Emitter) -> None:
    """Run steps `first` to `last - 1` of a plan in the calling thread, helped by the workers.

    Arguments: `control, table, first, last`.
    """
    control, table, first, last = k.ints(4)
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


def _share(k: Emitter, control: Value, kernel: Value, args: Value, n_chunks: Value) -> None:
    number, n_threads = k.load(I64, control + 8 * NUMBER, 8) + 1, k.load(I64, control + 8 * THREADS, 8)
    k.store(number, control + 8 * NUMBER, 8)
    with k.loop(0, n_threads) as i:
        thread = n_threads - 1 - i  # the calling thread's share last
        first, end = (n_chunks * at // n_threads for at in (thread, thread + 1))
        for j, value in enumerate((kernel, args, n_chunks), 1):
            k.store(value, _word(control, thread) + 8 * j, 8)
        word = (number << 2 * CHUNK_BITS) | (end << CHUNK_BITS) | first
        k.build.store_atomic(word.raw, _pointer(k, _word(control, thread)), "release", 8)
    own = k.variable(k.i64(0))
    _work(k, control, k.i64(0), n_threads, own)
    before = k.load(I64, control + 8 * BEFORE, 8) + n_chunks - own.now
    k.store(before, control + 8 * BEFORE, 8)
    spins = k.variable(k.i64(0))
    with k.while_() as (_, end_):
        done = _atomic_load(k, control + 8 * DONE) >= before
        wait = k.build.append_basic_block("wait")
        k.build.cbranch(done.raw, end_, wait)
        k.build.position_at_end(wait)
        _pause(k)
        spins.set(spins.now + 1)
        with k.when(spins.now > SPINS_BEFORE_YIELD):
            _yield(k, control)


def serve(k: Emitter) -> None:
    """Run chunks in a worker thread, until `limit` polls in a row find none.

    Called as `(control, thread, limit, 0)`.
    """
    control, thread, limit = k.args, k.chunk, k.n_chunks
    n_threads = k.load(I64, control + 8 * THREADS, 8)
    idle = k.variable(k.i64(0))
    with k.while_() as (again, end):
        first, last = _share_of(_atomic_load(k, _word(control, thread)))
        helps = (idle.now % POLLS_BEFORE_HELP).equals(POLLS_BEFORE_HELP - 1)
        with k.when((first < last) | helps):
            own = k.variable(k.i64(0))
            _work(k, control, thread, n_threads, own)
            with k.when(own.now > 0):
                idle.set(k.i64(0))
        _pause(k)
        idle.set(idle.now + 1)
        seldom = k.build.append_basic_block("seldom")
        k.build.cbranch((idle.now % SPINS_BEFORE_YIELD).equals(0).raw, seldom, again)
        k.build.position_at_end(seldom)
        _yield(k, control)
        stop = k.load(I64, control + 8 * STOP, 8)
        busy = _atomic_load(k, control + 8 * STATE)
        waited = k.select(idle.now > limit, k.i64(1) - busy, 0)
        k.build.cbranch(((stop | waited) > 0).raw, end, again)


def _work(k: Emitter, control: Value, thread: Value, n_threads: Value, own: Variable) -> None:
    """Run chunks, the thread's own share first, until none is left; `own` counts them."""
    owner, left, told = k.variable(thread), k.variable(n_threads), k.variable(k.i64(0))
    with k.while_() as (again, end):
        word = _atomic_load(k, _word(control, owner.now))
        first, last = _share_of(word)
        claim, following = (k.build.append_basic_block(name) for name in ("claim", "following"))
        k.build.cbranch((first < last).raw, claim, following)

        k.build.position_at_end(claim)
        kernel, args, n_chunks = (k.load(I64, _word(control, owner.now) + 8 * j, 8) for j in range(1, 4))
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
        _call(k, kernel, args, k.select(backwards, last - 1, first), n_chunks, thread)
        own.set(own.now + 1)
        k.build.branch(again)

        k.build.position_at_end(following)
        with k.when((own.now > told.now) & (thread > 0)):
            more = own.now - told.now
            k.build.atomic_rmw("add", _pointer(k, control + 8 * DONE), more.raw, "acq_rel")
            told.set(own.now)
        left.set(left.now - 1)
        owner.set(k.select((owner.now + 1).equals(n_threads), k.i64(0), owner.now + 1))
        k.build.cbranch((left.now > 0).raw, again, end)
        k.build.position_at_end(k.build.append_basic_block("unreached"))
        k.build.unreachable()


def _share_of(word: Value) -> tuple[Value, Value]:
    """The first remaining chunk of a thread's share, and the end of the share."""
    low = (1 << CHUNK_BITS) - 1
    return word & low, (word >> CHUNK_BITS) & low


def _word(control: Value, thread: Value) -> Value:
    return control + 8 * WORDS + thread * (8 * THREAD_WORDS)


def _call(k: Emitter, kernel: Value, *args: Value) -> None:
    pointer = k.build.inttoptr(kernel.raw, ir.FunctionType(ir.VoidType(), [I64] * 4).as_pointer())
    k.build.call(pointer, [a.raw for a in args])


def _pointer(k: Emitter, address: Value) -> Any:
    return k.build.inttoptr(address.raw, I64.as_pointer())


def _atomic_load(k: Emitter, address: Value) -> Value:
    return Value(k, k.build.load_atomic(_pointer(k, address), "acquire", 8, typ=I64))


def _pause(k: Emitter) -> None:
    """Emit the pause instruction, which yields the core to its other hardware thread."""
    if k.level.dot in ("vnni", "maddubs"):
        k.call("llvm.x86.sse2.pause", ir.VoidType())


def _yield(k: Emitter, control: Value) -> None:
    function = k.load(I64, control + 8 * YIELD, 8)
    with k.when(function > 0):
        pointer = k.build.inttoptr(function.raw, ir.FunctionType(ir.VoidType(), []).as_pointer())
        k.build.call(pointer, [])
