"""Products with few rows of activations, fused with their epilogue: sums, functions, gated units.

A chunk multiplies its rows of the weights into scratch memory in the cache, and continues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ggmlb.backends.llvm.codegen.simd import load_floats, store_floats
from ggmlb.backends.llvm.kernels import interleaved_products, matvec
from ggmlb.backends.llvm.kernels.blocks import FORMS
from ggmlb.backends.llvm.kernels.elementwise import FUNCTIONS, gated
from ggmlb.backends.llvm.kernels.walk import lanes

if TYPE_CHECKING:
    from ggmlb.backends.llvm.codegen.emit import Emitter
    from ggmlb.backends.llvm.codegen.value import Value


def with_epilogue(
    k: Emitter,
    dtype: str,
    is_interleaved: bool,
    n_rows: int,
    n_columns: int,
    b_dtype: str,
    adds: Sequence[bool],
    gate: str | None,
) -> None:
    """Multiply, add, and gate.

    Arguments: those of each product; `alpha, limit` if the gate is `swiglu_oai`; `m, parts, y, nb1`; then for
    each product where its result is, `m` float32 a row, and if something is added where that is, `nb1`.

    Args:
        k: The emitted kernel.
        dtype: Type of the weights.
        is_interleaved: Whether they are in strips (`interleaved`).
        n_rows: Rows that are multiplied together; divides `m`.
        n_columns: Rows of activations.
        b_dtype: Type of the activations; float32 if the weights are quantised.
        adds: For each product whether something is added to it.
        gate: The gated linear unit of two products; of one a function, or `None`.
    """
    of = () if dtype in FORMS else (b_dtype,)
    for _ in adds:
        if is_interleaved:
            (interleaved_products.quantized if dtype in FORMS else interleaved_products.floats)(
                k, dtype, n_columns, *of
            )
        else:
            (matvec.quantized if dtype in FORMS else matvec.floats)(k, dtype, n_rows, n_columns, *of)
    n = k.level.lanes
    params = [k.float_arg().splat(n) for _ in range(2)] if gate == "swiglu_oai" else []
    m, parts, y, y_nb1 = k.ints(4)
    products = [(k.int_arg(), k.ints(2) if add else None) for add in adds]
    units, part = m // n_rows, k.chunk % parts
    first, last = units * part // parts * n_rows, units * (part + 1) // parts * n_rows
    for c in range(n_columns):

        def body(i: Value, mask: Value | None, c: int = c) -> None:
            values = []
            for at, added in products:
                value = load_floats(k, "f32", at + (m * c + i) * 4, n, mask)
                if added is not None:
                    value = value + load_floats(k, "f32", added[0] + added[1] * c + i * 4, n, mask)
                values.append(value)
            if len(values) > 1:
                result = gated(k, gate or "", values[0], values[1], params)
            else:
                result = FUNCTIONS[gate or "copy"](k, values[0])
            store_floats(k, "f32", result, y + y_nb1 * c + i * 4, mask)

        lanes(k, first, last, body)
