"""CUDA-only kernels (dp4a, tensor cores, vector loads), and products by cuBLAS.

    node ── Lowering.lower ──> Launch (these texts, or the portable ones) or Gemm

The texts use the portable prelude and headers, so that each type's decoding is written once.
"""

from ggmlb.backends.cuda.kernels.lowering import MAX_GROUPS, Lowering, Step

__all__ = ["MAX_GROUPS", "PACKAGE", "Lowering", "Step"]

PACKAGE = "ggmlb.backends.cuda.kernels"
"""The package of the texts, for `ggmlb.backends.gpu.source`."""
