"""Tolerances: the allowed error of a device against the reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ggmlb.core.dtypes import DType

if TYPE_CHECKING:
    from ggmlb.testing.draw import Program

DEFAULT: Final = 1e-7
"""Allowed normalised mean squared error of an op in float32 (ggml's default); families may allow more."""


@dataclass(frozen=True, slots=True)
class Limit:
    """An allowed error (NMSE) against the reference, and its reason."""

    nmse: float
    reason: str


_PRODUCTS = "activations may be rounded to 8 bits or sums be kept in half precision, as in ggml's backends"
_HALF = "kernel and data may be multiplied in half precision, as in ggml's backends"

LIMITS: Final[dict[str, Limit]] = {
    **dict.fromkeys(("mul_mat", "mul_mat_id", "out_prod"), Limit(5e-4, _PRODUCTS)),
    "flash_attn_ext": Limit(5e-4, "scores and probabilities may be kept in half precision"),
    **dict.fromkeys(
        ("conv_1d", "conv_1d_dw", "conv_2d", "conv_2d_dw", "conv_2d_direct", "conv_2d_dw_direct"),
        Limit(5e-4, _HALF),
    ),
    **dict.fromkeys(
        ("conv_3d", "conv_3d_direct", "conv_transpose_1d", "conv_transpose_2d_p0"), Limit(5e-4, _HALF)
    ),
}
"""Limits by function, if an operand has a short float or a quantised type."""


EXACT: Final = (DType.F32, DType.I32, DType.I64)
"""Types without rounding in such ops; the integers are indices."""

CHOSEN_SCALES: Final = {
    DType.IQ4_NL: Limit(5e-3, "the search for a block's scale is the device's own; its error is 5e-3 at best")
}
"""Limits by the type of the result."""


def limit(program: Program) -> float:
    """Return the error (NMSE) against the reference allowed for a program; 0 demands equality."""
    if program.rule == "dequant":
        rounded = [CHOSEN_SCALES[leaf.dtype].nmse for leaf in program.leafs if leaf.dtype in CHOSEN_SCALES]
        return max([program.nmse, *rounded])
    exception = LIMITS.get(program.fn)
    if exception is None or all(leaf.dtype in EXACT for leaf in program.leafs):
        return program.nmse
    return exception.nmse
