"""ggml's enums by their ggml names (source: `enum ggml_op` and its neighbours in ggml.h)."""

from __future__ import annotations

from enum import Enum, IntEnum
from operator import index
from typing import Final, SupportsIndex, TypeVar

from ggmlb.core.errors import ArgumentError, did_you_mean, kind_of

E = TypeVar("E", bound=Enum)


def as_enum(call: str, kind: type[E], value: object) -> E:
    """Return a member of the enum `kind`, given itself, its name or its number; errors begin with `call`.

    Names are taken in any case; numbers are ggml's.

    Every public argument and settable attribute that takes an enum is parsed here.

    Raises:
        ArgumentError: There is no such member, or the value is a member of another enum; the message
            begins with `call`.
    """
    if isinstance(value, kind):
        return value
    member: object = None
    if isinstance(value, Enum):
        shown, near = f"{type(value).__name__}.{value.name}", value.name
    elif isinstance(value, str):
        shown, near = repr(value), value.upper()
        member = kind.__members__.get(near)
    else:
        number = whole_number(value)
        shown, near = (kind_of(value) if number is None else str(number)), ""
        if number is not None and issubclass(kind, IntEnum):
            member = kind._value2member_map_.get(number)
    if isinstance(member, kind):
        return member
    article = "an" if kind.__name__[0] in "AEIO" else "a"
    raise ArgumentError(
        f"{call}: {shown} is not {article} {kind.__name__}{did_you_mean(near, kind.__members__)}"
    )


def whole_number(value: object) -> int | None:
    """Return the value as an int if it is a whole number and not a bool; else `None`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return index(value)
    except TypeError:  # an array of several numbers
        return None


class Op(str, Enum):
    """Operation of a graph node, `GGML_OP_*` without the prefix.

    A `str` enum, because its members hash in C: ops are dictionary keys on hot paths.
    """

    NONE = "NONE"
    DUP = "DUP"
    ADD = "ADD"
    ADD_ID = "ADD_ID"
    ADD1 = "ADD1"
    ACC = "ACC"
    SUB = "SUB"
    MUL = "MUL"
    DIV = "DIV"
    SQR = "SQR"
    SQRT = "SQRT"
    LOG = "LOG"
    SIN = "SIN"
    COS = "COS"
    SUM = "SUM"
    SUM_ROWS = "SUM_ROWS"
    CUMSUM = "CUMSUM"
    MEAN = "MEAN"
    ARGMAX = "ARGMAX"
    COUNT_EQUAL = "COUNT_EQUAL"
    REPEAT = "REPEAT"
    REPEAT_BACK = "REPEAT_BACK"
    CONCAT = "CONCAT"
    SILU_BACK = "SILU_BACK"
    NORM = "NORM"
    RMS_NORM = "RMS_NORM"
    RMS_NORM_BACK = "RMS_NORM_BACK"
    GROUP_NORM = "GROUP_NORM"
    L2_NORM = "L2_NORM"
    MUL_MAT = "MUL_MAT"
    MUL_MAT_ID = "MUL_MAT_ID"
    OUT_PROD = "OUT_PROD"
    SCALE = "SCALE"
    SET = "SET"
    CPY = "CPY"
    CONT = "CONT"
    RESHAPE = "RESHAPE"
    VIEW = "VIEW"
    PERMUTE = "PERMUTE"
    TRANSPOSE = "TRANSPOSE"
    GET_ROWS = "GET_ROWS"
    GET_ROWS_BACK = "GET_ROWS_BACK"
    SET_ROWS = "SET_ROWS"
    DIAG = "DIAG"
    DIAG_MASK_INF = "DIAG_MASK_INF"
    DIAG_MASK_ZERO = "DIAG_MASK_ZERO"
    SOFT_MAX = "SOFT_MAX"
    SOFT_MAX_BACK = "SOFT_MAX_BACK"
    ROPE = "ROPE"
    ROPE_BACK = "ROPE_BACK"
    CLAMP = "CLAMP"
    CONV_TRANSPOSE_1D = "CONV_TRANSPOSE_1D"
    IM2COL = "IM2COL"
    IM2COL_BACK = "IM2COL_BACK"
    IM2COL_3D = "IM2COL_3D"
    COL2IM_1D = "COL2IM_1D"
    CONV_2D = "CONV_2D"
    CONV_3D = "CONV_3D"
    CONV_2D_DW = "CONV_2D_DW"
    CONV_TRANSPOSE_2D = "CONV_TRANSPOSE_2D"
    POOL_1D = "POOL_1D"
    POOL_2D = "POOL_2D"
    POOL_2D_BACK = "POOL_2D_BACK"
    UPSCALE = "UPSCALE"
    PAD = "PAD"
    PAD_REFLECT_1D = "PAD_REFLECT_1D"
    ROLL = "ROLL"
    ARANGE = "ARANGE"
    TIMESTEP_EMBEDDING = "TIMESTEP_EMBEDDING"
    ARGSORT = "ARGSORT"
    TOP_K = "TOP_K"
    LEAKY_RELU = "LEAKY_RELU"
    TRI = "TRI"
    FILL = "FILL"
    FLASH_ATTN_EXT = "FLASH_ATTN_EXT"
    FLASH_ATTN_BACK = "FLASH_ATTN_BACK"
    SSM_CONV = "SSM_CONV"
    SSM_SCAN = "SSM_SCAN"
    WIN_PART = "WIN_PART"
    WIN_UNPART = "WIN_UNPART"
    GET_REL_POS = "GET_REL_POS"
    ADD_REL_POS = "ADD_REL_POS"
    RWKV_WKV6 = "RWKV_WKV6"
    GATED_LINEAR_ATTN = "GATED_LINEAR_ATTN"
    RWKV_WKV7 = "RWKV_WKV7"
    SOLVE_TRI = "SOLVE_TRI"
    GATED_DELTA_NET = "GATED_DELTA_NET"
    LIGHTNING_INDEXER = "LIGHTNING_INDEXER"
    DSV4_HC_PRE = "DSV4_HC_PRE"
    DSV4_HC_POST = "DSV4_HC_POST"
    DSV4_HC_COMB = "DSV4_HC_COMB"
    UNARY = "UNARY"
    MAP_CUSTOM1 = "MAP_CUSTOM1"
    MAP_CUSTOM2 = "MAP_CUSTOM2"
    MAP_CUSTOM3 = "MAP_CUSTOM3"
    CUSTOM = "CUSTOM"
    CROSS_ENTROPY_LOSS = "CROSS_ENTROPY_LOSS"
    CROSS_ENTROPY_LOSS_BACK = "CROSS_ENTROPY_LOSS_BACK"
    OPT_STEP_ADAMW = "OPT_STEP_ADAMW"
    OPT_STEP_SGD = "OPT_STEP_SGD"
    GLU = "GLU"

    def __str__(self) -> str:
        return self.value


VIEW_OPS: Final = frozenset({Op.RESHAPE, Op.VIEW, Op.PERMUTE, Op.TRANSPOSE})
"""Ops whose result is a view of their first source (ggml_is_view_op)."""

NO_OPS: Final = VIEW_OPS | {Op.NONE}
"""Ops without computation: leafs and views."""

PYTHON_OPS: Final = frozenset({Op.MAP_CUSTOM1, Op.MAP_CUSTOM2, Op.MAP_CUSTOM3, Op.CUSTOM})
"""Ops that call a Python function."""


class UnaryOp(IntEnum):
    """`GGML_UNARY_OP_*`: the function of an `Op.UNARY` node."""

    ABS = 0
    SGN = 1
    NEG = 2
    STEP = 3
    TANH = 4
    ELU = 5
    RELU = 6
    SIGMOID = 7
    GELU = 8
    GELU_QUICK = 9
    SILU = 10
    HARDSWISH = 11
    HARDSIGMOID = 12
    EXP = 13
    EXPM1 = 14
    SOFTPLUS = 15
    GELU_ERF = 16
    XIELU = 17
    FLOOR = 18
    CEIL = 19
    ROUND = 20
    TRUNC = 21


class GluOp(IntEnum):
    """`GGML_GLU_OP_*`: the gated linear unit of an `Op.GLU` node."""

    REGLU = 0
    GEGLU = 1
    SWIGLU = 2
    SWIGLU_OAI = 3
    GEGLU_ERF = 4
    GEGLU_QUICK = 5
    SWIGLU_CLAMP = 6


class RopeType(IntEnum):
    """`GGML_ROPE_TYPE_*`: how rotary embedding pairs the elements of a row."""

    NORMAL = 0
    NEOX = 2
    MROPE = 8
    VISION = 24
    IMROPE = 40


class SortOrder(IntEnum):
    """`GGML_SORT_ORDER_*`: whether `argsort` sorts in ascending or descending order."""

    ASC = 0
    DESC = 1


class Prec(IntEnum):
    """`GGML_PREC_*`: the least precision that an op may compute with, of accumulators as a rule."""

    DEFAULT = 0
    F32 = 10
    BF16 = 15
    F16 = 20
    Q8 = 30
    Q4 = 40


class Hint(IntEnum):
    """`GGML_HINT_*`: a known property of a product's first operand."""

    NONE = 0
    SRC0_IS_HADAMARD = 1


class ScaleMode(IntEnum):
    """`GGML_SCALE_MODE_*`: the interpolation of `upscale` and `interpolate`."""

    NEAREST = 0
    BILINEAR = 1
    BICUBIC = 2


class ScaleFlag(IntEnum):
    """`GGML_SCALE_FLAG_*`, or-ed onto a `ScaleMode`."""

    ALIGN_CORNERS = 256
    ANTIALIAS = 512


class OpPool(IntEnum):
    """`GGML_OP_POOL_*`: whether pooling takes the maximum or the mean."""

    MAX = 0
    AVG = 1


class TriType(IntEnum):
    """`GGML_TRI_TYPE_*`: which triangle `tri` keeps."""

    UPPER_DIAG = 0
    UPPER = 1
    LOWER_DIAG = 2
    LOWER = 3


class TensorFlag:
    """`GGML_TENSOR_FLAG_*`, a tensor's roles as bits; plain ints, because `IntFlag` is slow on hot paths."""

    INPUT: Final = 1
    OUTPUT: Final = 2
    PARAM: Final = 4
    LOSS: Final = 8
    COMPUTE: Final = 16


class Status(IntEnum):
    """Outcome of a graph computation; failures raise instead (`GGML_STATUS_*`)."""

    SUCCESS = 0
    ABORTED = 1


class BufferUsage(Enum):
    """Purpose of a buffer, which guides the scheduler (`GGML_BACKEND_BUFFER_USAGE_*`)."""

    ANY = "any"
    WEIGHTS = "weights"
    COMPUTE = "compute"


class DeviceType(Enum):
    """Kind of a device (`GGML_BACKEND_DEVICE_TYPE_*`)."""

    CPU = "CPU"
    GPU = "GPU"
    IGPU = "IGPU"
    ACCEL = "ACCEL"
    META = "META"
