"""Programs for the LLVM device, which ggmlb and ggml build and compute alike; by parts, which run apart."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ops_cases
from ops_cases import F16, F32, Case, Ggml, Ggmlb, K, M

from ggmlb.core.dtypes import DType

LIBRARIES = {"ggmlb": Ggmlb, "ggml": Ggml}

TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
ROWS = (1, 2, 4, 8, 64, 512)
REPACKED = "LLVM_Repacked"
"""The device's own memory for weights; ggml's lie in plain memory, but in parts that begin with `peer`."""
PEERS = {
    (1, "AMX"): ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    (1, "CPU_REPACK"): ("Q4_0", "Q4_K", "IQ4_NL"),
    (512, "CPU_REPACK"): ("Q4_0", "Q4_K", "IQ4_NL"),
}
"""ggml's own memory for weights, which llama.cpp uses where it can: columns, its name, types that it takes.
Products of several columns in AMX memory end in an illegal instruction on the machine of the figures."""
FASTER = {(1, "Q4_0"), (1, "Q8_0"), (1, "Q4_K"), *((512, name) for name in TYPES)}
"""Products that should take 1/1.3 of ggml's time; all else at most as long."""

OPS = (
    "add", "mul", "scale", "silu", "gelu", "gelu_erf", "swiglu", "norm", "rms_norm", "soft_max",
    "soft_max_ext", "rope", "get_rows", "set_rows", "cpy", "flash_attn_ext", "mul_mat_id",
)  # fmt: skip
"""Of `ops_cases`, with a million elements each."""

N_NODES = 1000


def _decode(cache: DType, c: Any) -> Any:
    q, k, v = c.leaf(F32, 128, 1, 32), c.leaf(cache, 128, 4096, 8), c.leaf(cache, 128, 4096, 8)
    mask = c.leaf(F16, 4096, 1, values=np.zeros((1, 4096), np.float32))
    return c.flash_attn_ext(q, k, v, mask, 128**-0.5, 0.0, 0.0)


def _tiny(c: Any) -> Any:
    x, y = c.leaf(F32, 64), c.leaf(F32, 64, low=-0.001, high=0.001)
    for _ in range(N_NODES):
        x = c.add(x, y)
    return x


def _product(name: str, n: int, storage: str = "CPU", peer: str = "CPU") -> Case:
    error = 1e-6 if name == "F32" else 1e-3
    build = partial(ops_cases._mul_mat, DType[name], n)
    target = 1.3 if (n, name) in FASTER else 1.0
    where = "" if storage == "CPU" else f", {storage}"
    if peer != "CPU":
        where, target = f"{where} beside {peer}", None
    what = f"{name.lower()}, n = {n}{where}"
    return Case("mul_mat", what, build, target, error, storage, peer=peer)


PARTS: dict[str, list[Case]] = {
    **{f"n{n}": [_product(name, n) for name in TYPES] for n in ROWS},
    **{f"r{n}": [_product(name, n, REPACKED) for name in TYPES] for n in ROWS},
    **{
        f"peer-{peer}-{n}": [_product(name, n, REPACKED, peer) for name in types]
        for (n, peer), types in PEERS.items()
    },
    "ops": [
        replace(case, target=1.0, storage="CPU")
        for case in ops_cases.CASES
        if case.op in OPS and case.device == "CPU"
    ],
    "graphs": [
        *(
            Case(
                "flash_attn_ext",
                f"1 query, 32 heads on 4096 x 8 {cache.name.lower()}",
                partial(_decode, cache),
                1.0,
                1e-3,  # ggml adds the values up as halves
            )
            for cache in (F16, DType.Q8_0)
        ),
        Case("add", f"{N_NODES} nodes of 64 elements", _tiny, 0.67, 1e-9),
    ],
}
PARTS = {name: [replace(case, device="LLVM") for case in part] for name, part in PARTS.items()}
CASES = [case for part in PARTS.values() for case in part]

assert (K, M) == (14336, 4096)
