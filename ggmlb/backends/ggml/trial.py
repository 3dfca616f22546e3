"""The child process that tests nodes for `trust.Child`: `python -m ggmlb.backends.ggml.trial`."""

from __future__ import annotations

import math
import os
import pickle
import threading
from contextlib import ExitStack
from time import process_time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggmlb.backends.ggml import backend_reg
from ggmlb.backends.ggml.device import GgmlDevice
from ggmlb.backends.ggml.library import GgmlLibrary, guard
from ggmlb.backends.ggml.plan import INDICES
from ggmlb.backends.ggml.trust import Judge, Shape, Trial, abort_reason, error_line
from ggmlb.core import dtypes
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Hint, Op
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Ne, Tensor, contiguous_nb
from ggmlb.interface import Backend, BufferType, tensor_alloc
from ggmlb.interface.registry import host_device

MOST_NMSE: Final = 1e-3
"""Largest accepted NMSE; ggml rounds activations. The conformance kit has a limit for each op."""

MOST_ELEMENTS: Final = 1 << 18
"""Elements of a tensor above which a trial's shapes are reduced, if its op is in `SHRINKABLE`."""

FEW_ELEMENTS: Final = 256
FEW_DRAWS: Final = 4
"""Elements of a small result, and draws of its values."""

SHRINKABLE: Final = frozenset(
    {Op.MUL_MAT, Op.MUL_MAT_ID, Op.GET_ROWS, Op.SET_ROWS, Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.RMS_NORM,
     Op.NORM, Op.SOFT_MAX, Op.ROPE, Op.CPY, Op.CONT, Op.DUP, Op.SCALE, Op.UNARY, Op.FLASH_ATTN_EXT,
     Op.ADD_ID, Op.L2_NORM, Op.SQR, Op.SUM_ROWS, Op.ARGMAX}
)  # fmt: skip
"""Ops whose operands' extents are equal or repeated, so that all can be reduced alike."""

COPIES: Final = frozenset({Op.CPY, Op.CONT, Op.DUP})
"""The `SHRINKABLE` ops whose operands need only the same number of elements."""

POSITIVE: Final = frozenset(
    {Op.LOG, Op.SQRT, Op.DIV, Op.SOLVE_TRI, Op.OPT_STEP_ADAMW, Op.MUL_MAT, Op.MUL_MAT_ID, Op.OUT_PROD,
     Op.FLASH_ATTN_EXT, Op.FLASH_ATTN_BACK}
)  # fmt: skip
"""Ops tried with positive numbers: their domain, or to avoid cancellation in sums of rounded activations."""


class AcceptAll(Judge):
    """A `Judge` (decides whether ggml may compute a node) that accepts all, for the trial process itself."""

    def verdict(self, device: GgmlDevice, node: Tensor) -> str | None:
        """Return `None`: every node is accepted without a trial."""
        return None


def judge(stream: Backend, reference: Backend, trial: Trial) -> str | None:
    """Compute a trial's node on two streams; return their results' difference as text, or `None`.

    Small nodes are computed for several values: a wrong element may be right by chance.
    """
    trial = _smaller(trial)
    node = _node(trial)
    why = reference.device.declines(node)
    if why is not None:
        return f"nothing to compare it with: the CPU declines it: {why}"
    draws = range(FEW_DRAWS if math.prod(node.ne) < FEW_ELEMENTS else 1)
    return next((why for draw in draws if (why := _compared(stream, reference, trial, draw))), None)


def _compared(stream: Backend, reference: Backend, trial: Trial, draw: int) -> str | None:
    node = _node(trial)
    values = [None if t is None else _values(node, i, t, draw) for i, t in enumerate(node.src)]
    kinds = {buft.name: buft for buft in stream.device.extra_bufts}
    found = _computed(stream, _node(trial), values, kinds.get(trial.memory))
    expected = _computed(reference, _node(trial), values)
    if trial.op is Op.TOP_K:  # in any order
        found, expected = np.sort(found, axis=-1), np.sort(expected, axis=-1)
    strange = ~np.isfinite(expected)
    if not np.array_equal(found[strange], expected[strange], equal_nan=True):
        return "a trial of it computed other infinities or NaN than the CPU"
    a, b = found[~strange].astype(np.float64), expected[~strange].astype(np.float64)
    nmse = float(((a - b) ** 2).sum() / max((b**2).sum(), 1e-30)) if a.size else 0.0
    return (
        None if nmse <= MOST_NMSE else f"a trial of it computed other values than the CPU (NMSE {nmse:.2g})"
    )


def _node(trial: Trial) -> Tensor:
    """Return the node, with leafs as operands."""
    leafs = [
        None if s is None else Tensor(s.dtype, s.ne, s.nb, name=f"src{i}")
        for i, s in enumerate(trial.operands)
    ]
    made, view = trial.result, trial.view_of
    target = None if view is None else leafs[view[0]]
    offset = 0 if view is None else view[1]
    return Tensor(
        made.dtype, made.ne, made.nb, op=trial.op, src=tuple(leafs), params=trial.params, view_src=target,
        view_offs=offset, name="trial",
    )  # fmt: skip


def _computed(
    stream: Backend, node: Tensor, values: list[Any], memory: BufferType | None = None
) -> npt.NDArray[Any]:
    """Compute a node in a new buffer, its first operand in `memory` if given; return the result."""
    buft = stream.default_buffer_type
    placed = [t for t in (*node.src, node) if t is not None and t.view_src is None]
    with ExitStack() as buffers:
        if memory is not None:
            weight = placed.pop(0)
            tensor_alloc(buffers.enter_context(memory.alloc_buffer(memory.alloc_size(weight))), weight, 0)
        sizes = [-(-buft.alloc_size(t) // buft.alignment) * buft.alignment for t in placed]
        buffer = buffers.enter_context(buft.alloc_buffer(sum(sizes)))
        start = 0
        for t, size in zip(placed, sizes, strict=True):
            tensor_alloc(buffer, t, start)
            start += size
        if node.view_src is not None:
            node.buffer, node.offset = buffer, node.view_src.offset + node.view_offs
        buffer.clear(0xFF)  # NaN, to detect reads of uninitialised memory
        for operand, value in zip(node.src, values, strict=True):
            if operand is not None:
                operand.set(value)
        stream.graph_compute(Graph([node], [t for t in node.src if t is not None]))
        return node.to_numpy()


# -- values ----------------------------------------------------------------------------------------


def _values(node: Tensor, index: int, t: Tensor, draw: int) -> npt.NDArray[np.uint8]:
    """Return bytes for an operand: numbers of magnitude 0.1 to 1, or indices in range."""
    random = np.random.default_rng((draw, index))
    raw = np.zeros(t.nbytes, np.uint8)
    if t.is_empty:
        return raw
    if t.dtype.is_quantized and not dtypes.can_quantize(t.dtype):
        blocks = dtypes.random_blocks(t.dtype, t.nbytes // t.dtype.type_size * t.dtype.block_size)
        raw[: blocks.size] = blocks.reshape(-1)
        return raw
    if t.dtype in (DType.I8, DType.I16, DType.I32, DType.I64):
        i1, i0 = np.ogrid[: math.prod(t.ne[1:]), : t.ne[0]]
        numbers = ((i0 + i1 % t.ne[1]) % _n_indices(node, index)).reshape(t.ne[::-1])
    elif node.params.get("hint") is Hint.SRC0_IS_HADAMARD and index == 0:
        numbers = _hadamard(t.ne)
    else:
        numbers = random.uniform(0.1, 1.0, t.ne[::-1]).astype(np.float32)
        if node.op not in POSITIVE:
            numbers *= random.choice([-1.0, 1.0], t.ne[::-1])
    if t.dtype.is_quantized:
        blocks = dtypes.quantize(numbers, t.dtype)
        item, shape = np.dtype((np.void, t.dtype.type_size)), (*t.ne[:0:-1], t.ne[0] // t.dtype.block_size)
        np.ndarray(shape, item, raw.data, 0, t.nb[::-1])[...] = (
            np.ascontiguousarray(blocks).view(item).reshape(shape)
        )
    else:
        np.ndarray(t.ne[::-1], t.dtype.numpy, raw.data, 0, t.nb[::-1])[...] = numbers.astype(t.dtype.numpy)
    return raw


def _hadamard(ne: Ne) -> npt.NDArray[np.float32]:
    """Return normalised Hadamard matrices."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < ne[0]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    rows = matrix[np.arange(ne[1]) % len(matrix), : ne[0]] / math.sqrt(ne[0])
    return np.broadcast_to(rows, (ne[3], ne[2], ne[1], ne[0])).astype(np.float32)


def _n_indices(node: Tensor, index: int) -> int:
    """Return the exclusive upper bound of an operand of indices."""
    at, bound = INDICES.get(node.op, (-1, None))
    return bound(node) if bound is not None and index == at else 64


# -- sizes -----------------------------------------------------------------------------------------


def _smaller(trial: Trial) -> Trial:
    """Return a large trial with extents above 256 reduced: equal ones alike, keeping the node's `kind`."""
    shapes = [s for s in (trial.result, *trial.operands) if s is not None]
    if trial.op not in SHRINKABLE or max(math.prod(s.ne) for s in shapes) <= MOST_ELEMENTS or trial.view_of:
        return trial
    if trial.op in COPIES and len({s.ne for s in shapes}) > 1:
        return trial
    operands = tuple(None if s is None else _cut(s) for s in trial.operands)
    return Trial(trial.op, trial.params, _cut(trial.result), operands, None, trial.memory)


def _cut(s: Shape) -> Shape:
    ne = tuple(n if n <= 256 else 256 + n % 256 for n in s.ne)
    n0, n1, n2, n3 = ne
    nb = list(contiguous_nb(s.dtype, (n0, n1, n2, n3)))
    order = sorted(range(4), key=lambda i: (s.nb[i], i))
    if order != [0, 1, 2, 3] or s.nb != contiguous_nb(s.dtype, s.ne):
        end, before = s.dtype.type_size, s.dtype.type_size
        for i in order:
            has_gap = s.nb[i] > before
            nb[i] = end + 32 * s.dtype.type_size * has_gap
            n, of = (
                (ne[i] // s.dtype.block_size, s.ne[i] // s.dtype.block_size) if i == 0 else (ne[i], s.ne[i])
            )
            end, before = nb[i] * n, s.nb[i] * of
    b0, b1, b2, b3 = nb
    return Shape(s.dtype, (n0, n1, n2, n3), (b0, b1, b2, b3))


# -- process ---------------------------------------------------------------------------------------


def _read(pipe: int) -> Any:
    """Read one message of `trust.Child`, and no byte after it; `None` at the end."""
    size = os.read(pipe, 8)
    return pickle.loads(_read_all(pipe, int.from_bytes(size, "little"))) if size else None


def _read_all(pipe: int, n: int) -> bytes:
    parts = []
    while n:
        parts.append(os.read(pipe, n))
        n -= len(parts[-1])
    return b"".join(parts)


def _write(pipe: int, said: str | None) -> None:
    answer = pickle.dumps(said)
    os.write(pipe, len(answer).to_bytes(8, "little") + answer)


def _limit_time(seconds: int) -> None:
    """Limit the processor time of the process from now on, to stop an endless loop."""
    if os.name == "posix":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_CPU)
        limit = math.ceil(process_time()) + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (limit if most < 0 else min(limit, most), most))


def _end_with_parent() -> None:
    """End this process, even during a trial, when the pipe to its standard input is closed."""
    import select

    if hasattr(select, "poll"):
        ends = select.poll()
        ends.register(0, 0)  # reports only the hang-up
        ends.poll()
        os._exit(0)


def _serve(device: GgmlDevice, answers: int, limit_s: int) -> None:
    """Compute trials until the pipe is closed, or a trial aborts the process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    one = {"n_threads": 1} if device.is_cpu else None  # more threads would spin
    stream, reference = device.init_backend(one), host_device().init_backend()
    while (trial := _read(0)) is not None:
        _limit_time(limit_s)
        try:
            said = judge(stream, reference, trial)
        except Exception as error:  # reported like an abort
            said = f"a trial of it failed: {type(error).__name__}: {error}"
        _write(answers, said)


def main() -> None:
    """Compute trials from standard input; on ggml's CPU in a fork, replaced quickly after an abort."""
    answers = os.dup(1)
    os.dup2(2, 1)  # output of C code goes to stderr
    found, prefix, facts, index, limit_s = _read(0)
    device = GgmlDevice(backend_reg(), GgmlLibrary(found, prefix, facts), index, AcceptAll())
    device.library.load()
    if not (device.is_cpu and hasattr(os, "fork")):  # drivers of GPUs do not survive a fork
        _serve(device, answers, limit_s)
        return
    while True:
        n_written = os.fstat(2).st_size
        fork = os.fork()
        if not fork:
            guard.renew()
            _serve(device, answers, limit_s)
            os._exit(0)
        _, status = os.waitpid(fork, 0)
        if not status:
            return
        words = error_line(os.pread(2, 1 << 20, n_written))
        _write(answers, abort_reason(os.WTERMSIG(status), words))


if __name__ == "__main__":
    main()
