"""CUDA-only kernels (dp4a, tensor cores, vector loads), and products by cuBLAS.

    node ── RULES ──> Launch (these texts, or the portable ones), Gemm, or PreparedOperand (8 bits)

The texts use the portable prelude and headers, so that each type's decoding is written once.
"""

from ggmlb.backends.cuda.kernels import attention, products  # noqa: F401 (they fill the table)
from ggmlb.backends.cuda.kernels.base import PACKAGE, RULES, Step

__all__ = ["PACKAGE", "RULES", "Step"]
