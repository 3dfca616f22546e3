"""Every public callable, given arguments that it cannot use: each refuses by an error of ours.

Two rules. What an annotation does not allow is refused. What it allows, however odd (NaN, infinities, numbers
that no machine counts to, nothing in a list), is refused or used. An error is ours if it is a `ggmlb.Error`:
nothing else may come out. A call that does not fit a signature is a TypeError of Python's; none is made here.
"""

from __future__ import annotations

import inspect
import math
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import models, optimize
from ggmlb.core import arguments
from ggmlb.testing.fake import FakeReg
from ggmlb.testing.programs import Built, Case
from tests.support.golden import CASES
from tests.support.text_models import write_text_model

ANYTHING: dict[str, Any] = {
    "None": None,
    "text": "x",
    "an empty text": "",
    "bytes": b"x",
    "an object": object(),
    "a class": type("AnyClass", (), {"__init__": lambda self, *args: None}),
    "a function": lambda *args: None,
    "a half": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "the largest float": 1.8e308,
    "NumPy's NaN": np.float32("nan"),
    "a complex number": 1j,
    "minus one": -1,
    "zero": 0,
    "2^31": 1 << 31,
    "2^63": 1 << 63,
    "-2^63 - 1": -(1 << 63) - 1,
    "10^30": 10**30,
    "True": True,
    "an empty list": [],
    "a list of None": [None],
    "a list of NaN": [math.nan],
    "a list of text": ["x"],
    "a list of 2^64": [1 << 64, 1 << 64],
    "a dict": {},
    "a dict of text": {"x": "y"},
    "an array": np.arange(3.0),
    "an array of objects": np.array([None, "x"], object),
    "an array of nothing": np.empty(0),
}


class World:
    """Something of every public class, and for each parameter something that fits it."""

    modules: tuple[Any, ...] = (ggmlb,)

    def __init__(self, stack: ExitStack) -> None:
        folder = stack.enter_context(TemporaryDirectory())
        stack.callback(os.chdir, Path.cwd())
        os.chdir(folder)  # what is given as a path may be written to
        cpu = self.backend = stack.enter_context(ggmlb.init_by_name("CPU", {"n_threads": 1}))
        self.device = cpu.device
        weights = self.weights = ggmlb.Context()
        self.leaf = weights.new_tensor("f32", (4, 4), "x")
        self.other = weights.new_tensor("f32", (4, 4), "y")
        self.buffer = stack.enter_context(ggmlb.alloc_ctx_tensors(weights, cpu))
        self.leaf.set_array(np.eye(4))
        self.other.set_array(np.eye(4))
        self.ctx = ggmlb.Context()
        self.unplaced = self.ctx.new_tensor("f32", (4, 4), "z")
        self.node = self.ctx.add(self.leaf, self.other)
        self.graph = ggmlb.Graph().build_forward_expand(self.node)
        self.scheduler = stack.enter_context(ggmlb.Scheduler([cpu]))
        self.scheduler.alloc_graph(self.graph)
        self.plan = cpu.graph_plan_create(self.graph)
        self.copy = stack.enter_context(ggmlb.graph_copy(cpu, self.graph))
        self.meta = ggmlb.meta_device([cpu.device], lambda tensor: ggmlb.SplitState(ggmlb.SplitAxis.MIRRORED))
        self.meta_backend = stack.enter_context(self.meta.init_backend())
        self.allocator = stack.enter_context(ggmlb.GraphAllocator(cpu.device.buffer_type))
        self.free_buffer = stack.enter_context(cpu.alloc_buffer(1024))
        self.placer = ggmlb.TensorAllocator(self.free_buffer)
        fake = FakeReg(1).devices[0]
        self.fake = stack.enter_context(fake.init_backend())
        self.event = fake.event_new()
        self.parts = ggmlb.MultiBuffer([cpu.alloc_buffer(64)])

    def subjects(self) -> dict[str, Any]:
        """What has public methods, by the name of its class."""
        found = [
            self.ctx, self.leaf, self.graph, self.backend, self.device, self.device.reg, self.buffer,
            self.device.buffer_type, self.plan, self.scheduler, self.copy, self.meta, self.meta_backend,
            self.meta.buffer_type, self.allocator, self.placer, self.parts, self.fake,
            self.event, ggmlb.Sanitizer(),
        ]  # fmt: skip
        return {type(subject).__name__: subject for subject in found}

    def fitting(self, call: str, parameter: inspect.Parameter) -> Any:
        """Return an argument with which the call does something, as far as it is known."""
        by_name = BY_NAME.get((call, parameter.name), BY_NAME.get(("", parameter.name), self))
        if by_name is not self:
            return by_name(self)
        if parameter.default is not parameter.empty:
            return parameter.default
        for part in str(parameter.annotation).split(" | "):
            if part in BY_ANNOTATION:
                return BY_ANNOTATION[part](self)
        raise AssertionError(f"{call} has the parameter {parameter}: say in BY_ANNOTATION what fits it")


class ModelWorld(World):
    """The same of the rooms above: models and training."""

    modules = (models, optimize)

    def __init__(self, stack: ExitStack) -> None:
        super().__init__(stack)
        write_text_model(Path("m.gguf"), n_layer=1)
        self.model = stack.enter_context(models.TextModel("m.gguf", ["CPU"], n_ctx=32))
        self.adapter = self.model.new_adapter(rank=1)
        self.session = self.model.session()
        self.session.save_state("state")
        weights = ggmlb.Context()
        weight = weights.set_param(weights.new_tensor("f32", (4, 2), "w"))
        stack.enter_context(ggmlb.alloc_ctx_tensors(weights, self.backend))
        weight.set_array(np.ones((2, 4)))
        self.input = self.ctx.set_input(self.ctx.new_tensor("f32", (4, 2), "input"))
        self.output = self.ctx.mul_mat(weight, self.input)
        keeping = self.keeping = stack.enter_context(ggmlb.Scheduler([self.backend], keep_graphs=True))
        loss = "mean_squared_error"
        self.opt = stack.enter_context(optimize.OptContext(keeping, self.input, self.output, loss))
        self.opt.save("state.gguf")
        self.dataset = optimize.Dataset(np.ones((2, 4)), labels=np.ones((2, 2)))
        self.progress = optimize.Progress(True, self.opt, self.dataset, optimize.Result(), 1, 1, 0.0)

    def subjects(self) -> dict[str, Any]:
        found = [self.model, self.adapter, self.session, self.opt, self.dataset, self.opt.optimizer]
        return {type(subject).__name__: subject for subject in found}


BY_ANNOTATION: dict[str, Callable[[Any], Any]] = {
    "Adapter": lambda w: w.adapter,
    "Dataset": lambda w: w.dataset,
    "LossType": lambda w: "sum",
    "Mapping[int, npt.ArrayLike]": lambda w: {0: np.ones(256)},
    "Progress": lambda w: w.progress,
    "Prompt": lambda w: [1, 260],
    "Sequence[Prompt]": lambda w: [[1, 260]],
    "Sequence[npt.ArrayLike]": lambda w: [np.ones((2, 4))],
    "Scheduler": lambda w: w.keeping,
    "TextModel": lambda w: w.model,
    "np.random.Generator": lambda w: np.random.default_rng(0),
    "Any": lambda w: np.eye(4, dtype=np.float32),
    "Backend": lambda w: w.backend,
    "BackendReg": lambda w: w.device.reg,
    "Buffer": lambda w: w.free_buffer,
    "BufferType": lambda w: w.device.buffer_type,
    "Bytes": lambda w: np.zeros(16, np.uint8),
    "npt.NDArray[np.uint8]": lambda w: np.zeros((2, 64), np.uint8),
    "Context": lambda w: w.weights,
    "Event": lambda w: w.event,
    "MetaBufferType": lambda w: w.meta.buffer_type,
    "MetaDevice": lambda w: w.meta,
    "Extents": lambda w: (4, 4),
    "Custom": lambda w: lambda *args: None,
    "DType": lambda w: ggmlb.DType.F32,
    "Device": lambda w: w.device,
    "DeviceType": lambda w: "CPU",
    "Graph": lambda w: w.graph,
    "GraphPlan": lambda w: w.plan,
    "GetSplitState": lambda w: w.meta.get_split_state,
    "EvalCallback": lambda w: lambda node, ask: True,
    "Sequence[Backend]": lambda w: [w.backend],
    "Sequence[Buffer]": lambda w: [w.free_buffer],
    "Sequence[BufferType]": lambda w: [w.device.buffer_type],
    "Sequence[Device]": lambda w: [w.device],
    "Sequence[Tensor]": lambda w: [w.leaf],
    "Sequence[float]": lambda w: [1.0],
    "Sequence[int]": lambda w: [4],
    "Source": lambda w: np.zeros(4, np.float32),
    "Tensor": lambda w: w.leaf,
    "bool": lambda w: False,
    "float": lambda w: 1.0,
    "int": lambda w: 1,
    "npt.ArrayLike": lambda w: np.eye(4),
    "npt.NDArray[Any]": lambda w: np.zeros(64, np.uint8),
    "str": lambda w: "x",
}

BY_NAME: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("TextModel", "path"): lambda w: "m.gguf",
    ("TextModel", "devices"): lambda w: ["CPU"],
    ("TextModel", "n_ctx"): lambda w: 32,
    ("BertEmbedder", "devices"): lambda w: ["CPU"],
    ("load_state", "path"): lambda w: "state",
    ("load", "path"): lambda w: "state.gguf",
    ("save", "path"): lambda w: "new.gguf",
    ("perplexity", "text"): lambda w: "a b c d e f g h i j",
    ("perplexity", "n_ctx"): lambda w: 4,
    ("finetune", "text"): lambda w: "a b c d e f g h i j",
    ("finetune", "n_ctx"): lambda w: 2,
    ("finetune", "n_batch"): lambda w: 1,
    ("training", "n_ctx"): lambda w: 2,
    **{(name, "callback"): lambda w: lambda progress: False for name in ("fit", "finetune")},
    ("Dataset", "labels"): lambda w: np.ones((2, 2)),
    ("set_batch", "labels"): lambda w: np.ones((2, 2)),
    **{(name, "inputs"): lambda w: w.input for name in ("OptContext", "fit")},
    **{(name, "outputs"): lambda w: w.output for name in ("OptContext", "fit")},
    ("grad_acc", "param"): lambda w: w.opt.params["w"],
    ("", "progress"): lambda w: None,
    ("progress_bar", "progress"): lambda w: w.progress,
    ("check_params", "params"): lambda w: {},
    ("override_for", "overrides"): lambda w: {"x": w.backend},
    ("", "callback"): lambda w: lambda *args: True,
    ("device_by_name", "name"): lambda w: "CPU",
    ("init_by_name", "name"): lambda w: "CPU",
    ("reg_by_name", "name"): lambda w: "CPU",
    ("save_gguf", "path"): lambda w: "m.gguf",
    ("save_gguf", "metadata"): lambda w: {"general.architecture": "x"},
    ("save_gguf", "tensors"): lambda w: {"w": np.zeros(4, np.float32)},
    ("load", "where"): lambda w: "ggmlb.backends.cpu",
    ("load_all_from_path", "folder"): lambda w: "/nowhere",
    ("alloc_graph", "graph"): lambda w: w.graph,
    ("evaluate", "y"): lambda w: w.node,
    ("compare_graph_backend", "graph"): lambda w: w.graph,
    ("tensor_alloc", "tensor"): lambda w: w.unplaced,
    ("alloc", "tensor"): lambda w: w.unplaced,
    ("tensor_copy", "dst"): lambda w: w.other,
    ("tensor_copy_async", "dst"): lambda w: w.other,
}

TRUSTING = {
    **dict.fromkeys(
        ("BertConfig", "Comparison", "Differences", "Epoch", "Generation", "Perplexity"), "a record"
    ),
    **dict.fromkeys(("LogitLens", "Progress"), "a record"),
    **dict.fromkeys(("Adapter", "BertGraph", "Job", "JobQueue", "Session"), "a model makes them"),
    "Tensor": "a context makes tensors, thousands of them; its methods check",
    "Caps": "a record",
    "DeviceProps": "a record",
    "NodePlacement": "a record",
    "SplitState": "a record, checked where it is used",
}
"""Classes whose constructor believes what it is given, and why."""

INNER = {
    "alloc_indexed", "begin", "check_holds", "check_range", "check_writable", "end", "enqueue", "exported",
    "is_contiguous", "operand", "optional", "placed", "prepare", "reading",
    "reserve_indexed", "indexed_size",
}  # fmt: skip
"""Methods that only ggmlb and its backends call, with what they have checked or made."""


@cache
def _public(kind: type[World]) -> dict[str, str]:
    """Return the name of the subject or module that has each public callable."""
    found: dict[str, str] = {}
    with ExitStack() as stack:
        world = kind(stack)
        for owner, subject in world.subjects().items():
            for name, member in inspect.getmembers(type(subject), callable):
                is_method = inspect.isfunction(inspect.getattr_static(type(subject), name))
                is_public = not name.startswith("_") and name not in INNER
                if is_method and is_public and _parameters(member, True):
                    found[f"{owner}.{name}"] = owner
        for name in world.device.reg._procs() if kind is World else ():
            found[f"proc.{name}"] = "proc"
    for name, thing in ((name, getattr(module, name)) for module in kind.modules for name in module.__all__):
        if inspect.isclass(thing):
            is_made_by_users = not (inspect.isabstract(thing) or issubclass(thing, (BaseException, Enum)))
            if is_made_by_users and name not in TRUSTING and _parameters(thing, False):
                found[name] = "module"
        elif inspect.isfunction(thing) and _parameters(thing, False):
            found[name] = "module"
    return found


def _parameters(function: Any, is_method: bool) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    return [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def _target(world: World, name: str) -> Callable[..., Any]:
    owner, _, method = name.rpartition(".")
    if not owner:
        return next(getattr(module, name) for module in world.modules if hasattr(module, name))
    if owner == "proc":
        return world.device.reg.get_proc_address(method)
    return getattr(world.subjects()[owner], method)


def _outcome(call: Callable[..., Any], arguments: dict[str, Any]) -> BaseException | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call(**arguments)
            if inspect.isgenerator(result):
                list(result)
            elif hasattr(result, "__enter__") and not getattr(result, "is_freed", False):
                with result:  # which frees it
                    pass
        except Exception as error:
            return error
    return None


def _faults(world: World, name: str) -> Iterator[str]:
    call = _target(world, name)
    parameters = _parameters(call, False)
    short = name.rpartition(".")[2]
    fitting = {p.name: world.fitting(short, p) for p in parameters}
    for p in parameters:
        kind = arguments._kind(str(p.annotation))
        for what, value in ANYTHING.items():
            error = _outcome(call, fitting | {p.name: value})
            given = f"{name}({p.name}={what})"
            if error is not None and not isinstance(error, ggmlb.Error):
                yield f"{given}: {type(error).__name__}: {error}"
            elif error is None and kind is not None and not kind.fits(value):
                yield f"{given} is accepted; the annotation is {p.annotation}"


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in (World, ModelWorld) for name in sorted(_public(kind))]
)
def test_a_public_callable_refuses_by_an_error_of_ours(kind: type[World], name: str) -> None:
    with ExitStack() as stack:
        assert not list(_faults(kind(stack), name))


def _small(world: World, ctx: ggmlb.Context) -> bool:
    return ggmlb.alloc_ctx_tensors_size(ctx, world.backend) < 1 << 20


def _compute(world: World, built: Built) -> None:
    if _small(world, built.ctx):
        with ggmlb.alloc_ctx_tensors(built.ctx, world.backend) as buffer:
            buffer.clear()  # indices among the inputs are 0
            world.backend.graph_compute(built.graph)


@cache
def _cases_by_op() -> dict[str, Case]:
    """Return for each op a program of ggml's that calls it: what the op takes is right there."""
    found: dict[str, Case] = {}
    for case in CASES:
        for step in case.steps:
            found.setdefault(step.fn, case)
    return found


@pytest.mark.parametrize("op", sorted(_cases_by_op()))
def test_an_op_refuses_when_it_is_made_or_computed(op: str) -> None:
    """A node that is made of odd numbers is computed, or declined: no array library's error comes out."""
    case = _cases_by_op()[op]
    at, step = next((i, s) for i, s in enumerate(case.steps) if s.fn == op)
    kinds = [str(p.annotation) for p in inspect.signature(getattr(ggmlb.Context, op)).parameters.values()][1:]
    faults = []
    with ExitStack() as stack:
        world = World(stack)
        _compute(world, case.build())
        for i, annotation in zip(range(len(step.args)), kinds, strict=False):
            kind = arguments._kind(annotation)
            for what, value in ANYTHING.items():
                if isinstance(value, str):
                    continue  # names a tensor or a constant in a program
                args = (*step.args[:i], value, *step.args[i + 1 :])
                odd = replace(case, steps=(*case.steps[:at], replace(step, args=args), *case.steps[at + 1 :]))
                error = _outcome(lambda odd=odd: _compute(world, odd.build()), {})
                given = f"{op}, argument {i} ({annotation}) = {what}"
                if error is not None and not isinstance(error, ggmlb.Error):
                    faults.append(f"{given}: {type(error).__name__}: {error}")
                elif error is None and kind is not None and not kind.fits(value):
                    faults.append(f"{given} is accepted")
    assert not faults
