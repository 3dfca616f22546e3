"""Enum arguments: every public one takes a member, its name and its number, and refuses all else."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest

import ggmlb
from ggmlb import (
    BufferUsage,
    Context,
    DeviceType,
    DType,
    GluOp,
    Hint,
    MultiBuffer,
    Op,
    OpPool,
    Prec,
    RopeType,
    ScaleFlag,
    ScaleMode,
    SortOrder,
    SplitAxis,
    SplitState,
    Tensor,
    TriType,
    UnaryOp,
)
from ggmlb.core import dtypes
from ggmlb.core.enums import as_enum
from ggmlb.interface import PartedBuffer
from ggmlb.testing.fake import FakeReg

PUBLIC = ("ggmlb", "ggmlb.models", "ggmlb.testing", "ggmlb.interface", "ggmlb.interface.registry")
MODULES = (*PUBLIC, "ggmlb.core.dtypes", "ggmlb.parallel.meta", "ggmlb.testing.fake")

RECORDS = {
    "DeviceProps.type": "a fact that ggmlb gives",
    "NodePlacement.cause": "a fact that ggmlb gives",
    "Context.array_importer.dtype": "the hook of from_array, which gives it a member",
}
"""Arguments that no user gives."""

ELSEWHERE = {
    "BertEmbedder.weight_type": "tests/models/test_embedder.py",
    "Tensor.set_array.dtype": "tests/unit/test_arrays.py",
    "TextModel.kv_type": "tests/models/test_text_model.py",
    "from_torch.weights": "tests/models/test_onnx.py",
}
"""Arguments whose test needs more than a context; the file named there tests them."""


class Argument(NamedTuple):
    """A public argument or settable attribute that takes an enum.

    Attributes:
        kind: The enum.
        give: Gives a value, and returns the member that was understood, or what a function made of it.
        members: Those that the other arguments allow.
    """

    kind: type[Enum]
    give: Callable[[Any], Any]
    members: tuple[Enum, ...]


def argument(kind: type[Enum], give: Callable[[Any], Any], *members: Enum) -> Argument:
    """An argument that allows these members, all by default."""
    return Argument(kind, give, members or tuple(kind))


def f32(ctx: Context, *ne: int) -> Tensor:
    """An f32 leaf."""
    return ctx.new_tensor("f32", ne)


def op(
    name: str, param: str, *ne: int, more: tuple[Any, ...] = (), last: bool = True
) -> Callable[[Any], Any]:
    """Give the value to an op of one operand, before or after other arguments; read the node's parameter."""

    def give(value: Any) -> Any:
        ctx = Context()
        arguments = (*more, value) if last else (value, *more)
        return getattr(ctx, name)(f32(ctx, *ne), *arguments).params[param]

    return give


GLUS = [op for op in GluOp if op not in (GluOp.SWIGLU_OAI, GluOp.SWIGLU_CLAMP)]
"""Gated units without parameters."""


def glu_split(value: Any) -> Any:
    ctx = Context()
    return ctx.glu_split(f32(ctx, 4), f32(ctx, 4), value).params["op"]


def pool_2d_back(value: Any) -> Any:
    ctx = Context()
    return ctx.pool_2d_back(f32(ctx, 2, 2), f32(ctx, 4, 4), value, 2, 2, 2, 2, 0, 0).params["op"]


def product(setter: str, param: str, *more: int) -> Callable[[Any], Any]:
    def give(value: Any) -> Any:
        ctx = Context()
        return getattr(ctx, setter)(ctx.mul_mat(f32(ctx, 4), f32(ctx, 4)), value, *more).params[param]

    return give


def attention(value: Any) -> Any:
    ctx = Context()
    node = ctx.flash_attn_ext(f32(ctx, 4, 2), f32(ctx, 4, 2), f32(ctx, 4, 2))
    return ctx.flash_attn_ext_get_prec(ctx.flash_attn_ext_set_prec(node, value))


def rope(name: str, n_positions: int = 3) -> Callable[[Any], Any]:
    def give(value: Any) -> Any:
        ctx = Context()
        more = {"c": None} if "ext" in name or "multi" in name else {}
        more |= {"sections": (1, 1, 1, 1)} if "multi" in name else {}
        b = ctx.new_tensor("i32", n_positions)
        return getattr(ctx, name)(a=f32(ctx, 8, 2, 3), b=b, n_dims=8, mode=value, **more).params["mode"]

    return give


def made(call: Callable[[Context, Any], Tensor]) -> Callable[[Any], Any]:
    """Give the value to a method of a context that makes a tensor of that type."""
    return lambda value: call(Context(), value).dtype


def images(name: str) -> Callable[[Any], Any]:
    def give(value: Any) -> Any:
        ctx = Context()
        numbers = (1, 1, 0, 0, 1, 1, True) if name == "im2col" else (1, 1, 1, 1, 0, 0, 0, 1, 1, 1)
        return getattr(ctx, name)(f32(ctx, 2, 2), f32(ctx, 4, 4), *numbers, dst_type=value).dtype

    return give


def usage(make: Callable[[], ggmlb.Buffer]) -> Callable[[Any], Any]:
    def give(value: Any) -> Any:
        with make() as buffer:
            buffer.usage = value
            if isinstance(buffer, PartedBuffer):
                assert {part.usage for part in buffer.parts} == {buffer.usage}
            return buffer.usage

    return give


def one_buffer() -> ggmlb.Buffer:
    return ggmlb.cpu_buffer_type().alloc_buffer(64)


def two_buffers() -> ggmlb.Buffer:
    return MultiBuffer([one_buffer(), one_buffer()])


def stream_type(value: Any) -> Any:
    with ggmlb.init_by_type(value) as stream:
        return stream.device.type


def filled(value: Any) -> list[float]:
    out = np.empty(1, np.float32)
    dtypes.dequantize_into(
        out, np.array([0, 0, 128, 63], np.uint8)[4 - DType.parse(value).type_size :], value
    )
    return out.tolist()


def as_values(value: Any) -> list[float]:
    return dtypes.dequantize(np.array([0, 0, 128, 63], np.uint8), value).tolist()


def as_bytes(value: Any) -> list[int]:
    return dtypes.quantize(np.ones(1), value).tolist()


PLAIN = (DType.F32, DType.F16)

ARGUMENTS: dict[str, Argument] = {
    "Context.argsort.order": argument(SortOrder, op("argsort", "order", 4)),
    "Context.flash_attn_ext_set_prec.prec": argument(Prec, attention),
    "Context.glu.op": argument(GluOp, op("glu", "op", 4), *GLUS),
    "Context.glu_split.op": argument(GluOp, glu_split, *GLUS),
    "Context.interpolate.mode": argument(ScaleMode, op("interpolate", "mode", 4, 4, more=(8, 8, 1, 1))),
    "Context.mul_mat_set_hint.hint": argument(Hint, product("mul_mat_set_hint", "hint")),
    "Context.prec_set_acc.prec": argument(
        Prec, product("prec_set_acc", "prec"), Prec.DEFAULT, Prec.F32, Prec.BF16, Prec.F16
    ),
    "Context.prec_set_src.prec": argument(Prec, product("prec_set_src", "prec_src1", 1)),
    "Context.mul_mat_set_prec.prec": argument(Prec, product("mul_mat_set_prec", "prec")),
    "Context.pool_1d.op": argument(OpPool, op("pool_1d", "op", 4, more=(2, 2), last=False)),
    "Context.pool_2d.op": argument(OpPool, op("pool_2d", "op", 4, 4, more=(2, 2, 2, 2), last=False)),
    "Context.pool_2d_back.op": argument(OpPool, pool_2d_back),
    **{
        f"Context.{name}.mode": argument(RopeType, rope(name), RopeType.NORMAL, RopeType.NEOX)
        for form in ("rope", "rope_ext", "rope_custom")
        for name in (form, f"{form}_inplace", f"{form}_back")
        if hasattr(Context, name)
    },
    **{
        f"Context.{name}.mode": argument(RopeType, rope(name, 12), RopeType.MROPE, RopeType.IMROPE)
        for name in ("rope_multi", "rope_multi_inplace", "rope_multi_back")
    },
    "Context.tri.type": argument(TriType, op("tri", "type", 4, 4)),
    "Context.unary.op": argument(UnaryOp, op("unary", "op", 4)),
    "Context.unary_inplace.op": argument(UnaryOp, op("unary_inplace", "op", 4)),
    "Context.upscale.mode": argument(ScaleMode, op("upscale", "mode", 4, 4, more=(2,))),
    "Context.upscale_ext.mode": argument(ScaleMode, op("upscale_ext", "mode", 4, 4, more=(8, 8, 1, 1))),
    "Context.add_cast.dtype": argument(
        DType, made(lambda c, v: c.add_cast(c.new_tensor("f16", 4), f32(c, 4), v)), *PLAIN
    ),
    "Context.cast.dtype": argument(DType, made(lambda c, v: c.cast(f32(c, 4), v)), *PLAIN),
    "Context.custom_4d.dtype": argument(
        DType, made(lambda c, v: c.custom_4d(v, 4, 1, 1, 1, [f32(c, 4)], lambda *_: None)), *PLAIN
    ),
    "Context.from_array.dtype": argument(DType, made(lambda c, v: c.from_array(np.ones(4), v)), *PLAIN),
    "Context.im2col.dst_type": argument(DType, images("im2col"), *PLAIN),
    "Context.im2col_3d.dst_type": argument(DType, images("im2col_3d"), *PLAIN),
    "Context.new_tensor.dtype": argument(DType, made(lambda c, v: c.new_tensor(v, 256))),
    "Context.new_tensor_1d.dtype": argument(DType, made(lambda c, v: c.new_tensor_1d(v, 256))),
    "Context.new_tensor_2d.dtype": argument(DType, made(lambda c, v: c.new_tensor_2d(v, 256, 1))),
    "Context.new_tensor_3d.dtype": argument(DType, made(lambda c, v: c.new_tensor_3d(v, 256, 1, 1))),
    "Context.new_tensor_4d.dtype": argument(DType, made(lambda c, v: c.new_tensor_4d(v, 256, 1, 1, 1))),
    "Tensor.dtype": argument(DType, lambda v: Tensor(v, (256, 1, 1, 1)).dtype),
    "Tensor.op": argument(Op, lambda v: Tensor(DType.F32, (1, 1, 1, 1), op=v).op),
    "can_quantize.dtype": argument(DType, dtypes.can_quantize),
    "dequantize.dtype": argument(DType, as_values, *PLAIN),
    "dequantize_into.dtype": argument(DType, filled, *PLAIN),
    "quantize.dtype": argument(DType, as_bytes, *PLAIN),
    "random_blocks.dtype": argument(
        DType, lambda v: dtypes.random_blocks(v, 256).tobytes(), DType.IQ1_M, DType.IQ2_XXS
    ),
    "DType.parse.value": argument(DType, DType.parse),
    "Buffer.usage": argument(BufferUsage, usage(one_buffer)),
    "MultiBuffer.usage": argument(BufferUsage, usage(two_buffers)),
    "Registry.device_by_type.type": argument(
        DeviceType, lambda v: ggmlb.device_by_type(v).type, DeviceType.CPU
    ),
    "Registry.init_by_type.type": argument(DeviceType, stream_type, DeviceType.CPU),
    "SplitState.axis": argument(SplitAxis, lambda v: SplitState(v, ((1, 1),)).axis),
    "FakeReg.device_type": argument(DeviceType, lambda v: FakeReg(device_type=v).devices[0].type),
}

CASES = [(name, member) for name, known in ARGUMENTS.items() for member in known.members]


@pytest.mark.parametrize(("name", "member"), CASES, ids=[f"{n}-{m.name}" for n, m in CASES])
def test_a_member_its_name_and_its_number_mean_the_same(name: str, member: Enum) -> None:
    give = ARGUMENTS[name].give
    expected = give(member)
    if isinstance(expected, Enum):
        assert expected is member
    same: list[Any] = [member.name, member.name.lower(), member.name.title()]
    if isinstance(member, IntEnum):
        same += [int(member), np.int64(int(member))]
    for value in same:
        found = give(value)
        assert type(found) is type(expected), value
        assert found == expected, value


@pytest.mark.parametrize("name", ARGUMENTS)
def test_whatever_is_no_member_is_refused(name: str) -> None:
    kind, give, members = ARGUMENTS[name]
    other = DeviceType.CPU if kind is not DeviceType else BufferUsage.ANY
    wrong: list[Any] = ["nonsense", "", 4095, -1, 2**80, True, other, object(), 1.5, float("nan"), [1, 2], {}]
    wrong += [None] if name != "Context.from_array.dtype" else []
    if issubclass(kind, IntEnum):
        wrong.append(Prec.F32 if kind is not Prec else SortOrder.ASC)
    else:
        wrong.append(0)
    for value in wrong:
        with pytest.raises(ggmlb.DTypeError if kind is DType else ggmlb.ArgumentError) as caught:
            give(value)
        assert len(str(caught.value)) < 1000
    if kind is not DType:
        with pytest.raises(ggmlb.ArgumentError, match=f"did you mean '{members[0].name}'"):
            give(members[0].name.lower() + "s" if len(members[0].name) > 2 else "nul")


def test_a_scale_mode_takes_flags_as_numbers_and_names() -> None:
    def params(mode: Any) -> dict[str, Any]:
        ctx = Context()
        return ctx.interpolate(f32(ctx, 4, 4), 8, 8, 1, 1, mode).params

    both = ScaleMode.BILINEAR | ScaleFlag.ANTIALIAS | ScaleFlag.ALIGN_CORNERS
    assert params(both) == params("bilinear | Antialias|align_corners") == params(np.int32(both))
    assert params(both) == {"mode": ScaleMode.BILINEAR, "antialias": True, "align_corners": True}
    for mode in (1 << 12, 3, "bilinear|smooth", "antialias", "|", ScaleFlag.ANTIALIAS):
        with pytest.raises(ggmlb.ArgumentError, match=r"interpolate: .* is not a Scale"):
            params(mode)


def test_every_enum_takes_its_members_and_names() -> None:
    for kind in enums().values():
        for member in kind if kind is not DType else ():
            assert as_enum("f", kind, member) is as_enum("f", kind, member.name.lower()) is member


# -- no argument is forgotten -------------------------------------------------------------------


def enums() -> dict[str, type[Enum]]:
    """The enums that a user can name, by name."""
    found = [value for module in PUBLIC for value in vars(importlib.import_module(module)).values()]
    return {v.__name__: v for v in found if isinstance(v, type) and issubclass(v, Enum)}


def exported() -> Iterator[tuple[str, Any]]:
    """What public modules export, or define where they have no list of exports, by name."""
    for module in map(importlib.import_module, MODULES):
        for name, value in vars(module).items():
            listed = getattr(module, "__all__", None)
            is_own = getattr(value, "__module__", "") == module.__name__ and name[0] != "_"
            if name in listed if listed is not None else is_own:
                yield name, value


def public_classes() -> Iterator[type]:
    """The public classes, each once."""
    return iter({id(v): v for _, v in exported() if inspect.isclass(v)}.values())


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public functions, constructors, methods and setters, by name."""
    yield from ((name, value) for name, value in exported() if inspect.isfunction(value))
    classes = list(public_classes())
    for owner in classes:
        if not issubclass(owner, Enum):
            yield owner.__name__, owner
        bases = [base for base in owner.__mro__[1:] if base in classes]
        for name in dir(owner):
            value = inspect.getattr_static(owner, name)
            if name[0] == "_" or any(inspect.getattr_static(base, name, None) is value for base in bases):
                continue
            if isinstance(value, property) and value.fset is not None:
                yield f"{owner.__name__}.{name}", value.fset
            elif isinstance(value, (classmethod, staticmethod)):
                yield f"{owner.__name__}.{name}", value.__func__
            elif inspect.isfunction(value):
                yield f"{owner.__name__}.{name}", value


def taken(names: str) -> set[str]:
    """The public arguments annotated with an enum of these names, or that have a member as default."""
    found = set()
    for where, call in public_callables():
        try:
            parameters = inspect.signature(call).parameters.values()
        except ValueError:  # a class of Python's own
            continue
        for parameter in parameters:
            is_enum = re.search(names, str(parameter.annotation)) or isinstance(parameter.default, Enum)
            if is_enum and parameter.name != "self":
                is_setter = where.endswith("." + parameter.name)
                found.add(where if is_setter else f"{where}.{parameter.name}")
    return found


def test_every_public_argument_is_tested() -> None:
    names = rf"\b({'|'.join(enums())})\b"
    assert taken(names) - {*RECORDS, *ELSEWHERE} == {*ARGUMENTS} - {"MultiBuffer.usage", "DType.parse.value"}


def test_no_public_attribute_keeps_a_member_unread() -> None:
    """An attribute that begins as a member, and may be set to anything, must be a property that reads it."""
    names, wrong = enums(), []
    for owner in public_classes():
        if issubclass(owner, Enum):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner)))):
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Attribute):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node.value.value, ast.Name) and node.value.value.id in names:
                attributes = [t.attr for t in targets if isinstance(t, ast.Attribute)]
                wrong += [f"{owner.__name__}.{a}" for a in attributes if a[0] != "_"]
    assert wrong == []
