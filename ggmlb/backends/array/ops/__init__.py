"""The reference rules, one family of ops per module; importing this package registers them all."""

from ggmlb.backends.array.ops import (
    attention,
    binary,
    copy,
    glu,
    matmul,
    norm,
    reduce,
    rope,
    rows,
    select,
    shape,
    softmax,
    unary,
)

__all__ = [
    "attention",
    "binary",
    "copy",
    "glu",
    "matmul",
    "norm",
    "reduce",
    "rope",
    "rows",
    "select",
    "shape",
    "softmax",
    "unary",
]
