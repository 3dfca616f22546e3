"""ggml's tensors, read as ggmlb's: operands, parameters, and where they lie."""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from ggmlb import Buffer, Graph, Tensor
from ggmlb.backends.ggml.params import ROPE_FLOATS, WORDS
from ggmlb.core.enums import GluOp, Hint, Op, OpPool, Prec, RopeType, ScaleMode, SortOrder, TriType, UnaryOp
from tests.support.ggml_bridge.c_api import CTensor, Ggml

Lookup = Callable[[int], tuple[Buffer, int] | None]
"""Gives for a C buffer's address the buffer of ggmlb's, and its base address; `None` if it is not ours."""


class Unknown(Exception):
    """A node that ggmlb has no words for; the message says why."""


# -- parameters ------------------------------------------------------------------------------------

ENUMS: dict[tuple[Op, str], type[IntEnum]] = {
    (Op.ARGSORT, "order"): SortOrder,
    (Op.MUL_MAT, "hint"): Hint,
    (Op.POOL_1D, "op"): OpPool,
    (Op.POOL_2D, "op"): OpPool,
    (Op.POOL_2D_BACK, "op"): OpPool,
    (Op.TRI, "type"): TriType,
}

AT_LEAST: dict[Op, int] = {Op.FLASH_ATTN_EXT: 5, Op.GLU: 2, Op.ROPE: 3, Op.ROPE_BACK: 3, Op.SOFT_MAX: 3}
"""Operands that ggmlb writes as None where they are absent."""


def params_of(ggml: Ggml, op: Op, t: CTensor) -> dict[str, Any]:
    """Return a node's parameters as ggmlb names them.

    Raises:
        Unknown: They mean something that ggmlb does not have.
    """
    raw = bytes(t.op_params)
    i, f = struct.unpack("<16i", raw), struct.unpack("<16f", raw)
    if op in WORDS:
        found: dict[str, Any] = {}
        for k, word in enumerate(WORDS[op].split()):
            name, kind = word.split(":")
            value: Any = f[k] if kind == "f" else bool(i[k]) if kind == "b" else i[k]
            if name == "prec":  # ggml's newer ones allow less than F32, and ask for nothing
                value = Prec.F32 if value == Prec.F32 else Prec.DEFAULT
            enum = ENUMS.get((op, name))
            found[name] = value if enum is None else enum(value)
        return found
    if op is Op.UNARY:
        return _unary(ggml, i, f)
    if op is Op.GLU:
        return _glu(ggml, i, f)
    if op in (Op.ROPE, Op.ROPE_BACK):
        floats = dict(zip(ROPE_FLOATS, f[5:11], strict=True))
        facts = {"n_dims": i[1], "mode": RopeType(i[2]), "n_ctx_orig": i[4]}
        return {**facts, **floats, "sections": i[11:15], "offset": i[15]}
    if op is Op.PAD:
        return {"left": i[0:8:2], "right": i[1:8:2], "circular": bool(i[8])}
    if op is Op.PERMUTE:
        return {"axes": i[:4]}
    if op is Op.ROLL:
        return {"shifts": i[:4]}
    if op is Op.UPSCALE:
        return {
            "mode": ScaleMode(i[0] & 255),
            "align_corners": bool(i[0] & 256),
            "antialias": bool(i[0] & 512),
        }
    if op is Op.TOP_K:
        return {"k": t.ne[0]}
    if (op is Op.DSV4_HC_PRE and i[1]) or (op is Op.DSV4_HC_POST and not t.src[3]):
        raise Unknown(f"this form of {op} came after ggml 0.21")
    return {}


def _unary(ggml: Ggml, i: tuple[int, ...], f: tuple[float, ...]) -> dict[str, Any]:
    if i[0] not in ggml.unary_ops:
        raise Unknown(f"ggmlb has no unary op {i[0]}")
    op = ggml.unary_ops[i[0]]
    slopes = {"alpha_n": f[1], "alpha_p": f[2], "beta": f[3], "eps": f[4]} if op is UnaryOp.XIELU else {}
    return {"op": op, **slopes}


def _glu(ggml: Ggml, i: tuple[int, ...], f: tuple[float, ...]) -> dict[str, Any]:
    if i[0] not in ggml.glu_ops:
        raise Unknown(f"ggmlb has no gated linear unit {i[0]}")
    op = ggml.glu_ops[i[0]]
    limits = {"alpha": f[2], "limit": f[3]} if op is GluOp.SWIGLU_OAI else {}
    return {"op": op, "swapped": bool(i[1]), **limits}


# -- tensors ---------------------------------------------------------------------------------------


class Reader:
    """Reads tensors of one graph: each address gives one tensor."""

    def __init__(self, ggml: Ggml, lookup: Lookup) -> None:
        self._ggml = ggml
        self._lookup = lookup
        self._seen: dict[int, Tensor] = {}

    def graph(self, address: int) -> Graph:
        """Return a graph of ggml's, or a part of one: what its nodes read is a leaf.

        Raises:
            Unknown: ggmlb has no words for a node.
        """
        n = self._ggml.c["ggml_graph_n_nodes"](address)
        nodes = [self.tensor(self._ggml.c["ggml_graph_node"](address, i)) for i in range(n)]
        inside = set(nodes)
        return Graph(nodes, dict.fromkeys(s for node in nodes for s in node.sources if s not in inside))

    def tensor(self, address: int) -> Tensor:
        """Return a tensor, with the tensors that it reads.

        Raises:
            Unknown: ggmlb has no words for it.
        """
        if address not in self._seen:
            self._seen[address] = self._read(address)
        return self._seen[address]

    def _read(self, address: int) -> Tensor:
        t = CTensor.from_address(address)
        op, dtype = self._ggml.ops.get(t.op), self._ggml.dtypes.get(t.type)
        if op is None or dtype is None:
            raise Unknown(f"ggmlb has no op {t.op}" if op is None else f"ggmlb has no type {t.type}")
        sources = list(t.src)
        if op is Op.CPY and sources[1] == address:  # ggml_cast names its own result
            sources[1] = None
        n = max((i + 1 for i, s in enumerate(sources) if s), default=0)
        sources = sources[: max(n, AT_LEAST.get(op, 0))]
        ne, nb = tuple(t.ne), tuple(t.nb)
        plain = Tensor(dtype, ne)
        tensor = Tensor(
            dtype,
            ne,
            None if plain.nb == nb else nb,
            op=op,
            src=tuple(self.tensor(s) if s else None for s in sources),
            params=params_of(self._ggml, op, t),
            view_src=self.tensor(t.view_src) if t.view_src else None,
            view_offs=t.view_offs,
            name=t.name.decode(errors="replace"),
        )
        if op is Op.LIGHTNING_INDEXER and tensor.src[3] is not None and tensor.src[3].ne[3] != ne[3]:
            raise Unknown("a mask that streams share; ggmlb's indexer takes one for each")
        tensor.flags = t.flags
        if t.buffer and t.data and (found := self._lookup(t.buffer)):
            tensor.buffer, tensor.offset = found[0], t.data - found[1]
        return tensor
