"""The table of CUDA's lowering rules, registered by this package's modules; falls back to portable ones."""

from __future__ import annotations

from typing import Final, TypeAlias

from ggmlb.backends.common.rules import Rules
from ggmlb.backends.cuda.cublas import Gemm
from ggmlb.backends.gpu import RULES as PORTABLE
from ggmlb.backends.gpu import Launch
from ggmlb.backends.gpu.lowering import GpuRules

Step: TypeAlias = Launch | Gemm

PACKAGE: Final = "ggmlb.backends.cuda.kernels"
"""The package of the texts, for `ggmlb.backends.gpu.source`."""

RULES: Final[GpuRules] = Rules(base=PORTABLE)
