"""Fusion: which neighbouring nodes of a graph one kernel may compute at once.

    graph ── fuse(graph, can_fuse) ──> [node, Group, node, ...]

A `Pattern` names nodes and how they connect. `fuse` finds its instances in a graph, and drops those that
would change what anybody can see. A backend says which of the rest it has a kernel for. So lowering is

    for item in fuse(graph, can_fuse):        # can_fuse(group) -> bool: there is a kernel for these types
        launches += lower_group(item) if isinstance(item, Group) else lower(item)

and, where the nodes of a group stand far apart, the backend's `graph_optimize` first calls
`gather(graph, can_fuse)`, so that the allocator cannot reuse an operand's memory in between. A `Group` holds
its nodes by the names that the pattern gives them:

    ================  ====================================  ================================================
    pattern           parts                                 computes
    ================  ====================================  ================================================
    `norm`            [`add`] `norm` [`mul` [`shift`]]      `norm(x + b) * w + c`; `add` may be kept (below)
    `rope_set_rows`   `rope` `set_rows`                     rope, written to rows of a cache
    `mul_mat_add`     `mul_mat` `add`                       a product, plus a bias or a residual
    `mul_mat_unary`   `mul_mat` [`add`] `unary`             a function of a product, or of that plus a bias
    `glu`             `gate` [`gate_add`]                   a gated unit of two products of one operand; or,
                      [`up` [`up_add`]] `glu`               without `up`, of the halves of one product's rows
    ================  ====================================  ================================================

`group["norm"]` is a node, `"mul" in group` tells whether it is there, `group.other("mul")` is the operand
that comes from outside. All results but the last are dropped, unless they are in `group.kept`: the kernel
must write these too. Each node keeps its own operands, params and place, so a backend reads the rest there.

What holds for every group that `can_fuse` is asked about:

- What is dropped is a float32 result that nothing else in the whole graph reads (`Graph.use_counts`), that is
  not flagged, is no view, and lies in memory that an allocator placed. What a user placed is always written.
- No result lies over an operand, except exactly, with the same strides, where the pattern reads and writes
  element by element or row by row (`IN_PLACE`): kernels must work so, as those of single nodes do.
- Results do not overlap, and the group may be computed where its last node stands.
- Operands of `add`, `mul` and `shift` from outside have in each dimension as many elements as the result, or
  one. Nothing is empty. Types are not looked at otherwise: `can_fuse` does.

`GGMLB_FUSE=0` turns fusion off. Source: ggml_can_fuse and its users; the conditions on memory are ours.
"""

from ggmlb.backends.common.fusion.find import CanFuse, fuse, gather
from ggmlb.backends.common.fusion.group import IN_PLACE, PATTERNS, Group, Name

__all__ = ["IN_PLACE", "PATTERNS", "CanFuse", "Group", "Name", "fuse", "gather"]
