"""Training (ggml-opt's counterpart): losses, optimizers and epochs over data sets.

    from ggmlb import optimize

    with optimize.OptContext(scheduler, x, logits, "cross_entropy", optimize.AdamW(1e-3)) as opt:
        opt.epoch(optimize.Dataset(images, digits))

The scheduler splits forward pass, backward pass and optimizer over its devices, as it splits any graph;
graphs are planned once. `fit` trains in one call.
"""

from ggmlb.optimize.context import LossType, OptContext, Schedule
from ggmlb.optimize.dataset import Dataset
from ggmlb.optimize.fit import fit
from ggmlb.optimize.optimizers import SGD, AdamW, Optimizer
from ggmlb.optimize.result import Callback, Epoch, Progress, Result, progress_bar

__all__ = [
    "SGD",
    "AdamW",
    "Callback",
    "Dataset",
    "Epoch",
    "LossType",
    "OptContext",
    "Optimizer",
    "Progress",
    "Result",
    "Schedule",
    "fit",
    "progress_bar",
]
