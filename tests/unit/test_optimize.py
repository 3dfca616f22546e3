"""Training: steps beside NumPy's, accumulation, checkpoints, callbacks, and several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ggmlb
from ggmlb import ArgumentError, Context, FreedError, Graph, ModelError, Scheduler, ShapeError, Tensor
from ggmlb.optimize import (
    SGD,
    AdamW,
    Dataset,
    LossType,
    OptContext,
    Progress,
    Result,
    checkpoint,
    fit,
    progress_bar,
)

rng = np.random.default_rng(3)
X = rng.standard_normal((48, 6), np.float32)
Y = (X @ rng.standard_normal((6, 3), np.float32)).astype(np.float32)
CLASSES = Y.argmax(axis=1).astype(np.int32)
W = rng.standard_normal((3, 6), np.float32)


class Linear:
    """`w x`, with `w` in a device's memory, computed on some devices."""

    def __init__(self, devices: Sequence[str] = ("CPU",), n_batch: int = 16, home: int = -1) -> None:
        self._stack = ExitStack()
        backends = [self._stack.enter_context(ggmlb.init_by_name(name)) for name in devices]
        weights, self.ctx = Context(), Context()
        self.w = weights.set_param(weights.new_tensor("f32", (6, 3), "w"))
        self._stack.enter_context(ggmlb.alloc_ctx_tensors(weights, backends[home]))
        self.w.set_array(W)
        self.x = self.ctx.set_input(self.ctx.new_tensor("f32", (6, n_batch), "x"))
        self.y = self.ctx.mul_mat(self.w, self.x)
        self.scheduler = self._stack.enter_context(Scheduler(backends, keep_graphs=True))

    def opt(self, loss: Any, *args: Any, **options: Any) -> OptContext:
        return self._stack.enter_context(OptContext(self.scheduler, self.x, self.y, loss, *args, **options))

    def free(self) -> None:
        self._stack.close()


@pytest.fixture
def linear() -> Iterator[Linear]:
    made = Linear()
    yield made
    made.free()


def slope(w: Any, x: Any, y: Any) -> Any:
    """The gradient of the mean square."""
    return 2 * (x @ w.T - y).T @ x / y.size


def test_sgd_takes_the_steps_of_its_definition(linear: Linear) -> None:
    opt = linear.opt("mean_squared_error", SGD(0.05, wd=0.1))
    result = Result()
    opt.epoch(Dataset(X, labels=Y), result)
    w, losses = W.astype("f8"), []
    for i in range(3):
        x, y = X[16 * i : 16 * i + 16].astype("f8"), Y[16 * i : 16 * i + 16]
        losses.append(((x @ w.T - y) ** 2).mean())
        w = w * (1 - 0.05 * 0.1) - 0.05 * slope(w, x, y)
    np.testing.assert_allclose(linear.w.to_numpy(), w, rtol=1e-5)
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    assert (result.n_data, opt.iteration, opt.n_batch) == (48, 3, 16)


def test_adamw_takes_the_steps_of_its_definition_by_a_schedule(linear: Linear) -> None:
    opt = linear.opt("mean_squared_error", lambda opt: AdamW(0.1 / (opt.iteration + 1), wd=0.01))
    for _ in range(2):
        opt.epoch(Dataset(X, labels=Y))
    w, m, v = W.astype("f8"), np.zeros((3, 6)), np.zeros((3, 6))
    for t in range(1, 7):
        i = 16 * ((t - 1) % 3)
        g = slope(w, X[i : i + 16].astype("f8"), Y[i : i + 16])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        mean, root = m / (1 - 0.9**t), np.sqrt(v / (1 - 0.999**t))
        w = w * (1 - 0.1 / t * 0.01) - 0.1 / t * mean / (root + 1e-8)
    np.testing.assert_allclose(linear.w.to_numpy(), w, rtol=1e-4)
    assert opt.optimizer == AdamW(0.1 / 6, wd=0.01)


def test_accumulated_batches_are_as_a_large_one(linear: Linear) -> None:
    whole = Linear(n_batch=48)
    whole.opt("mean_squared_error").epoch(Dataset(X, labels=Y))
    opt = linear.opt("mean_squared_error", opt_period=3)
    acc = opt.grad_acc(linear.w)
    assert acc is not None
    result, seen = Result(), []
    for _ in range(2):  # the second time, w is changed: what was added up is gone
        linear.w.set_array(W)
        opt.reset(optimizer=True)
        opt.epoch(
            Dataset(X, labels=Y),
            result,
            callback_train=lambda p: seen.append((p.n_done, acc.to_numpy().any())),
        )
        np.testing.assert_allclose(linear.w.to_numpy(), whole.w.to_numpy(), rtol=1e-4)
    assert seen == [(1, True), (2, True), (3, False)] * 2
    assert opt.iteration == 1
    expected = Result()
    whole.w.set_array(W)
    evaluated = whole.opt("mean_squared_error")
    evaluated.epoch(Dataset(X, labels=Y), None, expected, n_train=0)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    assert evaluated.iteration == 0 and np.array_equal(whole.w.to_numpy(), W)
    whole.free()


def test_a_step_plans_nothing(linear: Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    opt, data = linear.opt("mean_squared_error", opt_period=2), Dataset(X, labels=Y)
    opt.alloc()
    for i in range(8):
        if i == 4:
            monkeypatch.setattr(Scheduler, "split_graph", lambda *_: pytest.fail("planned"))
            monkeypatch.setattr(ggmlb.Backend, "graph_plan_create", lambda *_: pytest.fail("planned"))
        opt.set_batch(*data.get_batch(i % 3, 16))
        opt.eval()
    assert opt.iteration == 4


@pytest.mark.parametrize("as_numbers", [False, True])
def test_classes_are_learned(linear: Linear, as_numbers: bool) -> None:
    labels = CLASSES if as_numbers else np.eye(3, dtype="f4")[CLASSES]
    opt = linear.opt("cross_entropy", AdamW(0.1), class_labels=as_numbers)
    first, *_, last = opt.fit(Dataset(X, labels=labels), n_epochs=12, val_split=1 / 3)
    assert last.train.accuracy > 0.9 > first.train.accuracy
    assert last.eval.n_data == 16 and last.train.loss < first.train.loss / 3
    measured = Result()
    opt.epoch(Dataset(X, labels=labels), None, measured, n_train=0)
    logits = X.astype("f8") @ linear.w.to_numpy().T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(measured.loss, -np.log(shares[np.arange(48), CLASSES]).mean(), rtol=1e-4)
    assert np.array_equal(measured.pred, logits.argmax(axis=1))
    assert measured.n_correct == (logits.argmax(axis=1) == CLASSES).sum()
    assert 0 < measured.accuracy_uncertainty < 0.1


@pytest.mark.parametrize("end", ["gguf", "safetensors"])
@pytest.mark.parametrize("opt_period", [1, 2])
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, end: str, opt_period: int) -> None:
    path, data = tmp_path / f"state.{end}", Dataset(X, labels=Y)

    def train(opt: OptContext, epochs: range, save_after: int = -1) -> None:
        for epoch in epochs:
            data.shuffle(opt.rng)
            opt.epoch(data)
            if epoch == save_after:
                opt.save(path)

    straight, resumed = Linear(), Linear()
    train(straight.opt("mean_squared_error", AdamW(0.1), opt_period=opt_period, seed=8), range(5), 2)
    resumed.w.set_array(np.zeros_like(W))
    opt = resumed.opt("mean_squared_error", AdamW(0.1), opt_period=opt_period)
    opt.load(path)
    assert opt.iteration == 9 // opt_period
    train(opt, range(3, 5))
    assert np.array_equal(resumed.w.to_numpy(), straight.w.to_numpy())
    with pytest.raises(ModelError, match="of the optimizer AdamW, not of SGD"):
        resumed.opt("mean_squared_error", SGD()).load(path)
    straight.free()
    resumed.free()


def test_files_that_are_no_checkpoints(linear: Linear, tmp_path: Path) -> None:
    opt = linear.opt("sum")
    with pytest.raises(ArgumentError, match=r"ends in \.safetensors or \.gguf"):
        opt.save(tmp_path / "state.pt")
    ggmlb.save_gguf(tmp_path / "other.gguf", {}, {"w": W})
    with pytest.raises(ModelError, match="is no checkpoint"):
        opt.load(tmp_path / "other.gguf")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10")
    with pytest.raises(ModelError, match="cannot write"):
        opt.save(tmp_path / "no folder" / "state.safetensors")
    for name in ("cut.safetensors", "missing.safetensors"):
        with pytest.raises(ModelError, match="cannot read"):
            opt.load(tmp_path / name)
    opt.save(tmp_path / "state.gguf")
    linear.w.name = "renamed"
    with pytest.raises(ModelError, match="'renamed' is missing"):
        linear.opt("sum").load(tmp_path / "state.gguf")


@pytest.mark.parametrize("end", ["gguf", "safetensors"])
def test_a_checkpoint_is_taken_whole_or_not_at_all(linear: Linear, tmp_path: Path, end: str) -> None:
    path, data = tmp_path / f"state.{end}", Dataset(X, labels=Y)
    opt = linear.opt("mean_squared_error", AdamW(0.1), opt_period=2)
    opt.epoch(data)
    opt.save(path)
    names = list(opt._state_tensors())
    state, arrays = checkpoint.read(path, "AdamW", {n: t.shape for n, t in opt._state_tensors().items()})
    opt.epoch(data)
    before = {name: tensor.to_numpy() for name, tensor in opt._state_tensors().items()}
    facts = opt.iteration, opt.rng.bit_generator.state
    rng = state["rng"]
    wrong_states = [
        {key: value}
        for key in ("iteration", "n_accumulated")
        for value in (None, -5, np.nan, "x", 0.5, True, 10**400, [1])
    ] + [
        {"n_accumulated": 2},
        *({"rng": value} for value in (None, {}, "x", rng | {"state": {"state": -1, "inc": 1}})),
        {"rng": rng | {"bit_generator": "MT19937"}},
        {"rng": rng | {"state": {"state": "x", "inc": []}, "has_uint32": None}},
    ]
    wrong_arrays = [{names[-1]: arrays[names[-1]].astype(kind)} for kind in ("f2", "f8", "i4")] + [
        {names[-1]: arrays[names[-1]][:-1]}
    ]
    files = [(state | wrong, arrays) for wrong in wrong_states] + [(state, arrays | a) for a in wrong_arrays]
    files += [({k: v for k, v in state.items() if k != key}, arrays) for key in state]
    files += [(state, {k: v for k, v in arrays.items() if k != name}) for name in names]
    for given in files:
        checkpoint.write(path, *given)
        with pytest.raises(ModelError):
            opt.load(path)
    deep = "[" * 100_000
    if end == "gguf":
        ggmlb.save_gguf(path, {checkpoint.KEY: deep}, arrays)
    else:
        save_file(dict(arrays), path, {checkpoint.KEY: deep})
    with pytest.raises(ModelError, match="is no checkpoint"):
        opt.load(path)
    for name, tensor in opt._state_tensors().items():
        assert np.array_equal(tensor.to_numpy(), before[name])
    assert facts == (opt.iteration, opt.rng.bit_generator.state)


def test_callbacks_are_told_and_may_stop(linear: Linear, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[bool, int, int]] = []

    def callback(p: Progress) -> bool | None:
        progress_bar(p)
        told.append((p.is_training, p.n_done, p.n_batches))
        assert p.remaining >= 0 and len(p.result.losses) == p.n_done
        return False if len(told) == 5 else None

    data = Dataset(X, labels=Y)
    found = fit(
        linear.scheduler, linear.x, linear.y, data, "mean_squared_error",
        n_epochs=3, n_batch_logical=16, val_split=1 / 3, callback=callback,
    )  # fmt: skip
    assert told == [(True, 1, 2), (True, 2, 2), (False, 1, 1), (True, 1, 2), (True, 2, 2)]
    assert len(found) == 2 and np.isnan(found[1].eval.loss)
    lines = capsys.readouterr().err
    assert "train |============            | 1/2  loss " in lines and "eval  |===" in lines


@pytest.mark.parametrize("devices", [("OpenCL0", "CPU"), ("LLVM", "CPU")])
def test_two_devices_train_as_one(devices: tuple[str, str]) -> None:
    """Two layers, the first on one device, the second on the other; each step runs where its parameter is."""
    first, second = (rng.standard_normal((n, 6), np.float32) for n in (6, 3))

    def trained(names: Sequence[str]) -> tuple[list[Any], set[str]]:
        with ExitStack() as stack:
            backends = [stack.enter_context(ggmlb.init_by_name(name)) for name in names]
            layers: list[Tensor] = []
            for backend, values in zip((backends[0], backends[-1]), (first, second), strict=True):
                ctx = Context()
                layers.append(ctx.set_param(ctx.new_tensor("f32", values.shape[::-1])))
                stack.enter_context(ggmlb.alloc_ctx_tensors(ctx, backend))
                layers[-1].set_array(values)
            ctx = Context()
            x = ctx.set_input(ctx.new_tensor("f32", (6, 16)))
            y = ctx.mul_mat(layers[1], ctx.tanh(ctx.mul_mat(layers[0], x)))
            scheduler = stack.enter_context(Scheduler(backends))
            for layer, backend in zip(layers, (backends[0], backends[-1]), strict=True):
                scheduler.set_tensor_backend(layer, backend)
            opt = stack.enter_context(OptContext(scheduler, x, y, "mean_squared_error", AdamW(0.05)))
            opt.fit(Dataset(X, labels=Y), n_epochs=3)
            opt.alloc()
            on = {p.device for p in scheduler.placement if p.op == "OPT_STEP_ADAMW"}
            return [layer.to_numpy() for layer in layers], on

    expected, _ = trained(["CPU"])
    found, on = trained(devices)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
    if devices[0] == "OpenCL0":
        assert on == set(devices)


def test_the_gradient_of_a_parameter_takes_no_memory_after_its_step() -> None:
    """Of a chain of layers, the gradients lie in the same memory, one after the other."""
    n, n_layers = 64, 8
    with ggmlb.init_by_name("CPU") as cpu, Scheduler([cpu]) as scheduler:
        weights, ctx = Context(), Context()
        layers = [weights.set_param(weights.new_tensor("f32", (n, n))) for _ in range(n_layers)]
        x = ctx.set_input(ctx.new_tensor("f32", (n, 1)))
        y = x
        for layer in layers:
            y = ctx.tanh(ctx.mul_mat(layer, y))
        with ggmlb.alloc_ctx_tensors(weights, cpu), OptContext(scheduler, x, y, "mean") as opt:
            opt.alloc()
            assert scheduler.buffer_size(cpu) < 3 * layers[0].nbytes


def test_what_does_not_fit_is_told(linear: Linear) -> None:
    with pytest.raises(ArgumentError, match=r"no loss 'mse'.*mean_squared_error"):
        linear.opt("mse")
    with pytest.raises(ArgumentError, match="class_labels are for a cross entropy, not for MEAN"):
        linear.opt(LossType.MEAN, class_labels=True)
    with pytest.raises(ArgumentError, match="opt_period is 0"):
        linear.opt("mean", opt_period=0)
    with pytest.raises(ArgumentError, match="OptContext: seed is -1; give 0 or more"):
        linear.opt("mean", seed=-1)
    with pytest.raises(ArgumentError, match="beta1 is 1; give a number from 0 to below 1"):
        AdamW(beta1=1)
    with pytest.raises(ArgumentError, match="SGD: alpha is nan"):
        SGD(float("nan"))
    c = Context()
    with pytest.raises(ArgumentError, match="depend on no parameter; mark the weights"):
        OptContext(linear.scheduler, linear.x, c.sqr(linear.x), "mean")
    loose = c.set_param(c.new_tensor("f32", 6, "loose"))
    with pytest.raises(ArgumentError, match=r"'loose' is .*in a buffer: place them"):
        OptContext(linear.scheduler, linear.x, c.mul(linear.x, loose), 0)
    opt = linear.opt("mean_squared_error")
    with pytest.raises(ArgumentError, match=r"1 arrays without labels; give .* the loss needs labels"):
        opt.set_batch([X[:16]])
    with pytest.raises(ArgumentError, match="48 data points, 4 batches of 16 to train with; give more"):
        opt.epoch(Dataset(X, labels=Y), n_train=64)
    with pytest.raises(ArgumentError, match="val_split is 1"):
        opt.fit(Dataset(X, labels=Y), val_split=1)
    with pytest.raises(ArgumentError, match="n_batch_logical is 24; give a multiple of n_batch, 16"):
        fit(linear.scheduler, linear.x, linear.y, Dataset(X, labels=Y), "sum", n_batch_logical=24)
    data, classes = Dataset(X, labels=Y), Dataset(X, labels=CLASSES)
    for given, options, why in (
        (data, {"val_split": 0.9}, "48 data points with val_split 0.9 do not fill a training step of 16"),
        (data, {"n_epochs": -1}, "n_epochs is -1; give 0 or more"),
        (data, {"n_batch": 0}, "n_batch is 0; give 1 or more"),
        (data, {"optimizer": "adamw"}, r"optimizer is 'adamw'; give .* AdamW\(...\)"),
        (data, {"optimizer": lambda _: 0.1}, r"returned 0.1; return AdamW\(...\) or SGD"),
        (X, {}, "dataset is a numpy.ndarray; give a Dataset"),
        (data, {"inputs": []}, "there are no inputs"),
        (
            data,
            {"inputs": c.new_tensor("f32", 6, "other")},
            "'other'.*; give leafs that the outputs",
        ),
        (data, {"outputs": c.argmax(linear.y)}, "outputs are ARGMAX i32.*: cast them"),
        (data, {"outputs": c.round(linear.y)}, "no gradient reaches the parameters"),
        (
            classes,
            {},
            r"labels are int32\[16\]; give each row's probabilities \[16, 3\], or set class",
        ),
        (
            Dataset(X, labels=CLASSES + 1),
            {"class_labels": True},
            "from 1 to 3; .* numbers from 0 to 2",
        ),
        (Dataset(X, labels=CLASSES / 2), {"class_labels": True}, r"float64\[16\]; .* 16 whole numbers"),
    ):
        of = {"inputs": linear.x, "outputs": linear.y, "dataset": given, "loss_type": "cross_entropy"}
        with pytest.raises(ArgumentError, match=why):
            fit(linear.scheduler, **{**of, **options})  # type: ignore[arg-type]
    kinds = iter([SGD(), AdamW()])
    changing = linear.opt("sum", lambda _: next(kinds))
    with pytest.raises(ArgumentError, match=r"returned AdamW\(.* after SGD; always return the same class"):
        changing.epoch(Dataset(X))


def test_a_closed_context_is_told(linear: Linear) -> None:
    opt = linear.opt("sum")
    opt.close()
    with pytest.raises(FreedError, match="it was closed"):
        opt.epoch(Dataset(X))


def test_datasets() -> None:
    data = Dataset(np.arange(10), np.arange(20).reshape(10, 2), labels=-np.arange(10), n_shard=2)
    (first, second), labels = data.get_batch(1, 3)
    assert first.tolist() == [3, 4, 5] and second[0].tolist() == [6, 7] and labels is not None
    assert labels.tolist() == [-3, -4, -5]
    data.shuffle(np.random.default_rng(0), 7)
    order = [int(i) for batch in range(10) for i in data.get_batch(batch, 1)[0][0]]
    assert order[6:] == [6, 7, 8, 9] and sorted(order) == list(range(10)) and order != list(range(10))
    assert all(order[i + 1] == order[i] + 1 for i in (0, 2, 4))
    with pytest.raises(ArgumentError, match="batch 3 of 3; there are 3 of that size"):
        data.get_batch(3, 3)
    with pytest.raises(ArgumentError, match="batch 0 of 0"):
        data.get_batch(0, 0)
    with pytest.raises(ShapeError, match=r"Dataset: .*inhomogeneous"):
        Dataset([[1, 2], [3]])
    with pytest.raises(ArgumentError, match=r"shapes \[2\], \[3\]"):
        Dataset(np.zeros(2), labels=np.zeros(3))
    assert repr(Result()) == "<Result of no batch>" and len(data) == 10


def test_a_graph_that_was_trained_computes_as_before(linear: Linear) -> None:
    opt = linear.opt("mean_squared_error", AdamW(0.1))
    opt.epoch(Dataset(X, labels=Y))
    linear.scheduler.reset()
    graph = Graph().build_forward_expand(linear.ctx.set_output(linear.y))
    linear.scheduler.alloc_graph(graph)
    linear.x.set_array(X[:16])
    linear.scheduler.graph_compute(graph)
    np.testing.assert_allclose(linear.y.to_numpy(), X[:16] @ linear.w.to_numpy().T, rtol=1e-4)
