"""OptContext: the graphs that train and evaluate a model, with optimizer state."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ggmlb import (
    Buffer,
    BufferType,
    Context,
    DType,
    Graph,
    Op,
    Scheduler,
    Status,
    Tensor,
    alloc_ctx_tensors,
    cpu_buffer_type,
)
from ggmlb.core.arguments import alias, generator
from ggmlb.core.errors import ArgumentError, Error, FreedError, ModelError, did_you_mean
from ggmlb.core.lifetime import Closeable, Unique
from ggmlb.optimize.checkpoint import read, write
from ggmlb.optimize.dataset import Dataset
from ggmlb.optimize.optimizers import AdamW, Optimizer
from ggmlb.optimize.result import Callback, Epoch, Progress, Result


class LossType(IntEnum):
    """The loss that training minimises (ggml_opt_loss_type).

    Attributes:
        MEAN: The mean of the outputs, which may be any loss.
        SUM: The sum of the outputs.
        CROSS_ENTROPY: The cross entropy of logits with labels, the mean over rows.
        MEAN_SQUARED_ERROR: The mean square of the differences from labels.
    """

    MEAN = 0
    SUM = 1
    CROSS_ENTROPY = 2
    MEAN_SQUARED_ERROR = 3

    @classmethod
    def parse(cls, given: LossType | int | str) -> LossType:
        """Return the loss type with a number, or with a name in upper or lower case.

        Raises:
            ArgumentError: There is no such loss.
        """
        if isinstance(given, str) and given.upper() in cls.__members__:
            return cls[given.upper()]
        if isinstance(given, int) and given in list(cls):
            return cls(given)
        names = [name.lower() for name in cls.__members__]
        hint = did_you_mean(given, names) if isinstance(given, str) else ""
        raise ArgumentError(f"there is no loss {given!r}{hint or '; there are ' + ', '.join(names)}")


Schedule = Callable[["OptContext"], Optimizer]
"""Returns the hyperparameters of the next step (ggml_opt_get_optimizer_params); always of one optimizer."""
alias("Schedule", "Callable")


class OptContext(Unique, Closeable):
    """Trains the parameters of a graph (ggml_opt_context); a context manager, which frees its memory.

    Parameters are the tensors under `outputs` that `set_param` marks: f32, and placed in a buffer. Moments
    and accumulated gradients are in memory of the same type, so that the scheduler runs each parameter's step
    on the parameter's device. The graphs are built once. Without accumulation, the step of a parameter comes
    right after the last node that reads it, so that the memory of its gradient is reused.

    Args:
        scheduler: Computes the graphs. With accumulation, two graphs alternate: `keep_graphs=True` keeps both
            planned.
        inputs: Leafs for a batch of data, with the data points of a batch one after the other.
        outputs: The operand of the loss, such as logits.
        loss_type: A `LossType`, or its name.
        optimizer: Hyperparameters, or a function that returns those of each step.
        opt_period: Batches per optimizer step, whose gradients are accumulated.
        class_labels: Whether labels are class indices (integers), as PyTorch's `cross_entropy` takes them,
            instead of probabilities.
        n_batch: Data points of a batch; by default the first input's outermost extent above 1.
        seed: Seed of the order of the data.

    Attributes:
        inputs: As given.
        outputs: As given.
        loss: Output: the loss of a batch, a scalar; of `opt_period` batches, divided by that number.
        labels: Input: labels of a batch; `None` if the loss needs none.
        pred: Output: the index of the largest element of each row of outputs, i32; `None` without a cross
            entropy.
        n_correct: Output: the number of correct predictions, i64; `None` likewise.
        params: The parameters by name; `param_0` and so on without a unique name.
        optimizer: Hyperparameters of the last step, or of the first.
        iteration: Number of steps so far.
        n_batch: As given.
        rng: Shuffles data.

    Raises:
        ArgumentError: No parameter, one that is not placed or not f32, or an argument out of range.
        GraphError: An op has no gradient.
        AllocationError: A device lacks room.

    Source: ggml_opt_init.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        inputs: Tensor | Sequence[Tensor],
        outputs: Tensor,
        loss_type: LossType | int | str,
        optimizer: Optimizer | Schedule = AdamW(),  # noqa: B008 - frozen
        *,
        opt_period: int = 1,
        class_labels: bool = False,
        n_batch: int | None = None,
        seed: int = 0,
    ) -> None:
        if opt_period < 1:
            raise ArgumentError(f"OptContext: opt_period is {opt_period}; give 1 or more")
        self.inputs = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        self.outputs = outputs
        self.opt_period = opt_period
        self.n_batch = batch_size(inputs, n_batch)
        self.rng = generator(seed, "OptContext")
        self.iteration = 0
        self._n_accumulated = 0
        self._scheduler = scheduler
        self._schedule = optimizer if callable(optimizer) else None
        self._ctx = Context()
        self._class_labels = class_labels
        self._stepping: Graph | None = None
        self.labels: Tensor | None = None
        self.pred: Tensor | None = None
        self.n_correct: Tensor | None = None
        self.loss = self._ctx.set_output(self._build_loss(LossType.parse(loss_type)))
        self._forward = Graph().build_forward_expand(self.outputs, self.loss, *self._measured())
        self.params = _named(t for t in self._forward.nodes if t.op is Op.NONE)
        self._check_leafs()
        self.optimizer: Optimizer = self._scheduled() if callable(optimizer) else optimizer
        self._buffers: list[Buffer] = []
        try:
            self._build_steps(self.optimizer)
        except BaseException:
            self.close()
            raise
        self.reset(optimizer=True)
        self._graph = self._forward

    # -- graphs --------------------------------------------------------------------------------

    def _build_loss(self, loss_type: LossType) -> Tensor:
        ctx, y = self._ctx, self.outputs
        if y.dtype is not DType.F32:
            raise ArgumentError(
                f"OptContext: the outputs are {y.describe()}; a loss is made of f32: cast them"
            )
        if self._class_labels and loss_type is not LossType.CROSS_ENTROPY:
            raise ArgumentError(f"OptContext: class_labels are for a cross entropy, not for {loss_type.name}")
        if loss_type is LossType.SUM:
            return ctx.sum(y)
        if loss_type is LossType.MEAN:
            return ctx.scale(ctx.sum(y), 1 / (self.opt_period * y.n_elements))
        if loss_type is LossType.MEAN_SQUARED_ERROR:
            self.labels = ctx.set_input(ctx.new_tensor(DType.F32, y.ne, "labels"))
            squares = ctx.sum(ctx.sqr(ctx.sub(y, self.labels)))
            return ctx.scale(squares, 1 / (self.opt_period * y.n_elements))
        rows = ctx.reshape_2d(y, y.ne[0], y.n_rows)
        self.pred = ctx.set_output(ctx.argmax(rows))
        if self._class_labels:
            self.labels = ctx.set_input(ctx.new_tensor(DType.I32, (y.n_rows,), "labels"))
            target, chosen = _one_hot(ctx, rows, self.labels), self.labels
        else:
            self.labels = ctx.set_input(ctx.new_tensor(DType.F32, y.ne, "labels"))
            target = ctx.reshape_2d(self.labels, *rows.ne[:2])
            chosen = ctx.argmax(target)
        self.n_correct = ctx.set_output(ctx.count_equal(self.pred, chosen))
        loss = ctx.cross_entropy_loss(rows, target)
        return loss if self.opt_period == 1 else ctx.scale(loss, 1 / self.opt_period)

    def _measured(self) -> list[Tensor]:
        return [t for t in (self.pred, self.n_correct) if t is not None]

    def _check_leafs(self) -> None:
        for i, tensor in enumerate(self.inputs):
            if not any(leaf is tensor for leaf in self._forward.leafs):
                raise ArgumentError(
                    f"OptContext: inputs[{i}] is {tensor.describe()}; give leafs that the outputs depend on"
                )
        if not self.params:
            raise ArgumentError(
                "OptContext: the outputs depend on no parameter; mark the weights to train by set_param"
            )
        for name, param in self.params.items():
            if param.buffer is None or param.dtype is not DType.F32 or not param.is_contiguous():
                raise ArgumentError(
                    f"OptContext: parameter {name!r} is {param.describe()}; parameters are contiguous f32 "
                    "tensors in a buffer: place them by alloc_ctx_tensors"
                )

    def _build_steps(self, optimizer: Optimizer) -> None:
        """Build the training graphs, with moments and accumulators in memory."""
        ctx, params = self._ctx, list(self.params.values())
        beside: dict[BufferType, Context] = {}

        def like(param: Tensor) -> Tensor:
            return beside.setdefault(param.placed("OptContext").buft, Context()).new_tensor(
                DType.F32, param.ne
            )

        self._moments = {p: [like(p) for _ in range(optimizer.n_moments)] for p in params}
        accs = {p: like(p) for p in params} if self.opt_period > 1 else {}
        host = beside.setdefault(cpu_buffer_type(), Context())
        self._numbers = host.new_tensor(DType.F32, (optimizer.n_numbers,))
        one = host.new_tensor(DType.F32, self.loss.ne, "grad for loss")
        ctx.set_loss(self.loss)
        graph = Graph().build_forward_expand(self.outputs, self.loss, *self._measured())
        graph.build_backward_expand(ctx, {self.loss: one, **accs})
        self._gradients = graph
        grads = {p: accs.get(p, g) for p in params if (g := graph.grad(p)) is not None}
        if not grads:
            raise ArgumentError(
                "OptContext: no gradient reaches the parameters: each path has an op without gradient"
            )
        steps = {p: optimizer.step(ctx, p, g, self._moments[p], self._numbers) for p, g in grads.items()}
        if accs:
            self._training = graph
            self._stepping = Graph().build_forward_expand(*steps.values())
        else:
            self._training = _with_steps(graph, steps, self._numbers)
        for buft, made in beside.items():
            self._buffers.append(alloc_ctx_tensors(made, buft))

    # -- steps ---------------------------------------------------------------------------------

    @property
    def graph(self) -> Graph:
        """The training or forward graph, whichever `alloc` placed last."""
        return self._graph

    @property
    def training_graph(self) -> Graph:
        """The graph of forward and backward pass, with optimizer steps if `opt_period` is 1."""
        return self._training

    def grad_acc(self, param: Tensor) -> Tensor | None:
        """Return a parameter's gradient accumulator; `None` if `opt_period` is 1 (ggml_opt_grad_acc)."""
        return self._gradients.grad_acc(param)

    def reset(self, optimizer: bool = False) -> None:
        """Set accumulated gradients to 0, and if `optimizer` is true, the optimizer's moments and step count.

        Source: ggml_opt_reset.
        """
        self._gradients.reset()
        self._n_accumulated = 0
        if optimizer:
            self.iteration = 0
            for moment in (m for found in self._moments.values() for m in found):
                moment.memset(0)

    def alloc(self, backward: bool = True) -> None:
        """Allocate the training graph (forward graph if not `backward`); set inputs next (ggml_opt_alloc).

        Raises:
            AllocationError: A device lacks room.
            UnsupportedOpError: No device runs a node.
            FreedError: It was closed.
        """
        if not self._buffers:
            raise FreedError("OptContext.alloc: it was closed; make another")
        self._graph = self._training if backward else self._forward
        self._scheduler.alloc_graph(self._graph)

    def set_batch(self, data: Sequence[npt.ArrayLike], labels: npt.ArrayLike | None = None) -> None:
        """Write a batch's `data` and `labels` into the inputs; arrays fit by shape or number of elements.

        Raises:
            ShapeError: An array does not fit.
            ArgumentError: There are not as many arrays as inputs, or the loss needs labels.
        """
        if len(data) != len(self.inputs) or (labels is None) != (self.labels is None):
            need = "no labels" if self.labels is None else "labels"
            raise ArgumentError(
                f"set_batch: {len(data)} arrays {'without' if labels is None else 'with'} labels; give "
                f"{len(self.inputs)} arrays, one per input; the loss needs {need}"
            )
        for tensor, array in zip(self.inputs, data, strict=True):
            _fill(tensor, array)
        if self.labels is not None and labels is not None:
            _fill(self.labels, self._checked(np.asarray(labels)))

    def _checked(self, labels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Check and return labels."""
        n, n_rows = self.outputs.ne[0], self.outputs.n_rows
        are_numbers = labels.dtype.kind in "iu" and labels.size == n_rows
        if self._class_labels and not (are_numbers and labels.min() >= 0 and labels.max() < n):
            found = f", from {labels.min()} to {labels.max()}" if are_numbers else ""
            raise ArgumentError(
                f"set_batch: labels are {labels.dtype}{list(labels.shape)}{found}; with class_labels give "
                f"{n_rows} whole numbers from 0 to {n - 1}, one for each row of the outputs"
            )
        if self.pred is not None and not self._class_labels and n > 1 and are_numbers:
            raise ArgumentError(
                f"set_batch: labels are {labels.dtype}{list(labels.shape)}; give each row's probabilities "
                f"{list(self.outputs.shape)}, or set class_labels for numbers of classes"
            )
        return labels

    def eval(self, result: Result | None = None) -> None:
        """Compute the placed graph; when training, step after each `opt_period` batches (ggml_opt_eval).

        Args:
            result: Loss and predictions are added to it.

        Raises:
            Error: The computation failed, or was stopped by a callback.
        """
        is_training = self._graph is self._training
        if is_training and self._stepping is None:
            self._write_numbers()
        self._compute(self._graph)
        if result is not None:
            loss = self.loss.to_numpy().item() * self.opt_period
            if self.pred is not None and self.n_correct is not None:
                result.add(loss, self.n_batch, self.pred.to_numpy(), self.n_correct.to_numpy().item())
            else:
                result.add(loss, self.n_batch)
        if not is_training:
            return
        self._n_accumulated += 1
        if self._n_accumulated == self.opt_period:
            if self._stepping is not None:
                self._write_numbers()
                self._scheduler.alloc_graph(self._stepping)
                self._compute(self._stepping)
            self.iteration += 1
            self._n_accumulated = 0
            if self._stepping is not None:
                self._gradients.reset()
                self._scheduler.alloc_graph(self._graph)

    def _compute(self, graph: Graph) -> None:
        if self._scheduler.graph_compute(graph) is not Status.SUCCESS:
            raise Error("OptContext.eval: a callback stopped the computation; parameters may be half changed")

    def _write_numbers(self) -> None:
        if self._schedule is not None:
            made = self._scheduled()
            if type(made) is not type(self.optimizer):
                raise ArgumentError(
                    f"OptContext: the schedule returned {made!r} after "
                    f"{type(self.optimizer).__name__}; always return the same class"
                )
            self.optimizer = made
        self._numbers.set_array(self.optimizer.numbers(self.iteration + 1))

    def _scheduled(self) -> Optimizer:
        made = self._schedule(self) if self._schedule is not None else None
        if not isinstance(made, Optimizer):
            raise ArgumentError(f"OptContext: the schedule returned {made!r}; return AdamW(...) or SGD(...)")
        return made

    # -- epochs --------------------------------------------------------------------------------

    def epoch(
        self,
        dataset: Dataset,
        result_train: Result | None = None,
        result_eval: Result | None = None,
        n_train: int | None = None,
        callback_train: Callback | None = None,
        callback_eval: Callback | None = None,
    ) -> bool:
        """Train with the first `n_train` data points, and evaluate the others (ggml_opt_epoch).

        Data points that do not fill a batch are left out.

        Args:
            dataset: As many arrays as there are inputs.
            result_train: Losses of training are added to it.
            result_eval: Losses of evaluation are added to it.
            n_train: Data points to train with; all by default.
            callback_train: Called after each batch of training.
            callback_eval: Called after each batch of evaluation.

        Returns:
            Whether the epoch ended; false if a callback returned `False`.
        """
        n_first = (len(dataset) if n_train is None else n_train) // self.n_batch
        n_all = len(dataset) // self.n_batch
        if n_all == 0 or n_first > n_all:
            raise ArgumentError(
                f"epoch: {len(dataset)} data points, {n_first} batches of {self.n_batch} to train with; give "
                "more"
            )
        parts = (
            (True, range(n_first), result_train, callback_train),
            (False, range(n_first, n_all), result_eval, callback_eval),
        )
        for is_training, batches, given, callback in parts:
            result, start = given if given is not None else Result(), perf_counter()
            if batches:
                self.alloc(backward=is_training)
            for n_done, batch in enumerate(batches, 1):
                self.set_batch(*dataset.get_batch(batch, self.n_batch))
                self.eval(result)
                if callback is not None:
                    progress = Progress(is_training, self, dataset, result, n_done, len(batches), start)
                    if callback(progress) is False:
                        return False
        return True

    def fit(
        self,
        dataset: Dataset,
        n_epochs: int = 1,
        val_split: float = 0.0,
        callback: Callback | None = None,
    ) -> list[Epoch]:
        """Train with a data set, shuffled before each epoch; the fraction `val_split` of it only validates.

        Args:
            dataset: Data and labels.
            n_epochs: Number of passes over the data.
            val_split: Fraction of the data points, the last ones, for validation; from 0 to below 1.
            callback: Called after each batch; `False` ends the training.

        Returns:
            Results of each epoch.
        """
        if not 0 <= val_split < 1:
            raise ArgumentError(f"fit: val_split is {val_split}; give a share from 0 to below 1")
        if n_epochs < 0:
            raise ArgumentError(f"fit: n_epochs is {n_epochs}; give 0 or more")
        logical = self.n_batch * self.opt_period
        n_train = int(len(dataset) * (1 - val_split)) // logical * logical
        if n_train == 0:
            raise ArgumentError(
                f"fit: {len(dataset)} data points with val_split {val_split} do not fill a training step "
                f"of {logical}; give more"
            )
        found: list[Epoch] = []
        for _ in range(n_epochs):
            dataset.shuffle(self.rng, n_train)
            found.append(Epoch(Result(), Result()))
            if not self.epoch(dataset, *found[-1], n_train, callback, callback):
                break
        return found

    # -- checkpoints ---------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save parameters and optimizer state, as `.safetensors` or `.gguf`.

        Training resumed by `load` gives the same bits as uninterrupted training.

        Raises:
            ArgumentError: The name has another suffix.
            ModelError: The file cannot be written.
        """
        state = {
            "iteration": self.iteration,
            "n_accumulated": self._n_accumulated,
            "optimizer": type(self.optimizer).__name__,
            "rng": self.rng.bit_generator.state,
        }
        write(path, state, {name: tensor.to_numpy() for name, tensor in self._state_tensors().items()})

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load parameters and optimizer state from a checkpoint of `save`.

        Raises:
            ModelError: The file is missing or damaged, or of another model or optimizer; nothing is changed.
        """
        tensors = self._state_tensors()
        expected = {name: tensor.shape for name, tensor in tensors.items()}
        state, arrays = read(path, type(self.optimizer).__name__, expected)
        counts = {"iteration": 1 << 53, "n_accumulated": self.opt_period - 1}
        for name, most in counts.items():
            n = state.get(name)
            if type(n) is not int or not 0 <= n <= most:
                raise ModelError(f"{path}: {name} is {n!r}; a whole number of 0 to {most} is expected")
        rng = np.random.default_rng()
        try:
            rng.bit_generator.state = state["rng"]
        except (TypeError, ValueError, KeyError, OverflowError, AttributeError) as error:
            raise ModelError(f"{path}: rng is no state of NumPy's PCG64: {error!r}") from None
        for name, tensor in tensors.items():
            tensor.set_array(arrays[name])
        self.iteration, self._n_accumulated = state["iteration"], state["n_accumulated"]
        self.rng.bit_generator.state = rng.bit_generator.state

    def _state_tensors(self) -> Mapping[str, Tensor]:
        found = dict(self.params)
        for name, param in self.params.items():
            found |= {f"{name}.moment{i}": m for i, m in enumerate(self._moments[param], 1)}
            if (acc := self.grad_acc(param)) is not None:
                found[f"{name}.gradient"] = acc
        return found

    def close(self) -> None:
        """Free the memory of moments and gradient accumulators; the parameters stay."""
        for buffer in self._buffers:
            buffer.free()
        self._buffers.clear()

    def __repr__(self) -> str:
        n = sum(param.n_elements for param in self.params.values())
        return f"<OptContext of {len(self.params)} parameters, {n:,} elements: {self.optimizer}>"


def batch_size(inputs: Tensor | Sequence[Tensor], n_batch: int | None) -> int:
    """Return `n_batch`, or if it is `None` the first input's last extent (`ne`) that is above 1."""
    if not isinstance(inputs, Tensor) and not inputs:
        raise ArgumentError("OptContext: there are no inputs; give one or more")
    first = inputs if isinstance(inputs, Tensor) else inputs[0]
    n = first.ne[first.n_dims - 1] if n_batch is None else n_batch
    if n < 1:
        raise ArgumentError(f"OptContext: n_batch is {n}; give 1 or more")
    return n


def _named(params: Iterable[Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i, param in enumerate(params):
        found[param.name if param.name and param.name not in found else f"param_{i}"] = param
    return found


def _one_hot(ctx: Context, logits: Tensor, labels: Tensor) -> Tensor:
    """Return rows of 0 with 1 at the index of each row's class."""
    n, n_rows = logits.ne[:2]
    zeros = ctx.reshape_3d(ctx.fill(logits, 0.0), 1, n, n_rows)
    ones = ctx.fill(ctx.cast(ctx.reshape_3d(labels, 1, 1, n_rows), DType.F32), 1.0)
    return ctx.reshape_2d(ctx.set_rows(zeros, ones, ctx.reshape_2d(labels, 1, n_rows)), n, n_rows)


def _with_steps(graph: Graph, steps: Mapping[Tensor, Tensor], numbers: Tensor) -> Graph:
    """Return a graph with the step of each parameter right after the last node that reads the parameter."""
    by_grad: dict[Tensor, list[Tensor]] = {}
    for param, step in steps.items():
        by_grad.setdefault(step.operand(1), []).append(param)
    last: dict[Tensor, int] = {}
    for i, node in enumerate(graph.nodes):
        last |= dict.fromkeys(by_grad.get(node, ()), i)
        roots = (source.view_src or source for source in node.sources)
        last |= dict.fromkeys((root for root in roots if root in steps), i)
    after: dict[int, list[Tensor]] = {}
    for param, i in last.items():
        after.setdefault(i, []).append(steps[param])
    nodes = [n for i, node in enumerate(graph.nodes) for n in (node, *after.get(i, ()))]
    leafs = dict.fromkeys([*graph.leafs, numbers, *(s for step in steps.values() for s in step.src[2:])])
    return Graph(nodes, [leaf for leaf in leafs if leaf is not None])


def _fill(tensor: Tensor, array: npt.ArrayLike) -> None:
    values = np.asarray(array)
    tensor.set_array(values.reshape(tensor.shape) if values.size == tensor.n_elements else values)
