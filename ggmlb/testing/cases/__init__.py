"""The kit's table of cases: a family for each op or group of ops, from which programs are drawn."""

from ggmlb.testing.cases import (
    custom,
    deepseek,
    elementwise,
    images,
    moves,
    products,
    recurrent,
    rows,
    training,
)
from ggmlb.testing.cases.cover import KitCase, cases_of
from ggmlb.testing.cases.draw import FAMILIES, NOT_OF_GGML, Program

__all__ = [
    "FAMILIES",
    "NOT_OF_GGML",
    "KitCase",
    "Program",
    "cases_of",
    "custom",
    "deepseek",
    "elementwise",
    "images",
    "moves",
    "products",
    "recurrent",
    "rows",
    "training",
]
