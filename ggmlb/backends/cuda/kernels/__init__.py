"""What only CUDA has: kernels with dp4a, tensor cores and vector loads, and products by cuBLAS.

    node ── Lowering.lower ──> Launch (these texts, or the portable ones) or Gemm
                                 │
    scratch.place ──> offsets of what launches hand over to each other

The texts are written against the portable prelude and headers, so that a type's decoding stands in one place.
"""

from ggmlb.backends.cuda.kernels.lowering import MAX_GROUPS, Lowering, Step
from ggmlb.backends.cuda.kernels.scratch import place

__all__ = ["MAX_GROUPS", "PACKAGE", "Lowering", "Step", "place"]

PACKAGE = "ggmlb.backends.cuda.kernels"
"""Where the texts lie, as `ggmlb.backends.gpu.source` wants to know."""
