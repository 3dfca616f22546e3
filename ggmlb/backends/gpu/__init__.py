"""Portable kernels: source texts that compile as OpenCL C 1.2 and as CUDA C++.

    node ── lower ──> Launch(kernel, defines, tensors and numbers, work split)
                           │
    prelude + headers + kernel text ──> source(kernel, language, defines) ──> a backend compiles and runs it

The texts (`*.knl`, `*.h`) use a prelude of macros, one per language. A kernel's parameter list is parsed from
its text. The macro WG decides whether a work-group shares a row (GPUs) or each work-item has
its own rows (CPU-type devices).
"""

from ggmlb.backends.gpu.launch import (
    MAX_WG,
    BadIndex,
    Defines,
    Launch,
    PreparedOperand,
    Scratch,
    Target,
    argument_block,
)
from ggmlb.backends.gpu.lowering import RULES, lower
from ggmlb.backends.gpu.source import Kernel, Param, families, layout, source

__all__ = [
    "MAX_WG",
    "RULES",
    "BadIndex",
    "Defines",
    "Kernel",
    "Launch",
    "Param",
    "PreparedOperand",
    "Scratch",
    "Target",
    "argument_block",
    "families",
    "layout",
    "lower",
    "source",
]
