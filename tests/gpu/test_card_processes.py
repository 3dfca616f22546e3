"""What only a process of its own can show of a card: a kernel that fails."""

from __future__ import annotations

import pytest

from tests.support.processes import COMMON, finish, start

ILLEGAL_ADDRESS = """
stream = init_by_name("CUDA0")
ctx = Context()
table = ctx.new_tensor(DType.F32, (64, 8), "table")
rows = ctx.new_tensor(DType.I32, (64,), "rows")
y = ctx.sqr(ctx.get_rows(table, rows))
alloc_ctx_tensors(ctx, stream)
rows.set(np.full(64, 2_000_000_000, np.int32))
try:
    stream.graph_compute(Graph().build_forward_expand(y))
except BackendError as error:
    assert EXPECTED in str(error), error
    print("done", flush=True)
import os
os._exit(0)     # the context is broken: nothing can be released any more
"""


@pytest.mark.parametrize(
    ("expected", "sync"), [("a graph of 2 nodes", "0"), ("failed to compute GET_ROWS", "1")]
)
def test_a_kernel_that_fails_is_told_with_its_graph_or_node(expected: str, sync: str) -> None:
    finish(start(f"{COMMON}\nEXPECTED = {expected!r}\n{ILLEGAL_ADDRESS}", GGMLB_CUDA_SYNC=sync))
