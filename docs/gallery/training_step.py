"""Training a classifier.

The scheduler assigns the gradients and the AdamW steps to devices like other nodes: the weight is updated in
place, on its device.
"""

import numpy as np

import ggmlb
from ggmlb import Context, Scheduler, optimize

rng = np.random.default_rng(0)
X = rng.standard_normal((60, 8), np.float32)
LABELS = (X @ rng.standard_normal((8, 3))).argmax(axis=1)  # three classes

with (
    ggmlb.init_by_name("OpenCL0") as gpu,
    ggmlb.init_by_name("CPU") as cpu,
    Scheduler([gpu, cpu]) as scheduler,
):
    weights = Context()
    w = weights.set_param(weights.new_tensor("f32", (8, 3), name="w"))
    ctx = Context()
    x = ctx.set_input(ctx.new_tensor("f32", (8, 20), name="x"))  # batches of 20
    logits = ctx.mul_mat(w, x)

    with ggmlb.alloc_ctx_tensors(weights, gpu):
        w.memset(0)
        data = optimize.Dataset(X, labels=LABELS)
        with optimize.OptContext(
            scheduler, x, logits, "cross_entropy", optimize.AdamW(0.1), class_labels=True
        ) as opt:
            for number, epoch in enumerate(opt.fit(data, n_epochs=12), 1):
                if number in (1, 4, 12):
                    print(f"epoch {number:2}: loss {epoch.train.loss:.2f}")
        right = (X @ w.to_numpy().T).argmax(axis=1) == LABELS
        print("classified right:", right.mean() > 0.9)
