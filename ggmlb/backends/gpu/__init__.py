"""Portable kernels: source texts that compile as OpenCL C 1.2 and as CUDA C++.

    node ── lowering ──> Launch(kernel, defines, tensors and numbers, work split)
                           │
    prelude + headers + kernel text ──> source(kernel, language) ──> a backend compiles and runs it

The texts (`*.knl`, `*.h`) use a prelude of macros, one per language. Launchers read a kernel's parameter
list from its text. The macro WG decides whether a work-group shares a row (GPUs) or each work-item has
its own rows (CPU-type devices).
"""

from ggmlb.backends.gpu.launch import MAX_WG, BadIndex, Defines, Launch, Scratch, Target, argument_block
from ggmlb.backends.gpu.lowering import can_fuse, declines, lower, lower_group
from ggmlb.backends.gpu.source import Kernel, Param, families, layout, source

__all__ = [
    "MAX_WG",
    "BadIndex",
    "Defines",
    "Kernel",
    "Launch",
    "Param",
    "Scratch",
    "Target",
    "argument_block",
    "can_fuse",
    "declines",
    "families",
    "layout",
    "lower",
    "lower_group",
    "source",
]
