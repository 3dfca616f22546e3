"""Portable kernels: one text that compiles as OpenCL C 1.2 and as CUDA C++.

    node ── lowering ──> Launch(kernel, defines, tensors and numbers, work split)
                           │
    prelude + headers + kernel text ──> source(kernel, language) ──> a backend compiles and runs it

The texts (`*.knl`, `*.h`) are written against a prelude of macros, one per language. A kernel's
parameter list is read from its text, so that all launchers set arguments from one description. Whether
a group of work-items shares a row (GPUs) or a work-item has rows to itself (CPU-type devices) is chosen
by the macro WG.
"""

from ggmlb.backends.gpu.launch import BadIndex, Defines, Launch, Mem, Scratch, Target
from ggmlb.backends.gpu.lowering import can_fuse, declines, lower, lower_group
from ggmlb.backends.gpu.source import Kernel, Param, assemble, families, packed_args, source

__all__ = [
    "BadIndex",
    "Defines",
    "Kernel",
    "Launch",
    "Mem",
    "Param",
    "Scratch",
    "Target",
    "assemble",
    "can_fuse",
    "declines",
    "families",
    "lower",
    "lower_group",
    "packed_args",
    "source",
]
