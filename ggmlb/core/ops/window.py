"""Window partitioning and relative positions of image encoders (SAM).

WIN_PART has the params `npx, npy, w`; WIN_UNPART `w`; ADD_REL_POS `inplace`; GET_REL_POS none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, full_ne, require_contiguous, require_type
from ggmlb.core.ops.spec import F16, F32, OpSpec, f32, main
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.testing.draw import Program


class WindowOps(OpBase):
    """win_part, win_unpart, get_rel_pos, add_rel_pos."""

    def win_part(self, a: Tensor, w: int) -> Tensor:
        """Return the windows of `w` by `w` of an image, padded with zeros: ne `[c, w, w, n]` (ggml_win_part).

        Raises:
            ShapeError: `a`, ne `[c, width, height]`, has a fourth dimension.
            DTypeError: `a` is not f32.
            ArgumentError: `w` is not positive.
        """
        if a.ne[3] != 1:
            fail_shape("win_part", f"ne[3] is {a.ne[3]}; it must be 1", a)
        require_type("win_part", "a", a, DType.F32)
        if w < 1:
            fail_arg("win_part", f"w is {w}; it must be positive")
        npx, npy = -(-a.ne[1] // w), -(-a.ne[2] // w)
        params = {"npx": npx, "npy": npy, "w": w}
        return self._op(Op.WIN_PART, DType.F32, (a.ne[0], w, w, npx * npy), (a,), params)

    def win_unpart(self, a: Tensor, w0: int, h0: int, w: int) -> Tensor:
        """Return the `w0` by `h0` image of windows: the inverse of `win_part` (ggml_win_unpart).

        Raises:
            DTypeError: `a` is not f32.
            ShapeError: `a` does not hold the windows of such an image.
            ArgumentError: `w` is not positive.
        """
        require_type("win_unpart", "a", a, DType.F32)
        if w < 1:
            fail_arg("win_unpart", f"w is {w}; it must be positive")
        ne = full_ne((a.ne[0], w0, h0), "win_unpart")
        count = -(-w0 // w) * -(-h0 // w)
        if a.ne[1:] != (w, w, count):
            fail_shape("win_unpart", f"a must hold {count} windows of {w} by {w}", a)
        return self._op(Op.WIN_UNPART, DType.F32, ne, (a,), {"w": w})

    def get_rel_pos(self, a: Tensor, qh: int, kh: int) -> Tensor:
        """Return the row of `a` for each distance of a query and a key: f16, ne `[c, kh, qh]`.

        Source: ggml_get_rel_pos.

        Raises:
            ArgumentError: `qh` and `kh` differ.
            ShapeError: `a` does not have `2 * qh - 1` rows.
        """
        if qh != kh:
            fail_arg("get_rel_pos", f"qh is {qh} and kh is {kh}; they must be equal")
        if a.ne[1] != 2 * qh - 1:
            fail_shape("get_rel_pos", f"a must have 2 * qh - 1 = {2 * qh - 1} rows", a)
        return self._op(Op.GET_REL_POS, DType.F16, (a.ne[0], kh, qh, 1), (a,))

    def add_rel_pos(self, a: Tensor, pw: Tensor, ph: Tensor) -> Tensor:
        """Return attention logits plus their relative position terms (ggml_add_rel_pos).

        Args:
            a: Contiguous, ne `[k * k, h * w, n]`.
            pw: Contiguous f32, ne `[k, w, h, n]`.
            ph: Contiguous f32, of the shape of `pw`.

        Raises:
            ShapeError: The shapes do not fit, or an operand is not contiguous.
            DTypeError: `pw` or `ph` is not f32.
        """
        return self._add_rel_pos("add_rel_pos", a, pw, ph, False)

    def add_rel_pos_inplace(self, a: Tensor, pw: Tensor, ph: Tensor) -> Tensor:
        """Return `add_rel_pos`, written into the memory of `a` (ggml_add_rel_pos_inplace)."""
        return self._add_rel_pos("add_rel_pos_inplace", a, pw, ph, True)

    def _add_rel_pos(self, fn: str, a: Tensor, pw: Tensor, ph: Tensor, inplace: bool) -> Tensor:
        for name, t in (("a", a), ("pw", pw), ("ph", ph)):
            require_contiguous(fn, name, t)
        require_type(fn, "pw", pw, DType.F32)
        require_type(fn, "ph", ph, DType.F32)
        k, w, h, n = pw.ne
        if pw.ne != ph.ne or a.ne[:3] != (k * k, w * h, n):
            fail_shape(fn, f"pw and ph must have equal shapes, and a ne {[k * k, w * h, n]}", a, pw, ph)
        return self._like(inplace, Op.ADD_REL_POS, a, (a, pw, ph), {"inplace": inplace})


# -- cases ---


def _draw_win_part(p: Program) -> None:
    p.nmse = 0
    p.out("win_part", p.leaf(F32, p.ne(8, 11, 11)), p.int(1, 5))


def _draw_win_unpart(p: Program) -> None:
    p.nmse = 0
    w, wide, high = p.int(1, 5), p.int(1, 11), p.int(1, 11)
    windows = -(-wide // w) * -(-high // w)
    p.out("win_unpart", p.leaf(F32, (p.int(1, 8), w, w, windows)), wide, high, w)


def _draw_get_rel_pos(p: Program) -> None:
    p.nmse = 0
    n = p.int(1, 8)
    p.out("get_rel_pos", p.leaf(F16, (p.int(1, 20), 2 * n - 1)), n, n)


def _draw_add_rel_pos(p: Program) -> None:
    k, wide, high, n = p.int(1, 6), p.int(1, 4), p.int(1, 4), p.int(1, 3)
    bias = (p.leaf(F32, (k, wide, high, n)) for _ in range(2))
    p.out(p.one_of("add_rel_pos", "add_rel_pos_inplace"), p.leaf(F32, (k * k, wide * high, n)), *bias)


SPECS = (
    OpSpec(
        Op.WIN_PART,
        params=("npx", "npy", "w"),
        samples={"win_part": lambda c, t: c.win_part(main(c, t, 8, 14, 14), 7)},
        cases={"win_part": _draw_win_part},
    ),
    OpSpec(
        Op.WIN_UNPART,
        params=("w",),
        samples={"win_unpart": lambda c, t: c.win_unpart(main(c, t, 8, 7, 7, 4), 14, 14, 7)},
        cases={"win_unpart": _draw_win_unpart},
    ),
    OpSpec(
        Op.GET_REL_POS,
        samples={"get_rel_pos": lambda c, t: c.get_rel_pos(main(c, t, 8, 7), 4, 4)},
        cases={"get_rel_pos": _draw_get_rel_pos},
    ),
    OpSpec(
        Op.ADD_REL_POS,
        params=("inplace",),
        samples={
            "add_rel_pos": lambda c, t: c.add_rel_pos(
                main(c, t, 16, 16, 2), f32(c, 4, 4, 4, 2), f32(c, 4, 4, 4, 2)
            )
        },
        cases={"add_rel_pos": _draw_add_rel_pos},
    ),
)
