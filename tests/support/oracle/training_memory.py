"""Memory of the results of a training graph: ours, and that which ggml's allocator reserves."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from tests.support.processes import python

N = 64
"""Elements of a row."""


def our_nbytes(n_layers: int, n_batch: int) -> int:
    """The bytes that our scheduler reserves on the CPU for a step of AdamW."""
    import ggmlb
    from ggmlb import Context, Scheduler
    from ggmlb.optimize import OptContext

    with ggmlb.init_by_name("CPU") as cpu, Scheduler([cpu]) as scheduler:
        weights, ctx = Context(), Context()
        layers = [
            tuple(weights.set_param(weights.new_tensor("f32", ne)) for ne in ((N, 4 * N), (4 * N, N)))
            for _ in range(n_layers)
        ]
        x = ctx.set_input(ctx.new_tensor("f32", (N, n_batch)))
        y = x
        for up, down in layers:
            y = ctx.add(y, ctx.mul_mat(down, ctx.silu(ctx.mul_mat(up, ctx.rms_norm(y, 1e-5)))))
        with ggmlb.alloc_ctx_tensors(weights, cpu), OptContext(scheduler, x, y, "cross_entropy") as opt:
            opt.alloc()
            return scheduler.buffer_size(cpu)


def ggml_nbytes(n_layers: int, n_batch: int) -> int:
    """The same by ggml, whose graph is made as ggml-opt makes it, in a process of its own."""
    done = python("-m", "tests.support.oracle.training_memory", str(n_layers), str(n_batch))
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def _main(n_layers: int, n_batch: int) -> None:
    from ggml import ggml

    ctx = ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 28, mem_buffer=None, no_alloc=True))
    static = ggml.ggml_init(ggml.ggml_init_params(mem_size=1 << 24, mem_buffer=None, no_alloc=True))
    ggml.lib.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p  # of which ggml-python cuts half off
    buft = ggml.lib.ggml_backend_cpu_buffer_type()

    def new(*ne: int) -> Any:
        return ggml.ggml_new_tensor_2d(static, 0, *ne)

    layers = [(new(N, 4 * N), new(4 * N, N)) for _ in range(n_layers)]
    x, labels = (ggml.ggml_new_tensor_2d(ctx, 0, N, n_batch) for _ in range(2))
    for tensor in (x, labels):
        ggml.ggml_set_input(tensor)
    y = x
    for up, down in layers:
        for tensor in (up, down):
            ggml.ggml_set_param(tensor)
        inner = ggml.ggml_silu(ctx, ggml.ggml_mul_mat(ctx, up, ggml.ggml_rms_norm(ctx, y, 1e-5)))
        y = ggml.ggml_add(ctx, y, ggml.ggml_mul_mat(ctx, down, inner))
    ggml.ggml_set_output(y)
    loss = ggml.ggml_cross_entropy_loss(ctx, y, labels)
    ggml.ggml_set_output(loss)
    ggml.ggml_set_loss(loss)
    graph = ggml.ggml_new_graph_custom(ctx, 8192, True)
    ggml.ggml_build_forward_expand(graph, loss)
    ggml.ggml_build_backward_expand(ctx, graph, None)
    numbers = ggml.ggml_new_tensor_1d(static, 0, 7)
    for tensor in (t for layer in layers for t in layer):
        grad = ggml.ggml_graph_get_grad(graph, tensor)
        m, v = (ggml.ggml_dup_tensor(static, tensor) for _ in range(2))
        step = ggml.ggml_opt_step_adamw(ctx, tensor, grad, m, v, numbers)
        ggml.ggml_build_forward_expand(graph, step)
    ggml.ggml_backend_alloc_ctx_tensors_from_buft(static, buft)
    allocator = ggml.ggml_gallocr_new(buft)
    if not ggml.ggml_gallocr_reserve(allocator, graph):
        raise SystemExit("ggml_gallocr_reserve failed")
    print(ggml.ggml_gallocr_get_buffer_size(allocator, 0))


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
