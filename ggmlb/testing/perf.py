"""Mode `perf`: time, bandwidth and rate of ops, compared with the device's measured peaks.

On a GPU, sizes are those of a language model's layer; on a CPU, rows and columns are a quarter of these.
Weights of products with few columns are twice as wide and four times as high, to exceed caches. An op's
limit (roofline) is the longer of two times: its bytes at the bandwidth of a copy, its arithmetic at the
rate of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from time import perf_counter
from typing import Any, Final

import numpy as np

from ggmlb.core import dtypes
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, DeviceType, Op
from ggmlb.core.errors import AllocationError, ArgumentError, DTypeError, ShapeError
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.baseline import Baseline, Measured, Timing
from ggmlb.testing.cases import FAMILIES, cases_of
from ggmlb.testing.devices import weight_memories
from ggmlb.testing.ops import RECORDS
from ggmlb.testing.placing import alloc_weight
from ggmlb.testing.results import CaseResult, Finding, Outcome

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64

BATCH_S: Final = 0.05
"""Least time of one measurement [s]."""
BATCHES: Final = 5
"""Number of measurements; the median is the result."""
SAMPLES: Final = "samples_s"
"""Fact of a result: the measurements of which its time is the median [s]."""
BUDGET_S: Final = 3.0
"""An op that takes longer is measured once."""
PRODUCTS: Final = (F32, F16, DType.Q8_0, DType.Q4_0)
"""Types of weights; the fastest product is the limit, as short integers may be faster than floats."""
PATTERN_ROWS: Final = 16
"""Distinct rows of a leaf; larger leafs repeat them, because quantising is slow."""


@dataclass(frozen=True, slots=True)
class PerfCase:
    """An op on operands of a given size, timed in mode `perf`.

    Attributes:
        op: Its function, by its name in mode `test`.
        id: Op, types and distinguishing parameters; sizes depend on the device.
        build: Builds the op's node from a context and a scale: 4 on GPUs, 1 on CPUs.
        memory: The buffer type of the op's first operand; the device's own if empty.
    """

    op: str
    id: str
    build: Callable[[Context, int], Tensor]
    memory: str = ""

    @property
    def family(self) -> str:
        """The family of test programs (as in mode `test`) for this case's op."""
        return _names(self)[0]

    @property
    def ops(self) -> frozenset[str]:
        """Names of ops that select the case, as in mode `test`."""
        return _names(self)[1]

    def within(self, memory: str) -> PerfCase:
        """Return the same case with the op's first operand, a weight, in another buffer type."""
        return replace(self, id=f"{self.id} in {memory}", memory=memory)


@cache
def _names(case: PerfCase) -> tuple[str, frozenset[str]]:
    """Return the family of mode `test` to which a case's op belongs, and its names there."""
    node = case.build(Context(), 1)
    ops = frozenset({case.op, node.op.value.lower(), node.op_desc().lower()})
    if case.op in FAMILIES:
        return case.op, ops
    return next(family for family in FAMILIES if case.op in cases_of(family)[0].ops), ops


@dataclass(frozen=True, slots=True)
class PeakRates:
    """Measured peak rates of a device.

    Attributes:
        copy_gb_s: Bandwidth of a copy in its memory, reads plus writes [GB/s].
        product_gflop_s: Rate of a square product, by the type of its weights [GFLOP/s].
    """

    copy_gb_s: float
    product_gflop_s: dict[str, float]

    @property
    def best(self) -> tuple[str, float]:
        """The type of the fastest product, and its rate [GFLOP/s]; `("", 0.0)` if the device has none."""
        return max(self.product_gflop_s.items(), key=lambda of: of[1], default=("", 0.0))


CASES: Final = tuple(PerfCase(p.fn, p.id, p.build) for record in RECORDS.values() for p in record.perf)
"""The timed cases of the ops' records, in the order of the table."""


def scale_of(device: Device) -> int:
    """Return the scale of a device's sizes: 4 on GPUs, 1 on CPUs."""
    return 4 if device.type in (DeviceType.GPU, DeviceType.IGPU) else 1


def measure(device: Device, case: PerfCase, rates: PeakRates) -> CaseResult:
    """Time a case on a device, and compare with the limit that its peak `rates` set."""
    ctx = Context()
    node = case.build(ctx, scale_of(device))
    try:
        took, why = _time(device, ctx, node, case.memory)
    except AllocationError as error:
        took, why = None, f"no room: {error}"
    except Exception as error:
        return Finding.failed(error).result("perf", device.name, case.family, case.id)
    if took is None:
        return Finding(Outcome.SKIPPED, why).result("perf", device.name, case.family, case.id)
    moved, work = moved_nbytes(node), flops(node)
    best, best_gflop_s = rates.best
    limits = {"copy": moved / rates.copy_gb_s / 1e9} if rates.copy_gb_s else {}
    if work and best_gflop_s:
        limits["product"] = work / best_gflop_s / 1e9
    limit = max(limits, key=limits.__getitem__, default=None)
    facts: dict[str, Any] = {
        "memory": case.memory,
        SAMPLES: took.samples,
        "size": ", ".join(_size(s) for s in node.src if s is not None),
        "gb_s": moved / took / 1e9,
        "gflop_s": work / took / 1e9 if work else None,
        "limit": limit,
        "percent_of_limit": 100 * limits[limit] / took if limit else None,
        "copy_gb_s": rates.copy_gb_s or None,
        "product_gflop_s": best_gflop_s or None,
        "product_type": best or None,
    }
    return Finding(Outcome.PASSED).result("perf", device.name, case.family, case.id, float(took), facts)


def measured(result: CaseResult) -> Measured | None:
    """Return a timed case as a measurement for a baseline; `None` for other results."""
    if result.mode != "perf" or not result.time_s:
        return None
    return Measured(result.device, result.id, "s", tuple(result.facts[SAMPLES]))


def compared(
    result: CaseResult, baseline: Baseline, allowed: float, again: Callable[[], CaseResult]
) -> CaseResult:
    """Compare a timed case with a baseline; it fails if it is slower by more than allowed and the noise."""
    now = measured(result)
    if now is None:
        return result
    now, change = baseline.measured_again(now, allowed, lambda: measured(again()))
    facts = {**result.facts, SAMPLES: now.samples}
    if change is None:
        return replace(result, time_s=now.value, facts=facts)
    facts |= {"baseline_s": change.before.value, "slowdown": change.slowdown}
    facts |= {"noise": change.noise, "change": change.verdict}
    result = replace(result, time_s=now.value, facts=facts)
    if change.verdict != "slower":
        return result
    return result.with_outcome(Outcome.FAILED, f"{change.text}; {allowed:.0%} is allowed")


def _time(device: Device, ctx: Context, node: Tensor, memory: str) -> tuple[Timing | None, str]:
    """Return the time of a node [s], or why it cannot be measured; `memory` is its weight's buffer type."""
    with ExitStack() as stack:
        if memory:
            (buft,) = (b for b in weight_memories(device) if b.name == memory)
            try:
                stack.enter_context(alloc_weight(node, buft))
            except (ArgumentError, DTypeError, ShapeError) as error:
                return None, f"not supported: {error}"
        why = device.declines(node)
        return (None, f"not supported: {why}") if why else (time_node(device, ctx, node), "")


def measure_rates(device: Device) -> PeakRates:
    """Measure the peak rates of copies and products."""
    scale = scale_of(device)
    ctx = Context()
    n = (1 << 22) * scale * scale
    copy = ctx.cpy(ctx.new_tensor(F32, (n,)), ctx.new_tensor(F32, (n,)))
    took = time_or_none(device, ctx, copy)
    products = {}
    for dtype in PRODUCTS:
        ctx = Context()
        edge = 1024 * scale
        node = ctx.mul_mat(ctx.new_tensor(dtype, (edge, edge)), ctx.new_tensor(F32, (edge, edge)))
        product = time_or_none(device, ctx, node)
        if product:
            products[dtype.name.lower()] = 2 * edge**3 / product / 1e9
    return PeakRates(2 * copy.nbytes / took / 1e9 if took else 0.0, products)


def time_or_none(device: Device, ctx: Context, node: Tensor) -> Timing | None:
    """Return the time of a node [s], or `None` if the device does not compute it."""
    return time_node(device, ctx, node) if device.supports_op(node) else None


def time_node(device: Device, ctx: Context, *nodes: Tensor) -> Timing:
    """Return the median time [s] of computing the nodes, with a plan made before."""
    with device.init_backend() as stream, alloc_ctx_tensors(ctx, stream) as buffer:
        buffer.clear(0)
        for tensor in ctx.tensors:
            if tensor.op in NO_OPS and tensor.view_src is None:
                tensor.set(leaf_data(tensor.dtype, tensor.ne))
        plan = stream.graph_plan_create(Graph().build_forward_expand(*nodes))

        def run(times: int) -> float:
            start = perf_counter()
            for _ in range(times):
                stream.graph_plan_compute(plan)
            stream.synchronize()
            return (perf_counter() - start) / times

        once = min(run(1) for _ in range(2))
        if once > BUDGET_S:
            return Timing([once])
        times = max(1, math.ceil(BATCH_S / once))
        return Timing(run(times) for _ in range(BATCHES))


@cache
def _pattern(dtype: DType, n: int) -> bytes:
    if dtype.is_quantized and not dtypes.can_quantize(dtype):
        return dtypes.random_blocks(dtype, PATTERN_ROWS * n).tobytes()
    rows = np.random.default_rng(n).uniform(-1, 1, (PATTERN_ROWS, n)).astype(np.float32)
    return dtypes.quantize(rows, dtype).tobytes()


def leaf_data(dtype: DType, ne: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a leaf for timings: a few random rows, repeated.

    i32 elements cycle through 0 to 15, as positions or expert ids; i64 elements are distinct row indices.
    """
    n = math.prod(ne)
    if dtype in (I32, I64):
        return (np.arange(n) % (16 if dtype is I32 else n)).astype(dtype.numpy).view(np.uint8)
    pattern = np.frombuffer(_pattern(dtype, ne[0]), np.uint8)
    return np.resize(pattern, dtype.row_size(ne[0]) * math.prod(ne[1:]))


def moved_nbytes(node: Tensor) -> int:
    """Return the least bytes that the op must read and write."""
    written = node.nbytes
    if node.op in (Op.SET_ROWS, Op.CPY):
        source = node.operand(0)
        rows = source.n_rows * node.dtype.row_size(node.ne[0])
        return source.nbytes + (rows if node.op is Op.SET_ROWS else written)
    if node.op is Op.GET_ROWS:
        table = node.operand(0)
        return node.n_rows * table.dtype.row_size(table.ne[0]) + written
    if node.op is Op.MUL_MAT_ID:
        experts, b, ids = node.operand(0), node.operand(1), node.operand(2)
        used = min(experts.ne[2], ids.n_elements)
        return experts.nbytes * used // experts.ne[2] + b.nbytes + written
    return written + sum(s.nbytes for s in node.src if s is not None)


def flops(node: Tensor) -> int:
    """Return the multiplications and additions of a product; 0 for other ops, which memory limits."""
    a, b = ((*node.src, None, None))[:2]
    if a is None or b is None:
        return 0
    if node.op in (Op.MUL_MAT, Op.MUL_MAT_ID):
        return 2 * a.ne[0] * node.n_elements
    if node.op is Op.FLASH_ATTN_EXT:
        return 4 * a.ne[0] * a.ne[1] * a.ne[2] * a.ne[3] * b.ne[1]
    if node.op is Op.CONV_2D:
        return 2 * a.ne[0] * a.ne[1] * a.ne[2] * node.n_elements
    return 0


def _size(tensor: Tensor) -> str:
    return f"{tensor.dtype.name.lower()}[{','.join(map(str, tensor.ne[: tensor.n_dims]))}]"
