"""Norms and soft max of rows, and their gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.backends.common.formulas import alibi
from ggmlb.backends.common.rules import F32, FLOATS, operands
from ggmlb.backends.common.strided import Mem
from ggmlb.backends.gpu.launch import Launch, Target, in_registers
from ggmlb.backends.gpu.lowering.base import RULES
from ggmlb.core.enums import Op

if TYPE_CHECKING:
    from ggmlb.backends.common.fusion import Group
    from ggmlb.core.tensor import Tensor


@RULES.rule((Op.NORM, Op.RMS_NORM, Op.L2_NORM), operands(FLOATS))
def _norm(node: Tensor, target: Target) -> list[Launch]:
    a = node.sources[0]
    if node.op is Op.L2_NORM:
        return [in_registers(target, "l2_norm", [Mem.of(a), Mem.of(node)], node.params["eps"])]
    return [_launch(target, node, Mem.of(a), Mem.of(node))]


@RULES.rule(Op.RMS_NORM_BACK, operands(FLOATS, FLOATS))
def _rms_norm_back(node: Tensor, target: Target) -> list[Launch]:
    mems = Mem.all_of(node)
    return [in_registers(target, "rms_norm_back", mems, node.params["eps"])]


def _launch(
    target: Target,
    node: Tensor,
    a: Mem,
    d: Mem,
    *,
    added: Mem | None = None,
    kept: Mem | None = None,
    scale: Mem | None = None,
    shift: Mem | None = None,
) -> Launch:
    """Return the launch of `d = norm(a + added) * scale + shift`, which stores `a + added` to `kept`."""
    kernel = "rms_norm" if node.op is Op.RMS_NORM else "layer_norm"
    given = {"ADDED": added, "KEEP": kept, "SCALED": scale, "SHIFTED": shift}
    mems = [a, added or a, kept or d, scale or a, shift or a, d]
    flags = {name: 1 for name, mem in given.items() if mem is not None}
    return in_registers(target, kernel, mems, node.params["eps"], **flags)


@RULES.rule("norm")
def _norm_of_group(group: Group, target: Target) -> list[Launch]:
    node, d = group["norm"], Mem.of(group.result)

    def beside(part: str) -> Mem | None:
        return Mem.of(group.other(part)).tiled_to(d.ne) if part in group else None

    if "add" not in group:
        a, added, kept = node.sources[0], None, None
    else:
        total = group["add"]
        a, b = total.sources
        added = Mem.of(b).tiled_to(d.ne)
        kept = Mem.of(total) if total in group.kept else None
    scale, shift = beside("mul"), beside("shift")
    return [_launch(target, node, Mem.of(a), d, added=added, kept=kept, scale=scale, shift=shift)]


def _in_planes(node: Tensor) -> str | None:
    for t in (*node.sources, node):
        nb0 = t.dtype.type_size
        if t.nb[:3] != (nb0, nb0 * t.ne[0], nb0 * t.ne[0] * t.ne[1]):
            return "the planes of a group are not contiguous: apply cont"
    return None


@RULES.rule(Op.GROUP_NORM, operands(FLOATS), _in_planes)
def _group_norm(node: Tensor, target: Target) -> list[Launch]:
    """Each group of channels is a row; the last may be shorter, some may be empty."""
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
                for m in (Mem.of(node.sources[0]), Mem.of(node))
            ]
            launches.append(_launch(target, node, *mems))
    return launches


@RULES.rule(Op.SOFT_MAX, operands(F32, FLOATS, F32, out=F32))
def _soft_max(node: Tensor, target: Target) -> list[Launch]:
    a = node.operand(0)
    mask, sinks = node.optional(1), node.optional(2)
    mems = [Mem.of(t or node) for t in (a, mask, sinks, node)]  # absent operands are not read
    flags = {"MASK": 1} if mask is not None else {}
    if sinks is not None:
        flags["SINKS"] = 1
    p = node.params
    return [
        in_registers(
            target, "soft_max", mems, p["scale"], p["max_bias"], *alibi(a.ne[2], p["max_bias"]), **flags
        )
    ]


@RULES.rule(Op.SOFT_MAX_BACK, operands(FLOATS, FLOATS))
def _soft_max_back(node: Tensor, target: Target) -> list[Launch]:
    mems = Mem.all_of(node)
    return [in_registers(target, "soft_max_back", mems, node.params["scale"])]
