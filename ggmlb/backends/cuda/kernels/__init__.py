"""CUDA-only kernels (dp4a, tensor cores, vector loads), and products by cuBLAS.

    node ── Lowering.lower ──> Launch (these texts, or the portable ones) or Gemm
                                 │
    scratch.place ──> offsets of intermediate results between launches

The texts use the portable prelude and headers, so that each type's decoding is written once.
"""

from ggmlb.backends.cuda.kernels.lowering import MAX_GROUPS, Lowering, Step
from ggmlb.backends.cuda.kernels.scratch import place

__all__ = ["MAX_GROUPS", "PACKAGE", "Lowering", "Step", "place"]

PACKAGE = "ggmlb.backends.cuda.kernels"
"""The package of the texts, for `ggmlb.backends.gpu.source`."""
