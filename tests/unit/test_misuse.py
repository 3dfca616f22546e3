"""What a user of NumPy, CuPy or PyTorch may try: each is an error of ours that says what to do."""

from __future__ import annotations

import ast
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, Graph, Scheduler
from ggmlb.core.arguments import checked
from ggmlb.parallel.row_split import split_buffer_type


class Things:
    """What the cases use: a stream, a placed tensor `x` of ne [4, 3], and some that lie nowhere."""

    def __init__(self) -> None:
        self.cpu = ggmlb.init_by_name("CPU")
        placed, self.c = Context(), Context()
        self.x = placed.new_tensor("f32", (4, 3), "x")
        self.buffer = ggmlb.alloc_ctx_tensors(placed, self.cpu)
        self.a = self.c.new_tensor("f32", (4, 3), "a")
        self.w = self.c.new_tensor("f32", (4, 5), "w")
        self.v = self.c.new_tensor("f32", (3, 5), "v")

    def watched(self, callback: Any) -> None:
        scheduler = Scheduler([self.cpu])
        scheduler.set_eval_callback(callback)
        scheduler.graph_compute(Graph().build_forward_expand(Context().sqr(self.x)))

    def aborting(self, device: str, callback: Any) -> None:
        graph = Graph().build_forward_expand(self.c.sqr(self.a))
        with ggmlb.init_by_name(device) as backend, ggmlb.alloc_ctx_tensors(self.c, backend):
            backend.abort_callback = callback
            backend.graph_compute(graph)

    def compared(self, callback: Any) -> None:
        graph = Graph().build_forward_expand(self.c.sqr(self.a))
        with ggmlb.alloc_ctx_tensors(self.c, self.cpu):
            ggmlb.compare_graph_backend(self.cpu, self.cpu, graph, callback)

    def proc(self, name: str) -> Any:
        return self.cpu.device.reg.get_proc_address(name)

    def sharded(self, state: Any) -> None:
        device = ggmlb.meta_device([self.cpu.device] * 2, lambda w: state)
        ggmlb.alloc_ctx_tensors(self.c, device.init_backend())

    def freed(self) -> ggmlb.Tensor:
        self.buffer.free()
        return self.x

    def close(self) -> None:
        if not self.buffer.is_freed:
            self.buffer.free()
        self.cpu.free()


@pytest.fixture
def things() -> Iterator[Things]:
    made = Things()
    yield made
    made.close()


Wrong = ggmlb.ArgumentError
ARRAY = np.zeros((3, 4), np.float32)

CASES: dict[str, tuple[Callable[[Things], Any], type[ggmlb.Error], str]] = {
    "array in ne order": (lambda t: t.x.set_array(ARRAY.T), ggmlb.ShapeError, r"\(3, 4\) \(ne reversed\)"),
    "flat array": (lambda t: t.x.set_array(np.zeros(5)), ggmlb.ShapeError, "give one of shape"),
    "text": (lambda t: t.x.set_array(ARRAY.astype(str)), ggmlb.DTypeError, "give real numbers"),
    "objects": (lambda t: t.x.set_array(ARRAY.astype(object)), ggmlb.DTypeError, "holds object"),
    "complex": (lambda t: t.x.set_array(ARRAY.astype(complex)), ggmlb.DTypeError, "give real numbers"),
    "ragged": (lambda t: t.x.set_array([[1, 2], [3]]), ggmlb.ShapeError, "inhomogeneous"),
    "list as bytes": (lambda t: t.x.set([1, 2]), Wrong, "convert values by set_array"),
    "text as bytes": (lambda t: t.x.set("abc"), Wrong, "convert values by set_array"),
    "too many bytes": (lambda t: t.x.set(np.zeros(30)), ggmlb.BoundsError, "the tensor has 48"),
    "records": (lambda t: t.x.set_array(np.zeros((3, 4), "f4,i4")), ggmlb.DTypeError, "give real numbers"),
    "bytes without a type": (lambda t: t.x.set_array(np.zeros((3, 4), "V4")), ggmlb.DTypeError, "give real"),
    "a mask": (lambda t: t.x.set_array(np.ma.masked_array(ARRAY, ARRAY > 3)), Wrong, "array.filled"),
    "a leaf with a mask": (lambda t: t.c.from_array(np.ma.masked_array(ARRAY)), Wrong, "is masked"),
    "nothing as bytes": (lambda t: t.x.set(None), Wrong, "None is not raw bytes"),
    "objects in records": (lambda t: t.x.set(np.zeros(2, [("a", "O")])), Wrong, "is not raw bytes"),
    "objects to fill": (lambda t: t.cpu.get_tensor_async(t.x, np.empty(1, object)), Wrong, "in place"),
    "objects as memory": (lambda t: ggmlb.cpu_buffer_from_ptr(np.empty(1, object)), Wrong, "C-contiguous"),
    "fewer than no bytes": (
        lambda t: t.buffer.set_tensor(t.x, b"1234", 0, -1),
        ggmlb.BoundsError,
        "-1 bytes asked for",
    ),
    "half of the bytes": (
        lambda t: t.cpu.set_tensor_async(t.x, b"1234", 0, 0.5),
        Wrong,
        "set_tensor_async: size is a float; give a whole number",
    ),
    "before the start": (lambda t: t.x.get(-1), ggmlb.BoundsError, "the tensor has 48"),
    "less data than asked for": (
        lambda t: t.buffer.set_tensor(t.x, b"1234", size=8),
        ggmlb.BoundsError,
        "8 bytes asked for, the data has 4",
    ),
    "less data than asked for, queued": (
        lambda t: t.cpu.set_tensor_async(t.x, b"1234", size=8),
        ggmlb.BoundsError,
        "8 bytes asked for, the data has 4",
    ),
    "a buffer of fewer than no bytes": (lambda t: t.cpu.alloc_buffer(-1), Wrong, "-1"),
    "a list as memory": (lambda t: ggmlb.cpu_buffer_from_ptr([1, 2]), Wrong, "C-contiguous"),
    "offset in words": (lambda t: t.x.set(b"1", "4"), Wrong, "set: offset is '4'; give a whole number"),
    "half a byte, NumPy's": (
        lambda t: t.x.get(np.float64(4)),
        Wrong,
        "get: offset is a numpy.float64; give a wh",
    ),
    "half a piece": (lambda t: t.buffer.set_tensor_2d(t.x, b"123", 0, 1, 2, 1.5, 1), Wrong, "give a whole"),
    "filled with a half": (lambda t: t.x.memset(0.5), Wrong, "memset: value is a float; give a whole"),
    "in another buffer": (
        lambda t: t.cpu.alloc_buffer(99).get_tensor(t.x),
        Wrong,
        "the tensor is in another buffer",
    ),
    "in no buffer": (lambda t: t.buffer.memset_tensor(t.a, 0), Wrong, "is in no buffer yet"),
    "array of another buffer": (lambda t: t.cpu.alloc_buffer(99).as_array(t.x), Wrong, "another buffer"),
    "pieces of another buffer": (
        lambda t: t.cpu.alloc_buffer(99).set_tensor_2d(t.x, b"", 0, 0, 0, 0, 0),
        Wrong,
        "the tensor is in another buffer",
    ),
    "half a byte": (lambda t: t.x.set(b"1", 1.5), Wrong, "offset is a float; give a whole number"),
    "numpy type": (lambda t: t.c.new_tensor(np.uint16, (3,)), ggmlb.DTypeError, "known: F32"),
    "swapped": (lambda t: t.c.new_tensor((3,), "f32"), ggmlb.DTypeError, "no tensor type"),
    "array operand": (
        lambda t: t.c.mul_mat(t.w, ARRAY),
        Wrong,
        "b is a numpy.ndarray; give a tensor, as from_",
    ),
    "number operand": (lambda t: t.c.add(t.a, 1.0), Wrong, "add: b is a float; give a tensor"),
    "no operand": (lambda t: t.c.add(t.a, None), Wrong, "add: b is None; give a tensor"),
    "wrong rows": (lambda t: t.c.mul_mat(t.w, t.v), ggmlb.ShapeError, "must be equally long"),
    "unknown op": (lambda t: t.c.softmax(t.a), ggmlb.UnknownOpError, "did you mean 'soft_max'"),
    "PyTorch's product": (
        lambda t: t.c.matmul(t.a, t.w),
        ggmlb.UnknownOpError,
        "mean 'mul_mat'. Return",
    ),
    "PyTorch's norm": (lambda t: t.c.layer_norm(t.a), ggmlb.UnknownOpError, "did you mean 'norm'"),
    "ONNX's norm": (lambda t: t.c.LayerNormalization(t.a), ggmlb.UnknownOpError, "did you mean 'norm'"),
    "values as blocks": (
        lambda t: t.c.from_array(np.zeros((2, 64), "u1"), "q4_0"),
        ggmlb.ShapeError,
        "rows of 64 bytes are not whole blocks of 18 bytes; to quantise, convert",
    ),
    "blocks written as values": (
        lambda t: ggmlb.evaluate(t.c.cont(t.c.new_tensor("q4_0", 32, "q")), {"q": np.zeros(18, "u1")}),
        ggmlb.ShapeError,
        r"set_array\(blocks, dtype='Q4_0'\) writes blocks",
    ),
    "a function of fewer arguments": (
        lambda t: t.c.map_custom1(t.a, lambda dst, a: None),
        Wrong,
        r"called as fun\(dst, a, ith, nth, userdata\), but takes \(dst, a\): too many",
    ),
    "a type for a device": (
        lambda t: ggmlb.init_by_name("GPU"),
        ggmlb.RegistryError,
        r"init_by_type\('GPU'\)",
    ),
    "a copy of a plan": (
        lambda t: pickle.dumps(t.cpu.graph_plan_create(Graph().build_forward_expand(t.x))),
        Wrong,
        "belong to this process",
    ),
    "threads by text": (
        lambda t: t.cpu.device.init_backend({"n_threads": "2"}),
        Wrong,
        "n is '2'; give a",
    ),
    "more threads than there can be": (lambda t: t.cpu.set_n_threads(1 << 31), Wrong, "at most 512"),
    "shares of nothing": (
        lambda t: split_buffer_type(t.cpu.device.reg, 0, [float("nan")]),
        Wrong,
        "give a share, 0 or more",
    ),
    "a gradient of other patches": (
        lambda t: t.c.im2col_back(t.a, t.w, (4, 5, 1, 1), 1, 1, 0, 0, 1, 1, True),
        ggmlb.ShapeError,
        "as im2col returns",
    ),
    "numbers without end": (lambda t: t.c.arange(0, float("inf")), Wrong, "that is inf elements"),
    "not contiguous": (
        lambda t: t.c.reshape_1d(t.c.transpose(t.a), 12),
        ggmlb.ShapeError,
        "apply cont first",
    ),
    "window too large": (lambda t: t.c.view_1d(t.a, 100, 0), ggmlb.BoundsError, "does not lie within"),
    "compute a tensor": (
        lambda t: t.cpu.graph_compute(t.a),
        Wrong,
        "graph is a Tensor; give a graph, as",
    ),
    "compute a list": (lambda t: t.cpu.graph_compute([t.a]), Wrong, "graph_compute: graph is a list; give a"),
    "graph of an array": (lambda t: Graph().build_forward_expand(ARRAY), Wrong, "is no tensor"),
    "before allocation": (
        lambda t: t.cpu.graph_compute(Graph().build_forward_expand(t.c.sqr(t.a))),
        ggmlb.NotAllocatedError,
        "place it with alloc_ctx_tensors",
    ),
    "read before allocation": (lambda t: t.a.to_numpy(), ggmlb.NotAllocatedError, "place it with"),
    "write before allocation": (lambda t: t.a.set_array(ARRAY), ggmlb.NotAllocatedError, "place it with"),
    "asarray before allocation": (lambda t: np.asarray(t.a), ggmlb.NotAllocatedError, "place it with"),
    "device by number": (lambda t: ggmlb.device_by_name(0), Wrong, "device_by_name: name is an int; give te"),
    "device by nothing": (lambda t: ggmlb.init_by_name(None), Wrong, "init_by_name: name is None; give text"),
    "scheduler of names": (lambda t: Scheduler(["CPU"]), Wrong, r"\[0\] is 'CPU'; give a backend, as init"),
    "scheduler of devices": (lambda t: Scheduler([t.cpu.device]), Wrong, "is a CpuDevice; give a back"),
    "scheduler of one": (lambda t: Scheduler(t.cpu), Wrong, "backends is a CpuBackend; give a list"),
    "half a copy": (
        lambda t: Scheduler([t.cpu], parallel=True, n_copies=1.5),
        Wrong,
        "a float; give a whole",
    ),
    "request by name": (lambda t: Scheduler([t.cpu]).set_tensor_backend("x", t.cpu), Wrong, "node is 'x'"),
    "watch with a number": (
        lambda t: Scheduler([t.cpu]).set_eval_callback(3),
        Wrong,
        "give a function",
    ),
    "backend from the end": (lambda t: Scheduler([t.cpu]).backend(-1), Wrong, r"backend\(-1\): there are 1"),
    "an array as an answer": (
        lambda t: t.watched(lambda *_: np.ones(3)),
        Wrong,
        "eval callback returned a nu",
    ),
    "an array as a wish to stop": (
        lambda t: t.aborting("CPU", lambda: np.ones(3)),
        Wrong,
        "abort callback ret",
    ),
    "the same on LLVM": (
        lambda t: t.aborting("LLVM", lambda: np.ones(3)),
        Wrong,
        "abort callback returned a n",
    ),
    "an array for a comparison": (
        lambda t: t.compared(lambda *_: np.ones(3)),
        Wrong,
        "compare_graph_backend returned a numpy.ndarray; return True or False",
    ),
    "threads of a device without": (
        lambda t: t.proc("set_n_threads")(
            ggmlb.meta_device([t.cpu.device], lambda w: None).init_backend(), 2
        ),
        ggmlb.BackendError,
        "has no threads to set",
    ),
    "no threads": (lambda t: t.proc("set_n_threads")(t.cpu, 0), Wrong, "give 1 or more"),
    "no split state": (lambda t: t.sharded(None), Wrong, "is None; get_split_state must return a SplitState"),
    "a text as a split state": (lambda t: t.sharded("0"), Wrong, "is '0'; get_split_state must return"),
    "schedule a tensor": (lambda t: Scheduler([t.cpu]).alloc_graph(t.a), Wrong, "a Tensor; give a graph"),
    "schedule nothing": (lambda t: Scheduler([t.cpu]).graph_compute(None), Wrong, "is None; give a graph"),
    "memory by name": (lambda t: ggmlb.alloc_ctx_tensors(t.c, "CPU"), Wrong, "where is 'CPU'; give a b"),
    "memory of a device": (
        lambda t: ggmlb.alloc_ctx_tensors(t.c, t.cpu.device),
        Wrong,
        "as device.buffer_type",
    ),
    "1e6 bytes": (lambda t: t.cpu.alloc_buffer(1e6), Wrong, "nbytes is a float; give a whole number"),
    "values of no leaf": (
        lambda t: ggmlb.evaluate(t.c.sqr(t.a), ARRAY),
        Wrong,
        "inputs is a numpy.ndarray; give a mapping",
    ),
    "evaluate an array": (
        lambda t: ggmlb.evaluate(ARRAY),
        Wrong,
        "give a list or a tensor, as from_array",
    ),
    "copy from an array": (lambda t: ggmlb.tensor_copy(ARRAY, t.x), Wrong, "src is a numpy.ndarray; give a"),
    "read after free": (lambda t: t.freed().to_numpy(), ggmlb.FreedError, "was freed"),
    "write after free": (lambda t: t.freed().set_array(ARRAY), ggmlb.FreedError, "was freed"),
    "asarray after free": (lambda t: np.asarray(t.freed()), ggmlb.FreedError, "was freed"),
    "dlpack after free": (lambda t: np.from_dlpack(t.freed()), ggmlb.FreedError, "was freed"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_our_error_and_says_what_to_do(case: str, things: Things) -> None:
    call, kind, told = CASES[case]
    with pytest.raises(kind, match=told):
        call(things)


def test_what_goes_wrong_inside_a_function_is_not_explained_away() -> None:
    @checked
    def op(a: ggmlb.Tensor) -> None:
        raise AttributeError("a fault of ours")

    with pytest.raises(AttributeError, match="a fault of ours"):
        op(Context().new_tensor("f32", (1,)))


def test_wrong_numbers_of_arguments_are_told_by_the_ops_name() -> None:
    ctx: Any = Context()
    a = ctx.new_tensor("f32", (4,))
    with pytest.raises(TypeError, match=r"^Context.rope\(\) missing 2 .* arguments: 'b' and 'n_dims'"):
        ctx.rope(a)
    with pytest.raises(TypeError, match=r"^Context.sqr\(\) got an unexpected keyword argument 'axis'"):
        ctx.sqr(a, axis=1)


def test_ops_keep_their_signatures() -> None:
    import inspect

    assert [*inspect.signature(Context.soft_max_ext).parameters][:3] == ["self", "a", "mask"]
    assert Context.add.__doc__


@pytest.mark.parametrize("ne", [(32, 64), (64, 32), (64, 64), (96, 32)])
@pytest.mark.parametrize(
    "access",
    [
        lambda x: x.to_numpy(),
        lambda x: x.get(),
        lambda x: x.set_array(np.ones(x.shape)),
        lambda x: x.memset(0),
        lambda x: x.as_array(),
    ],
)
def test_a_transposed_view_of_blocks_is_refused(ne: tuple[int, int], access: Callable[..., Any]) -> None:
    ctx = Context()
    blocks = ctx.from_array(np.ones(ne[::-1], np.float32), "q8_0")
    for view in (ctx.transpose(blocks), ctx.permute(blocks, 2, 0, 1, 3)):
        with pytest.raises(ggmlb.ShapeError, match="a transposed view splits q8_0 blocks"):
            access(view)
    again = ctx.transpose(ctx.transpose(blocks))
    np.testing.assert_array_equal(again.to_numpy(), blocks.to_numpy())


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.c.add(t.a, "x"),
        lambda t: t.c.add(t.a, t.v),
        lambda t: t.c.add(t.a, b=t.v),
        lambda t: t.c.relu(t.c.transpose(t.a)),
        lambda t: t.c.rope_ext(t.a, t.a, None, 3),
        lambda t: t.x.set_array(ARRAY.T),
        lambda t: Scheduler([]),
        lambda t: ggmlb.evaluate(t.a),
    ],
)
def test_every_frame_of_a_traceback_is_code_of_its_file(
    call: Callable[[Things], Any], things: Things
) -> None:
    with pytest.raises(ggmlb.Error) as caught:
        call(things)
    for frame in traceback.extract_tb(caught.value.__traceback__):
        nodes = ast.walk(ast.parse(Path(frame.filename).read_text()))
        calls = [n for n in nodes if isinstance(n, (ast.Call, ast.Raise))]
        assert any(n.lineno <= frame.lineno <= n.end_lineno for n in calls), frame
