"""Random programs, and ggml itself to compute them: what the differential test is made of."""

from oracle import elementwise, images, moves, products, recurrent, rows, training
from oracle.draw import FAMILIES, programs
from oracle.ggml_process import GgmlProcess, Missing, Refused

__all__ = [
    "FAMILIES",
    "GgmlProcess",
    "Missing",
    "Refused",
    "elementwise",
    "images",
    "moves",
    "products",
    "programs",
    "recurrent",
    "rows",
    "training",
]
