"""Fusion: finds groups of nodes of a graph that one kernel may compute.

    graph ── fuse(graph, can_fuse) ──> [node, Group, node, ...]

A `Pattern` names nodes and how they connect. `fuse` finds its instances in a graph, and drops those that
would change visible results. `can_fuse` tells for which of the rest a backend has a kernel. So lowering
is

    for item in fuse(graph, can_fuse):        # can_fuse(group) -> bool: there is a kernel for these types
        launches += lower_group(item) if isinstance(item, Group) else lower(item)

and, if the nodes of a group are far apart, the backend's `graph_optimize` first calls `gather(graph,
can_fuse)`, so that the allocator cannot reuse an operand's memory in between. A `Group` holds its nodes
by the pattern's names:

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

`group["norm"]` is a node, `"mul" in group` tells whether it is present, `group.other("mul")` is its
operand from outside the group; `group.products` lists the products with what is added to each, in a gated
unit the activated one first. All results except the last are dropped, unless they are in `group.kept`:
the kernel must write these too. Each node keeps its own operands, params and place.

Every group passed to `can_fuse` satisfies:

- A dropped result is float32, has no other readers in the whole graph (`Graph.use_counts`), is not
  flagged and not a view, and was placed by an allocator. Results placed by the user are always written.
- No result overlaps an operand, except at the same place with the same strides if the pattern is
  elementwise or row-wise (`IN_PLACE`): kernels must then work in place, like those of single nodes.
- Results do not overlap, and the group may be computed at the position of its last node.
- Outside operands of `add`, `mul` and `shift` have in each dimension the result's extent or 1. No tensor
  is empty. Other types are checked by `can_fuse`.

`GGMLB_FUSE=0` turns fusion off. Source: ggml_can_fuse and its users; the conditions on memory are ours.
"""

from ggmlb.backends.common.fusion.find import CanFuse, fuse, gather
from ggmlb.backends.common.fusion.group import IN_PLACE, PATTERNS, Group, Name, Product

__all__ = ["IN_PLACE", "PATTERNS", "CanFuse", "Group", "Name", "Product", "fuse", "gather"]
