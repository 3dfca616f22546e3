"""Norms of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.enums import Op
from ggmlb.kernels.launch import Mem, rowwise
from ggmlb.kernels.lowering.base import Rule, not_floats

if TYPE_CHECKING:
    from ggmlb.kernels.launch import Launch, Target
    from ggmlb.tensor import Tensor


def _declines(node: Tensor) -> str | None:
    return not_floats(node.src[0], node)


def _norm(node: Tensor, target: Target) -> list[Launch]:
    mems = [Mem.of(node.src[0]), Mem.of(node)]  # type: ignore[arg-type]
    kernel = "layer_norm" if node.op is Op.NORM else node.op.lower()
    return [rowwise(target, kernel, mems, node.params["eps"])]


def _group_declines(node: Tensor) -> str | None:
    why = _declines(node)
    if why is None and not (_packed_planes(node) and _packed_planes(node.src[0])):  # type: ignore[arg-type]
        why = "the planes of a group are not contiguous: apply cont"
    return why


def _packed_planes(t: Tensor) -> bool:
    nb0 = t.dtype.type_size
    return t.nb[:3] == (nb0, nb0 * t.ne[0], nb0 * t.ne[0] * t.ne[1])


def _group_norm(node: Tensor, target: Target) -> list[Launch]:
    """A group of channels is a row; the last one may be shorter, and some empty."""
    plane, n_channels, n_images = node.ne[0] * node.ne[1], node.ne[2], node.ne[3]
    size = -(-n_channels // node.params["n_groups"])
    launches = []
    for first, n_groups, n in (
        (0, n_channels // size, size),
        (n_channels // size * size, 1, n_channels % size),
    ):
        if n_groups and n:
            mems = [
                m.window(
                    (n * plane, n_groups, 1, n_images), (m.nb[0], n * m.nb[2], 0, m.nb[3]), first * m.nb[2]
                )
                for m in (Mem.of(node.src[0]), Mem.of(node))  # type: ignore[arg-type]
            ]
            launches.append(rowwise(target, "layer_norm", mems, node.params["eps"]))
    return launches


RULES = {
    **dict.fromkeys((Op.NORM, Op.RMS_NORM, Op.L2_NORM), Rule(_declines, _norm)),
    Op.GROUP_NORM: Rule(_group_declines, _group_norm),
}
