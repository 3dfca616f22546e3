"""CUDA-only kernels (dp4a, tensor cores, vector loads), and products by cuBLAS.

    node ── RULES ──> Launch (of these or the portable kernels), Gemm, or PreparedOperand (8-bit activations)

The kernels include the portable headers, so that each type's dequantisation is written once.
"""

from ggmlb.backends.cuda.kernels import attention, products  # noqa: F401 (they register rules)
from ggmlb.backends.cuda.kernels.base import PACKAGE, RULES, Step

__all__ = ["PACKAGE", "RULES", "Step"]
