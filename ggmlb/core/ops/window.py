"""Window partitioning and relative positions of image encoders (SAM).

WIN_PART has the params `npx, npy, w`; WIN_UNPART `w`; ADD_REL_POS `inplace`; GET_REL_POS none.
"""

from __future__ import annotations

from ggmlb.core.dtypes import DType
from ggmlb.core.enums import Op
from ggmlb.core.ops.base import OpBase, fail_arg, fail_shape, full_ne, require_contiguous, require_type
from ggmlb.core.ops.spec import OpSpec
from ggmlb.core.tensor import Tensor


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
        """Return attention logits `a` plus terms of relative position, `pw` and `ph` (ggml_add_rel_pos).

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


SPECS = (
    OpSpec(Op.WIN_PART, params=("npx", "npy", "w")),
    OpSpec(Op.WIN_UNPART, params=("w",)),
    OpSpec(Op.GET_REL_POS),
    OpSpec(Op.ADD_REL_POS, params=("inplace",)),
)
