"""Mode `perf`: time, bandwidth and rate of ops, beside what the device's own memory and products reach.

Sizes are those of a language model's layer on a GPU, and a quarter of that along an edge on a CPU; weights
of products of one column are twice as wide and four times as high, so that caches do not hold them. An op's
limit is the time that its bytes take at the copy's bandwidth, or its arithmetic at the product's rate,
whichever is longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np

from ggmlb.core import dtypes
from ggmlb.core.context import Context
from ggmlb.core.dtypes import DType
from ggmlb.core.enums import NO_OPS, DeviceType, Op
from ggmlb.core.errors import AllocationError, ArgumentError, DTypeError, ShapeError, one_line
from ggmlb.core.graph import Graph
from ggmlb.core.tensor import Tensor
from ggmlb.interface import Device
from ggmlb.runtime.alloc import alloc_ctx_tensors
from ggmlb.testing.devices import weight_memories
from ggmlb.testing.placing import alloc_weight
from ggmlb.testing.results import Outcome, Result

F32, F16, BF16, I32, I64 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I64

BATCH_S: Final = 0.05
"""Time that one measurement takes, at least [s]."""
BATCHES: Final = 5
"""Measurements, of which the median counts."""
BUDGET_S: Final = 3.0
"""An op that takes longer is measured once."""
PRODUCTS: Final = (F32, F16, DType.Q8_0, DType.Q4_0)
"""Types of weights, the fastest of whose products is a limit: short integers may beat floats."""
PATTERN_ROWS: Final = 16
"""Rows of different values in a leaf; larger ones repeat them, because quantising takes long."""


@dataclass(frozen=True, slots=True)
class PerfCase:
    """An op of a given size.

    Attributes:
        op: Its function.
        id: Op, types, and what sets it apart; its sizes depend on the device.
        build: Makes the op's node from a context and a scale: 4 on GPUs, 1 on CPUs.
        memory: Where the op's first operand lies: a kind of memory for weights, or the device's own if empty.
    """

    op: str
    id: str
    build: Callable[[Context, int], Tensor]
    memory: str = ""

    @property
    def ops(self) -> frozenset[str]:
        """The names by which it can be chosen."""
        return frozenset({self.op})

    def within(self, memory: str) -> PerfCase:
        """Return the same case with the op's first operand, a weight, in another kind of memory."""
        return replace(self, id=f"{self.id} in {memory}", memory=memory)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device reaches at best.

    Attributes:
        copy_gb_s: Bytes read and written by a copy in its memory [GB/s].
        product_gflop_s: A square product, by the type of its weights [GFLOP/s].
    """

    copy_gb_s: float
    product_gflop_s: dict[str, float]

    @property
    def best(self) -> tuple[str, float]:
        """The type of the fastest product, and its rate [GFLOP/s]; `("", 0.0)` if the device has none."""
        return max(self.product_gflop_s.items(), key=lambda of: of[1], default=("", 0.0))


def _t(c: Context, dtype: DType, *ne: int) -> Tensor:
    return c.new_tensor(dtype, ne)


def _mul_mat(dtype: DType, n: int) -> PerfCase:
    k, m = (1024, 1024) if n > 1 else (2048, 4096)

    def build(c: Context, s: int) -> Tensor:
        return c.mul_mat(_t(c, dtype, k * s, m * s), _t(c, F32, k * s, n))

    return PerfCase("mul_mat", f"mul_mat({dtype.name.lower()},f32;n={n})", build)


def _mul_mat_id(dtype: DType, n: int) -> PerfCase:
    def build(c: Context, s: int) -> Tensor:
        experts = _t(c, dtype, 512 * s, 256 * s, 16)
        return c.mul_mat_id(experts, _t(c, F32, 512 * s, 4, n), _t(c, I32, 4, n))

    return PerfCase("mul_mat_id", f"mul_mat_id({dtype.name.lower()},f32;n={n})", build)


def _flash_attn(kv: int, n: int, dtype: DType) -> PerfCase:
    def build(c: Context, s: int) -> Tensor:
        k, v = _t(c, dtype, 128, kv, 2 * s), _t(c, dtype, 128, kv, 2 * s)
        return c.flash_attn_ext(_t(c, F32, 128, n, 8 * s), k, v, _t(c, F16, kv, n), 0.1)

    return PerfCase("flash_attn_ext", f"flash_attn_ext(f32,{dtype.name.lower()};n={n},kv={kv})", build)


def _simple(op: str, text: str, build: Callable[[Context, int], Tensor]) -> PerfCase:
    return PerfCase(op, f"{op}({text})", build)


def _rows(c: Context, s: int, dtype: DType = F32, n: int = 512) -> Tensor:
    return _t(c, dtype, 1024 * s, n)


_WEIGHTS = (F32, F16, BF16, DType.Q4_0, DType.Q8_0, DType.Q4_K, DType.Q6_K, DType.MXFP4)

CASES: Final[tuple[PerfCase, ...]] = (
    _simple("cpy", "f32,f32", lambda c, s: c.cpy(_rows(c, s, F32, 4096), _rows(c, s, F32, 4096))),
    _simple("cpy", "f32,f16", lambda c, s: c.cpy(_rows(c, s, F32, 4096), _rows(c, s, F16, 4096))),
    _simple("cpy", "f32,q8_0", lambda c, s: c.cpy(_rows(c, s), _rows(c, s, DType.Q8_0))),
    _simple("cont", "f32,transposed", lambda c, s: c.cont(c.transpose(_rows(c, s, F32, 1024 * s)))),
    _simple("add", "f32,f32", lambda c, s: c.add(_rows(c, s), _rows(c, s))),
    _simple("add", "f32,f32;one row", lambda c, s: c.add(_rows(c, s), _rows(c, s, n=1))),
    _simple("mul", "f32,f32", lambda c, s: c.mul(_rows(c, s), _rows(c, s))),
    _simple("scale", "f32", lambda c, s: c.scale(_rows(c, s), 0.5)),
    _simple("silu", "f32", lambda c, s: c.silu(_rows(c, s))),
    _simple("gelu", "f32", lambda c, s: c.gelu(_rows(c, s))),
    _simple("swiglu", "f32", lambda c, s: c.swiglu(_t(c, F32, 2048 * s, 512))),
    _simple("norm", "f32", lambda c, s: c.norm(_rows(c, s), 1e-5)),
    _simple("rms_norm", "f32", lambda c, s: c.rms_norm(_rows(c, s), 1e-5)),
    _simple("soft_max", "f32", lambda c, s: c.soft_max(_rows(c, s))),
    _simple("rope", "f32", lambda c, s: c.rope(_t(c, F32, 128, 8 * s, 512), _t(c, I32, 512), 128)),
    _simple("sum_rows", "f32", lambda c, s: c.sum_rows(_rows(c, s))),
    _simple("argmax", "f32", lambda c, s: c.argmax(_t(c, F32, 8000 * s, 32))),
    _simple("argsort", "f32", lambda c, s: c.argsort(_t(c, F32, 1024 * s, 32))),
    _simple("top_k", "f32", lambda c, s: c.top_k(_t(c, F32, 8000 * s, 16), 40)),
    _simple("cumsum", "f32", lambda c, s: c.cumsum(_rows(c, s))),
    *(
        _simple(
            "get_rows",
            t.name.lower(),
            lambda c, s, t=t: c.get_rows(_t(c, t, 1024 * s, 2048 * s), _t(c, I32, 512)),  # type: ignore[misc]
        )
        for t in (F32, F16, DType.Q4_0)
    ),
    _simple(
        "set_rows",
        "f16,f32",
        lambda c, s: c.set_rows(_t(c, F16, 256 * s, 2048 * s), _t(c, F32, 256 * s, 512), _t(c, I64, 512)),
    ),
    _simple("concat", "f32,f32", lambda c, s: c.concat(_rows(c, s), _rows(c, s), 1)),
    _simple("repeat", "f32;one row", lambda c, s: c.repeat(_rows(c, s, n=1), _rows(c, s))),
    *(_mul_mat(t, n) for n in (1, 8, 512) for t in _WEIGHTS),
    *(_mul_mat_id(t, n) for n in (1, 64) for t in (F16, DType.Q4_0)),
    *(_flash_attn(kv, n, t) for t in (F16, DType.Q8_0) for kv, n in ((4096, 1), (1024, 512))),
    _simple(
        "conv_2d_direct",
        "f16,f32",
        lambda c, s: c.conv_2d_direct(_t(c, F16, 3, 3, 64, 64), _t(c, F32, 32 * s, 32 * s, 64)),
    ),
    _simple(
        "im2col",
        "f16,f32",
        lambda c, s: c.im2col(
            _t(c, F16, 3, 3, 64, 1), _t(c, F32, 32 * s, 32 * s, 64), 1, 1, 1, 1, 1, 1, True, F16
        ),
    ),
    _simple("upscale", "f32", lambda c, s: c.upscale(_t(c, F32, 32 * s, 32 * s, 64), 2)),
    _simple(
        "ssm_conv",
        "f32,f32",
        lambda c, s: c.ssm_conv(_t(c, F32, 515, 1024 * s), _t(c, F32, 4, 1024 * s)),
    ),
)
"""In the order of the table."""


def scale_of(device: Device) -> int:
    """Return the scale of a device's cases."""
    return 4 if device.type in (DeviceType.GPU, DeviceType.IGPU) else 1


def measure(device: Device, case: PerfCase, rates: Rates) -> Result:
    """Time a case on a device."""
    ctx = Context()
    node = case.build(ctx, scale_of(device))
    try:
        took, why = _time(device, ctx, node, case.memory)
    except AllocationError as error:
        took, why = None, f"no room: {error}"
    except Exception as error:
        told = f"it raised {one_line(error)}"
        return Result("perf", device.name, case.op, case.id, Outcome.FAILED, told)
    if took is None:
        return Result("perf", device.name, case.op, case.id, Outcome.SKIPPED, why)
    moved, work = moved_nbytes(node), flops(node)
    best, best_gflop_s = rates.best
    limits = {"copy": moved / rates.copy_gb_s / 1e9} if rates.copy_gb_s else {}
    if work and best_gflop_s:
        limits["product"] = work / best_gflop_s / 1e9
    limit = max(limits, key=limits.__getitem__, default=None)
    facts: dict[str, Any] = {
        "memory": case.memory,
        "size": ", ".join(_size(s) for s in node.src if s is not None),
        "gb_s": moved / took / 1e9,
        "gflop_s": work / took / 1e9 if work else None,
        "limit": limit,
        "percent_of_limit": 100 * limits[limit] / took if limit else None,
        "copy_gb_s": rates.copy_gb_s or None,
        "product_gflop_s": best_gflop_s or None,
        "product_type": best or None,
    }
    return Result("perf", device.name, case.op, case.id, Outcome.PASSED, "", None, took, facts)


def _time(device: Device, ctx: Context, node: Tensor, memory: str) -> tuple[float | None, str]:
    """Return the time of a node whose weight may lie elsewhere [s], or why it cannot be measured."""
    with ExitStack() as stack:
        if memory:
            (buft,) = (b for b in weight_memories(device) if b.name == memory)
            try:
                stack.enter_context(alloc_weight(node, buft))
            except (ArgumentError, DTypeError, ShapeError) as error:
                return None, f"not supported: {error}"
        why = device.declines(node)
        return (None, f"not supported: {why}") if why else (time_node(device, ctx, node), "")


def measure_rates(device: Device) -> Rates:
    """Measure the copy and the products that other ops are held against."""
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
    return Rates(2 * copy.nbytes / took / 1e9 if took else 0.0, products)


def time_or_none(device: Device, ctx: Context, node: Tensor) -> float | None:
    """Return the time of a node [s], or `None` if the device does not compute it."""
    return time_node(device, ctx, node) if device.supports_op(node) else None


def time_node(device: Device, ctx: Context, *nodes: Tensor) -> float:
    """Return the time of a computation of the nodes, once the plan is made [s]: the median of some."""
    with device.init_backend() as stream, alloc_ctx_tensors(ctx, stream) as buffer:
        buffer.clear(0)
        for tensor in ctx.tensors:
            if tensor.op in NO_OPS and tensor.view_src is None:
                tensor.set(_data(tensor.dtype, tensor.ne))
        plan = stream.graph_plan_create(Graph().build_forward_expand(*nodes))

        def run(times: int) -> float:
            start = perf_counter()
            for _ in range(times):
                stream.graph_plan_compute(plan)
            stream.synchronize()
            return (perf_counter() - start) / times

        once = min(run(1) for _ in range(2))
        if once > BUDGET_S:
            return once
        times = max(1, math.ceil(BATCH_S / once))
        return median(run(times) for _ in range(BATCHES))


@cache
def _pattern(dtype: DType, n: int) -> bytes:
    rows = np.random.default_rng(n).uniform(-1, 1, (PATTERN_ROWS, n)).astype(np.float32)
    return dtypes.quantize(rows, dtype).tobytes()


def _data(dtype: DType, ne: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return values of a leaf: a few random rows, again and again; indices are rows or experts in turn."""
    n = math.prod(ne)
    if dtype in (I32, I64):
        return (np.arange(n) % 16).astype(dtype.numpy).view(np.uint8)
    pattern = np.frombuffer(_pattern(dtype, ne[0]), np.uint8)
    return np.resize(pattern, dtype.row_size(ne[0]) * math.prod(ne[1:]))


def moved_nbytes(node: Tensor) -> int:
    """Return the bytes that the op must read and write at least."""
    written = node.nbytes
    if node.op in (Op.SET_ROWS, Op.CPY):
        source = node.src[0]
        assert source is not None
        rows = source.n_rows * node.dtype.row_size(node.ne[0])
        return source.nbytes + (rows if node.op is Op.SET_ROWS else written)
    if node.op is Op.GET_ROWS:
        table = node.src[0]
        assert table is not None
        return node.n_rows * table.dtype.row_size(table.ne[0]) + written
    if node.op is Op.MUL_MAT_ID:
        experts, b, ids = node.src[:3]
        assert experts is not None and b is not None and ids is not None
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
