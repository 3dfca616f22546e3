"""A step of training, by hand.

There is no automatic differentiation yet: the gradient of a linear classifier is written with ggml's `_back`
ops, and `opt_step_adamw` changes the weight in its place, on the device.
"""

import numpy as np

import ggmlb
from ggmlb import Context, Graph, Scheduler

rng = np.random.default_rng(0)
X = rng.standard_normal((60, 8), np.float32)
LABELS = (X @ rng.standard_normal((8, 3))).argmax(axis=1)  # three classes

with (
    ggmlb.init_by_name("OpenCL0") as gpu,
    ggmlb.init_by_name("CPU") as cpu,
    Scheduler([gpu, cpu]) as scheduler,
):
    state = Context()
    w = state.set_param(state.new_tensor("f32", (8, 3), name="w"))
    m, v = (state.new_tensor("f32", (8, 3), name=name) for name in "mv")
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor("f32", (8, 60), name="x"))
    target = ctx.set_input(ctx.new_tensor("f32", (3, 60), name="target"))
    numbers = ctx.set_input(ctx.new_tensor("f32", 7, name="numbers"))
    one = ctx.set_input(ctx.new_tensor("f32", 1, name="one"))

    logits = ctx.mul_mat(w, x)
    loss = ctx.set_output(ctx.cross_entropy_loss(logits, target))
    of_logits = ctx.cross_entropy_loss_back(one, logits, target)
    of_w = ctx.out_prod(x, of_logits)  # the sum over all 60 of x times the logits' gradient
    step = ctx.opt_step_adamw(w, of_w, m, v, numbers)
    graph = Graph().build_forward_expand(loss, step)

    with ggmlb.alloc_ctx_tensors(state, gpu):
        for tensor in (w, m, v):
            tensor.memset(0)
        scheduler.alloc_graph(graph)
        for t in range(1, 41):
            x.set_array(X)
            target.set_array(np.eye(3)[LABELS])
            one.set_array([1])
            numbers.set_array([0.1, 0.9, 0.999, 1e-8, 0, 1 / (1 - 0.9**t), 1 / (1 - 0.999**t)])
            scheduler.graph_compute(graph)
            if t in (1, 10, 40):
                print(f"step {t:2}: loss {loss.to_numpy().item():.2f}")
        right = (X @ w.to_numpy().T).argmax(axis=1) == LABELS
        print("classified right:", right.mean() > 0.9)
