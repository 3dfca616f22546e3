"""Rules: how the result of an op is dealt out, given how its operands are.

A rule returns the state that it wants each operand in, and the state of the result that follows. A mirrored
operand can be had in any state, because each device has its slice; one in the wrong state is gathered first.
So where no rule speaks, or a rule returns `None`, all operands are gathered, and each device computes all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ggmlb.core.enums import Op, RopeType
from ggmlb.core.tensor import Tensor
from ggmlb.parallel.meta.state import MIRRORED, PARTIAL, SplitState

States = Sequence[SplitState]
"""Of the operands; absent ones count as mirrored."""


class Outcome(NamedTuple):
    """What a rule found.

    Attributes:
        result: The state of the result; PARTIAL if it has to be summed over the devices.
        wants: The states that the operands are needed in.
    """

    result: SplitState
    wants: tuple[SplitState, ...]


Rule = Callable[["Tensor", States], Outcome | None]


def outcome(node: Tensor, states: States) -> Outcome:
    """Return how a node that is no view is dealt out."""
    if any(s.is_cut for s in states):
        rule = RULES.get(node.op)
        try:
            found = rule(node, states) if rule is not None else None
        except ArithmeticError:  # parts that do not fall on whole heads or blocks
            found = None
        if found is not None:
            return found
    return whole(states)


def whole(states: States) -> Outcome:
    """Every device computes all of it."""
    return Outcome(MIRRORED, (MIRRORED,) * len(states))


def _first_cut(states: States) -> SplitState:
    return next(s for s in states if s.is_cut)


def _like(node: Tensor, state: SplitState, i: int) -> SplitState | None:
    """The state for an operand that repeats over the result; `None` if it repeats along the cut in part."""
    src = node.src[i]
    if src is None or src.ne[state.axis] == 1 < node.ne[state.axis]:
        return MIRRORED
    return state if src.ne[state.axis] == node.ne[state.axis] else None


def elementwise(node: Tensor, states: States) -> Outcome | None:
    """Element by element; operands may repeat over the first."""
    state = _first_cut(states)
    src = node.src[states.index(state)]
    if src is None or src.ne[state.axis] != node.ne[state.axis]:
        return None
    wants = [_like(node, state, i) for i in range(len(states))]
    known = tuple(w for w in wants if w is not None)
    return Outcome(state, known) if len(known) == len(wants) else None


def per_row(node: Tensor, states: States) -> Outcome | None:
    """Each row by itself, of one operand."""
    return elementwise(node, states) if states[0].is_cut and states[0].axis != 0 else None


def glu(node: Tensor, states: States) -> Outcome | None:
    """Two tensors element by element; or the halves of rows, which may be dealt out as two segments."""
    if node.src[1] is not None:
        return elementwise(node, states)
    if states[0].axis != 0:
        return per_row(node, states)
    segments = states[0].segments
    if len(segments) % 2 or segments[: len(segments) // 2] != segments[len(segments) // 2 :]:
        return None
    return Outcome(SplitState(states[0].axis, segments[: len(segments) // 2]), tuple(states))


def soft_max(node: Tensor, states: States) -> Outcome | None:
    """By rows; the mask and the sinks follow the cut. ALiBi's slopes count heads, so no cut through those."""
    state = states[0]
    if not state.is_cut or state.axis == 0 or (state.axis == 2 and node.params["max_bias"]):
        return None
    mask = _like(node, state, 1) if len(states) > 1 else MIRRORED
    sinks = state.moved(0) if state.axis == 2 and _has(node, 2) else MIRRORED
    return None if mask is None else Outcome(state, (state, mask, sinks)[: len(states)])


def rope(node: Tensor, states: States) -> Outcome | None:
    """Heads by themselves; positions follow a cut along them."""
    state = states[0]
    if not state.is_cut or state.axis == 0 or any(s.is_cut for s in states[1:]):
        return None
    positions = MIRRORED
    if state.axis == 2:
        if node.params["mode"] & RopeType.MROPE:
            return None  # four positions for each token, token after token
        positions = state.moved(0)
    return Outcome(state, (state, positions, *states[2:]))


def mul_mat(node: Tensor, states: States) -> Outcome | None:
    """`y = w x`: rows of `w` give rows of `y`; cut along the sum, each device has a part of it."""
    w, x = states
    a, b = node.sources[:2]
    if w.is_cut and w.axis == 0:
        return Outcome(PARTIAL, (w, w))
    for own, axis in ((w, w.axis), (x, x.axis)):
        if own.is_cut and axis >= 2:
            return _by_matrix(a, b, w if own is w else None, x if own is x else None)
    if w.is_cut:
        return Outcome(w.moved(0), (w, MIRRORED))
    if x.axis == 1:
        return Outcome(x, (MIRRORED, x))
    x.moved(0, over=a.dtype.block_size)  # the slices of `w` must be whole blocks
    return Outcome(PARTIAL, (x, x))


def _by_matrix(a: Tensor, b: Tensor, w: SplitState | None, x: SplitState | None) -> Outcome | None:
    """Each matrix of a batch by itself; one of `w` may serve several of `x`, side by side."""
    axis = (w or x or MIRRORED).axis
    ratio = b.ne[axis] // a.ne[axis]
    if w is None:
        assert x is not None
        w = MIRRORED if a.ne[axis] == 1 else x.moved(axis, over=ratio)
    else:
        x = w.moved(axis, ratio)
    return Outcome(x, (w, x))


def mul_mat_id(node: Tensor, states: States) -> Outcome | None:
    """As `mul_mat`, by expert."""
    w, x = states[:2]
    if w.is_cut:
        if w.axis == 0:
            return Outcome(PARTIAL, (w, w, MIRRORED))
        return Outcome(w.moved(0), (w, MIRRORED, MIRRORED)) if w.axis == 1 else None
    if x.is_cut and x.axis == 2:
        return Outcome(x, (MIRRORED, x, x.moved(1)))
    return None


def flash_attn_ext(node: Tensor, states: States) -> Outcome | None:
    """Each head by itself; heads of `k` and `v` serve several of `q`. No cut through heads with ALiBi."""
    q, k = node.sources[:2]
    state = _first_cut(states)
    if state not in states[:3] or state.axis < 2:
        return None
    axis = int(state.axis)
    ratio = q.ne[axis] // k.ne[axis]
    heads = state if state == states[0] else state.moved(axis, ratio)
    if axis == 2 and node.params["max_bias"]:
        return None
    keys = heads.moved(axis, over=ratio)
    mask = node.src[3]
    mask_state = MIRRORED if mask is None or mask.ne[axis] == 1 else heads
    if mask is not None and mask.ne[axis] not in (1, q.ne[axis]):
        return None
    sinks = heads.moved(0) if axis == 2 and _has(node, 4) else MIRRORED
    wants = (heads, keys, keys, mask_state, sinks)
    return Outcome(heads.moved(1 if axis == 2 else axis), wants[: len(states)])


def get_rows(node: Tensor, states: States) -> Outcome | None:
    """Columns of the table give columns of the result."""
    return Outcome(states[0], (states[0], MIRRORED)) if states[0].axis == 0 else None


def set_rows(node: Tensor, states: States) -> Outcome | None:
    """Rows go where their columns are; the operands are the rows, their numbers, and where they go."""
    into = states[2]
    return Outcome(into, (into, MIRRORED, into)) if into.is_cut and into.axis == 0 else None


def concat(node: Tensor, states: States) -> Outcome | None:
    """Along another dimension than the cut."""
    state = _first_cut(states)
    return Outcome(state, (state, state)) if state.axis != node.params["dim"] else None


def copy(node: Tensor, states: States) -> Outcome | None:
    """Element by element into the same shape."""
    src = node.src[0]
    if src is None or src.ne != node.ne:
        return None
    state = states[-1] if states[-1].is_cut else states[0]
    return Outcome(state, (state,) * len(states))


def add_id(node: Tensor, states: States) -> Outcome | None:
    """A row of the second operand onto each row of the first: columns go together."""
    state = states[0]
    return Outcome(state, (state, state, MIRRORED)) if state.is_cut and state.axis == 0 else None


def optimizer_step(node: Tensor, states: States) -> Outcome | None:
    """Element by element, but for the rates; all that is written must be dealt out alike."""
    state, rates = states[0], states[-1]
    is_alike = state.is_cut and not rates.is_cut and all(s == state for s in states[:-1])
    return Outcome(state, (*states[:-1], MIRRORED)) if is_alike else None


def _has(node: Tensor, i: int) -> bool:
    return len(node.src) > i and node.src[i] is not None


RULES: dict[Op, Rule] = {
    **dict.fromkeys(
        (Op.ADD, Op.SUB, Op.MUL, Op.DIV, Op.SQR, Op.SQRT, Op.LOG, Op.SIN, Op.COS, Op.SCALE, Op.CLAMP,
         Op.LEAKY_RELU, Op.UNARY, Op.SILU_BACK, Op.FILL),
        elementwise,
    ),
    **dict.fromkeys(
        (Op.NORM, Op.RMS_NORM, Op.L2_NORM, Op.SUM_ROWS, Op.MEAN, Op.CUMSUM, Op.ARGSORT, Op.TOP_K), per_row
    ),
    Op.GLU: glu,
    Op.SOFT_MAX: soft_max,
    Op.ROPE: rope,
    Op.MUL_MAT: mul_mat,
    Op.MUL_MAT_ID: mul_mat_id,
    Op.FLASH_ATTN_EXT: flash_attn_ext,
    Op.GET_ROWS: get_rows,
    Op.SET_ROWS: set_rows,
    Op.CONCAT: concat,
    Op.CONT: copy,
    Op.DUP: copy,
    Op.CPY: copy,
    Op.ADD_ID: add_id,
    Op.OPT_STEP_ADAMW: optimizer_step,
    Op.OPT_STEP_SGD: optimizer_step,
}  # fmt: skip
