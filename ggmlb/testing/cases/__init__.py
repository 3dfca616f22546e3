"""The kit's table of cases: a family for each op or group of ops, from which programs are drawn."""

from ggmlb.testing.cases import deepseek, elementwise, images, moves, products, recurrent, rows, training
from ggmlb.testing.cases.cover import KitCase, cases_of
from ggmlb.testing.cases.draw import FAMILIES, Program

__all__ = [
    "FAMILIES",
    "KitCase",
    "Program",
    "cases_of",
    "deepseek",
    "elementwise",
    "images",
    "moves",
    "products",
    "recurrent",
    "rows",
    "training",
]
