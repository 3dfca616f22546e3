"""ONNX models: ONNX's own tests, values beside its reference, placement, and files that are wrong."""

from __future__ import annotations

import gc
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs onnx: pip install 'ggmlb[onnx]'")

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import ggmlb
import ggmlb.models
from ggmlb.core.errors import ArgumentError, Error, FreedError, ModelError, UnsupportedOpError
from ggmlb.models.onnx import OnnxModel
from scripts.onnx_counts import BEGIN, END, PAGE, table

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
X: dict[str, tuple[int, list[Any] | None]] = {"x": (FLOAT, [2])}
RNG = np.random.default_rng(7)


def weights(**arrays: Any) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(a), name) for name, a in arrays.items()]


def model(
    nodes: list[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any] | None]],
    outputs: list[str],
    constants: list[onnx.TensorProto] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    told = [helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    results = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "test", told, results, constants or [])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def block(width: int = 64) -> onnx.ModelProto:
    """An encoder's block as exporters write it: attention with a mask, layer norm and GELU in parts."""
    n = helper.make_node
    nodes = [
        n("Gather", ["table", "ids"], ["x"]),
        n("Unsqueeze", ["mask", "axes12"], ["m4"]),
        n("Cast", ["m4"], ["mf"], to=FLOAT),
        n("Sub", ["one", "mf"], ["hole"]),
        n("Mul", ["hole", "low"], ["bias"]),
    ]
    for part in "qkv":
        perm = [0, 2, 3, 1] if part == "k" else [0, 2, 1, 3]
        nodes += [
            n("MatMul", ["x", f"w{part}"], [f"{part}0"]),
            n("Reshape", [f"{part}0", "heads"], [f"{part}1"]),
            n("Transpose", [f"{part}1"], [part], perm=perm),
        ]
    nodes += [
        n("MatMul", ["q", "k"], ["s0"]),
        n("Div", ["s0", "root"], ["s1"]),
        n("Add", ["s1", "bias"], ["s2"]),
        n("Softmax", ["s2"], ["p"], axis=-1),
        n("MatMul", ["p", "v"], ["a0"]),
        n("Transpose", ["a0"], ["a1"], perm=[0, 2, 1, 3]),
        n("Reshape", ["a1", "flat"], ["a2"]),
        n("Add", ["a2", "x"], ["r"]),
        n("ReduceMean", ["r"], ["mean"], axes=[-1]),
        n("Sub", ["r", "mean"], ["c"]),
        n("Pow", ["c", "two"], ["c2"]),
        n("ReduceMean", ["c2"], ["var"], axes=[-1]),
        n("Add", ["var", "eps"], ["ve"]),
        n("Sqrt", ["ve"], ["sd"]),
        n("Div", ["c", "sd"], ["n0"]),
        n("Mul", ["n0", "gain"], ["n1"]),
        n("Div", ["n1", "sqrt2"], ["g0"]),
        n("Erf", ["g0"], ["g1"]),
        n("Add", ["g1", "one"], ["g2"]),
        n("Mul", ["n1", "g2"], ["g3"]),
        n("Mul", ["g3", "half"], ["y"]),
    ]
    matrices = {f"w{p}": RNG.standard_normal((width, width)).astype("f") / 8 for p in "qkv"}
    numbers = {
        "one": 1.0,
        "low": -10000.0,
        "root": 4.0,
        "two": 2.0,
        "eps": 1e-5,
        "sqrt2": 2**0.5,
        "half": 0.5,
    }
    constants = weights(
        table=RNG.standard_normal((50, width)).astype("f"), gain=RNG.standard_normal(width).astype("f"),
        axes12=np.array([1, 2]), heads=np.array([0, 0, 4, width // 4]), flat=np.array([0, 0, width]),
        **matrices, **{name: np.float32(v) for name, v in numbers.items()},
    )  # fmt: skip
    inputs = {"ids": (INT64, ["b", "s"]), "mask": (INT64, ["b", "s"])}
    return model(nodes, inputs, ["y"], constants)


def feeds(b: int, s: int) -> dict[str, np.ndarray[Any, Any]]:
    mask = np.ones((b, s), np.int64)
    mask[-1, s // 2 :] = 0
    return {"ids": RNG.integers(-50, 50, (b, s)), "mask": mask}


def available(*names: str) -> list[str]:
    known = {device.name for device in ggmlb.devices()}
    if not {*names} <= known:
        pytest.skip(f"needs {', '.join(names)}")
    return [*names]


# -- the judge ----------------------------------------------------------------------------------


def test_onnx_own_tests_pass_or_are_refused_and_the_page_has_their_numbers() -> None:
    text, failures = table(["CPU"])
    assert not failures
    passed = int(text.split("Ops with passed node tests: ")[1].split(".")[0])
    assert passed >= 100
    told = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    if f"onnx {onnx.__version__}." in told:
        assert told == text


@pytest.mark.slow
@pytest.mark.parametrize("device", ["LLVM", "OpenCL0"])
def test_onnx_own_tests_on_other_devices(device: str) -> None:
    assert not table([*available(device), "CPU"])[1]


def test_the_adapter_is_onnx_backend() -> None:
    from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

    from ggmlb.models.onnx.backend import OnnxBackend

    proto = model([helper.make_node("Relu", ["x"], ["y"])], {"x": (FLOAT, [2])}, ["y"])
    (found,) = OnnxBackend.run_model(proto, [np.array([-1, 2], np.float32)])
    assert found.tolist() == [0, 2]
    assert OnnxBackend.supports_device("CPU") and not OnnxBackend.supports_device("CUDA")
    proto = model([helper.make_node("Det", ["x"], ["y"])], {"x": (FLOAT, [2, 2])}, ["y"])
    with pytest.raises(BackendIsNotSupposedToImplementIt, match="Det"):
        OnnxBackend.prepare(proto)


# -- values and placement -----------------------------------------------------------------------


@pytest.mark.parametrize("devices", [["CPU"], ["LLVM", "CPU"], ["OpenCL0", "CPU"]])
def test_a_block_computes_what_the_reference_does(devices: list[str]) -> None:
    proto = block()
    with OnnxModel(proto, devices=available(*devices)) as ours:
        for b, s in ((2, 7), (1, 3), (2, 7)):
            given = feeds(b, s)
            (expected,) = ReferenceEvaluator(proto).run(None, given)
            assert np.allclose(ours.run(given)["y"], expected, atol=2e-5)
        assert len(ours._runs) == 2
        n_leafs = len(ours._store._leafs)
        ours.run(feeds(3, 4))
        assert len(ours._store._leafs) == n_leafs  # weights are not placed again for other sizes
        ops = {node.op for node in ours._runs.last.graph.nodes}  # type: ignore[union-attr]
        assert {ggmlb.Op.NORM, ggmlb.Op.SOFT_MAX, ggmlb.Op.GET_ROWS} <= ops
        names = {op for op in ours.summary().facts["ops"].split(", ")}
        assert {"Gelu", "LayerNormalization", "MaskedSoftmax"} <= names
        assert not {"Erf", "Softmax", "Sqrt"} & names


def test_two_devices_share_the_layers() -> None:
    first, second = available("OpenCL0", "CPU")
    proto = block()
    given = feeds(2, 5)
    (expected,) = ReferenceEvaluator(proto).run(None, given)
    with OnnxModel(proto, devices={first: 0.6, second: 0.4}) as ours:
        assert np.allclose(ours.run(given)["y"], expected, atol=2e-5)
        assert ours.scheduler is not None
        assert {split.backend.name for split in ours.scheduler.splits} == {first, second}
        assert "its weight is" in str(ours.scheduler)


def test_matrices_are_stored_in_another_type() -> None:
    proto = block()
    given = feeds(1, 6)
    (expected,) = ReferenceEvaluator(proto).run(None, given)
    with OnnxModel(proto, devices=["CPU"], weights="q8_0") as ours:
        found = ours.run(given)["y"]
        types = {src.dtype for node in ours._runs.last.graph.nodes for src in node.sources}  # type: ignore[union-attr]
    assert ggmlb.DType.Q8_0 in types
    assert 1e-5 < np.abs(found - expected).max() < 0.1


def test_weights_are_read_in_the_files_memory(tmp_path: Path) -> None:
    w = RNG.standard_normal((8, 16)).astype("f")
    proto = model([helper.make_node("Add", ["x", "w"], ["y"])], {"x": (FLOAT, [8, 16])}, ["y"], weights(w=w))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    x = RNG.standard_normal((8, 16)).astype("f")
    with OnnxModel(path, devices=["CPU"]) as ours:
        assert np.array_equal(ours.run({"x": x})["y"], x + w)
        (leaf,) = (t for _, t in ours._store._leafs.values())
        file = next(iter(ours._file._mapped.values()))
        assert np.shares_memory(leaf.as_array(), file.data)
        (tmp_path / "w.bin").write_bytes(bytes(9))
        with pytest.raises(ModelError, match="chang"):
            ours.run({"x": x})


def test_constants_computed_for_a_graph_are_freed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    alloc = ggmlb.models.onnx.model.alloc_ctx_tensors
    monkeypatch.setattr(
        ggmlb.models.onnx.model, "alloc_ctx_tensors", lambda *of: made.append(alloc(*of)) or made[-1]
    )
    monkeypatch.setattr(ggmlb.models.runs, "MOST", 2)
    n = helper.make_node
    nodes = [n("Shape", ["x"], ["s"]), n("Squeeze", ["s"], ["n"]), n("Range", ["zero", "n", "one"], ["r"]),
             n("Cast", ["r"], ["f"], to=FLOAT), n("Mul", ["x", "f"], ["y"])]  # fmt: skip
    proto = model(nodes, {"x": (FLOAT, None)}, ["y"], weights(zero=np.int64(0), one=np.int64(1)))
    with OnnxModel(proto, devices=available("OpenCL0", "CPU")) as ours:
        for size in range(2, 8):
            assert np.array_equal(ours.run({"x": np.ones(size, np.float32)})["y"], np.arange(size))
        gc.collect()
        assert len(made) == 6 and sum(not buffer.is_freed for buffer in made) == 2
    assert all(buffer.is_freed for buffer in made)


def test_an_input_that_determines_a_shape_counts_as_a_size() -> None:
    proto = model(
        [helper.make_node("Reshape", ["x", "s"], ["y"])], {"x": (FLOAT, [6]), "s": (INT64, [2])}, ["y"]
    )
    x = np.arange(6, dtype=np.float32)
    with OnnxModel(proto, devices=["CPU"]) as ours:
        for shape in ([2, 3], [3, -1], [2, 3]):
            assert np.array_equal(ours.run({"x": x, "s": np.array(shape)})["y"], x.reshape(shape))
        assert len(ours._runs) == 2


def test_a_result_may_be_an_input_a_constant_or_a_view() -> None:
    nodes = [helper.make_node("Identity", ["x"], ["a"]), helper.make_node("Shape", ["x"], ["b"]),
             helper.make_node("Transpose", ["x"], ["c"])]  # fmt: skip
    x = RNG.standard_normal((2, 3)).astype("f")
    with OnnxModel(model(nodes, {"x": (FLOAT, None)}, ["a", "b", "c"]), devices=["CPU"]) as ours:
        found = ours.run({"x": x})
        assert np.array_equal(found["a"], x) and found["b"].tolist() == [2, 3]
        assert np.array_equal(found["c"], x.T)


@pytest.mark.parametrize("op", ["Add", "Sub", "Mul", "Div"])
def test_broadcasting_is_onnx(op: str) -> None:
    proto = model([helper.make_node(op, ["a", "b"], ["y"])], {"a": (FLOAT, None), "b": (FLOAT, None)}, ["y"])
    with OnnxModel(proto, devices=["CPU"]) as ours:
        for p, q in (
            ((3, 1), (1, 4)),
            ((4,), (2, 1, 3, 4)),
            ((2, 1, 3, 1, 2), (1, 5, 3, 1, 1)),
            ((), (2, 2)),
            ((1, 1), (3,)),
        ):
            a, b = (RNG.uniform(1, 2, s).astype("f") for s in (p, q))
            (expected,) = ReferenceEvaluator(proto).run(None, {"a": a, "b": b})
            found = ours.run({"a": a, "b": b})["y"]
            assert found.shape == expected.shape and np.allclose(found, expected, rtol=1e-6)


def test_a_triangle_is_free_of_the_other_elements() -> None:
    proto = model([helper.make_node("Trilu", ["x"], ["y"])], {"x": (FLOAT, None)}, ["y"])
    with OnnxModel(proto, devices=["CPU"]) as ours:
        found = ours.run({"x": np.full((2, 2), -np.inf, np.float32)})["y"]
    assert found.tolist() == [[-np.inf, -np.inf], [0, -np.inf]]


def test_transposes_of_many_axes() -> None:
    x = RNG.standard_normal((2, 3, 4, 2, 3)).astype("f")
    for _ in range(20):
        perm = [int(i) for i in RNG.permutation(5)]
        nodes = [
            helper.make_node("Transpose", ["x"], ["h"], perm=perm),
            relu("", "h", "y"),
        ]
        with OnnxModel(model(nodes, {"x": (FLOAT, None)}, ["y"]), devices=["CPU"]) as ours:
            assert np.array_equal(ours.run({"x": x})["y"], np.maximum(x.transpose(perm), 0)), perm


# -- PyTorch ------------------------------------------------------------------------------------


def torch_modules() -> dict[str, tuple[Any, Any]]:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    nn = torch.nn
    image = torch.randn(2, 3, 12, 10)

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.norm = nn.Linear(32, 96), nn.LayerNorm(32)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm(x)).view(2, 6, 3, 4, 8).permute(2, 0, 3, 1, 4)
            return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 32)

    return {
        "a perceptron": (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16)), torch.randn(5, 8)),
        "convolutions": (
            nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), nn.MaxPool2d(2),
                          nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.ReLU6(), nn.Conv2d(8, 4, 1, groups=2),
                          nn.Upsample(scale_factor=2, mode="bilinear"), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten()),
            image,
        ),
        "one pixel": (
            nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, 3, padding=1)),
            image,
        ),
        "a transposed convolution": (nn.ConvTranspose2d(3, 5, 3, 2, 1, 1), image),
        "attention": (Attention(), torch.randn(2, 6, 32)),
        "an LSTM": (nn.LSTM(8, 16, bidirectional=True), torch.randn(4, 2, 8)),
    }  # fmt: skip


def test_modules_of_pytorch_compute_the_same() -> None:
    torch = pytest.importorskip("torch")
    for name, (module, x) in torch_modules().items():
        with torch.no_grad():
            expected = module.eval()(x)
        expected = expected[0] if isinstance(expected, tuple) else expected
        module.train()
        with ggmlb.models.from_torch(module, x, devices=["CPU"]) as ours:
            found = ours.run({"x0": x.numpy()})["y0"]
        assert module.training
        assert np.allclose(found, expected.numpy(), atol=2e-5), name


@pytest.mark.parametrize("weights", ["q8_0", ggmlb.DType.Q8_0])
def test_weights_and_sizes_of_a_module_may_be_chosen(weights: Any) -> None:
    torch = pytest.importorskip("torch")
    linear = torch.nn.Linear(64, 8)
    with ggmlb.models.from_torch(
        linear, torch.randn(1, 64), ["CPU"], weights=weights, dynamic_axes={"x0": [0]}
    ) as ours:
        x = torch.randn(5, 64)
        difference = np.abs(ours.run({"x0": x.numpy()})["y0"] - linear(x).detach().numpy()).max()
    assert 1e-6 < difference < 0.05


@pytest.mark.parametrize("device", ["CPU", pytest.param("LLVM", id="llvm")])
@pytest.mark.parametrize("name", ["Bert", "Llama", "ViT", "ResNet"])
def test_models_of_transformers_compute_the_same(name: str, device: str) -> None:
    """Made at random; their results are named tensors, of a text model with a mask."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    if device == "LLVM":
        pytest.importorskip("llvmlite")
    torch.manual_seed(0)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    of_text = {"vocab_size": 100, "max_position_embeddings": 64}
    options: dict[str, dict[str, Any]] = {
        "Bert": size | of_text,
        "Llama": size | of_text | {"num_key_value_heads": 2, "use_cache": False},
        "ViT": size | {"image_size": 32, "patch_size": 8},
        "ResNet": {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [2, 1], "layer_type": "basic"},
    }
    config = getattr(transformers, f"{name}Config")(**options[name])
    module = getattr(transformers, f"{name}Model")(config).eval()
    tokens = torch.randint(0, 100, (2, 9)), torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
    example = tokens if name in ("Bert", "Llama") else (torch.randn(1, 3, 32, 32),)
    with torch.no_grad():
        want = [v.numpy() for v in module(*example).values() if isinstance(v, torch.Tensor)]
    with ggmlb.models.from_torch(module, example, devices=[*dict.fromkeys((device, "CPU"))]) as ours:
        got = ours.run({f"x{i}": t.numpy() for i, t in enumerate(example)})
    assert list(got) == [f"y{i}" for i in range(len(want))]
    for i, expected in enumerate(want):
        atol = 1e-5 * float(np.abs(expected).max())
        np.testing.assert_allclose(got[f"y{i}"], expected, rtol=1e-4, atol=atol)


def test_an_op_that_is_not_there_is_named_with_its_place_in_the_module() -> None:
    torch = pytest.importorskip("torch")

    class Det(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return torch.linalg.det(x)

    module = torch.nn.Sequential(torch.nn.ReLU(), Det())
    with pytest.raises(UnsupportedOpError, match="/1/Det"):
        ggmlb.models.from_torch(module, torch.randn(2, 3, 3), devices=["CPU"])
    with pytest.raises(ArgumentError, match="Linear"):
        ggmlb.models.from_torch(torch.nn.Linear(2, 2), torch.randn(2, 3))


# -- what is wrong ------------------------------------------------------------------------------


def relu(name: str, x: str, y: str) -> onnx.NodeProto:
    return helper.make_node("Relu", [x], [y], name=name)


def external(location: str, **more: str) -> onnx.ModelProto:
    proto = model(
        [helper.make_node("Add", ["x", "w"], ["y"])], {"x": (FLOAT, [2])}, ["y"], weights(w=np.ones(2, "f"))
    )
    tensor = proto.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=value)
    return proto


def huge() -> onnx.ModelProto:
    proto = model([relu("", "w", "y")], {}, ["y"], weights(w=np.ones(2, "f")))
    proto.graph.initializer[0].dims[:] = [1 << 40]
    return proto


BAD = {
    "a cycle": (
        model([relu("a", "q", "p"), relu("b", "p", "q")], X, ["q"]),
        "node Relu 'a' whose input 'q' .* or a cycle",
    ),
    "a missing operand": (
        model([relu("a", "z", "y")], X, ["y"]),
        "'a' whose input 'z' .* does not exist",
    ),
    "a missing result": (model([relu("a", "x", "y")], X, ["z"]), "output 'z'"),
    "a name twice": (model([relu("a", "x", "y"), relu("b", "x", "y")], X, ["y"]), "'y' twice"),
    "data too short": (huge(), r"size 2 into shape \(1099511627776,\)"),
    "data outside": (external("../w.bin"), "outside the model's folder"),
    "data at the root": (external("/etc/hostname"), "outside the model's folder"),
    "data beyond the end": (external("w.bin", offset="4"), "at byte 4 to 12"),
    "a later operator set": (model([relu("a", "x", "y")], X, ["y"], opset=999), "operator set 999"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_an_error_that_says_why(name: str, tmp_path: Path) -> None:
    proto, why = BAD[name]
    (tmp_path / "w.bin").write_bytes(bytes(8))
    path = tmp_path / "model.onnx"
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match=why):
        OnnxModel(path, devices=["CPU"])


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        OnnxModel(tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ModelError, match="not an ONNX file"):
        OnnxModel(tmp_path / "text.onnx")


def test_ops_that_are_not_there_are_all_named() -> None:
    nodes = [helper.make_node("Det", ["x"], ["h"]), helper.make_node("Unique", ["h"], ["y"])]
    with pytest.raises(UnsupportedOpError, match="Det, Unique"):
        OnnxModel(model(nodes, X, ["y"]), devices=["CPU"])


@pytest.mark.parametrize("last", [
    helper.make_node("Div", ["x"], ["y"]),
    helper.make_node("Softmax", ["h"], ["y"]),
    helper.make_node("Identity", ["c"], ["y"], body=block().graph),
], ids=lambda node: str(node.op_type))  # fmt: skip
def test_operands_or_attributes_that_do_not_fit_are_our_error(last: onnx.NodeProto) -> None:
    nodes = [helper.make_node("Add", ["x"], ["h"]), last]
    with pytest.raises(Error), OnnxModel(model(nodes, X, ["y"], weights(c=1.0)), devices=["CPU"]) as ours:
        ours.run({"x": np.ones(2, np.float32)})


def test_inputs_are_checked() -> None:
    proto = block()
    with OnnxModel(proto, devices=["CPU"]) as ours:
        given = feeds(1, 4)
        for bad, why in (
            ({"ids": given["ids"]}, "give"),
            ({**given, "ids": given["ids"].astype("f")}, "int64"),
            ({**given, "ids": given["ids"][0]}, "shape"),
            ({**given, "ids": given["ids"] * 0 + 50}, "of 50 rows"),
        ):
            with pytest.raises(ArgumentError, match=why):
                ours.run(bad)
        assert ours.run(given)["y"].shape == (1, 4, 64)
    with pytest.raises(FreedError):
        ours.run(given)


@pytest.mark.parametrize("op", ["ConstantOfShape", "Expand", "Tile", "Range", "Pad"])
def test_large_constants_are_refused_before_they_take_memory(op: str) -> None:
    n = np.array([1 << 40])
    one = np.ones(1, np.float32)
    operands = {"ConstantOfShape": [n], "Expand": [one, n], "Tile": [one, n],
                "Pad": [one, np.array([0, 1 << 40])],
                "Range": [np.float32(0), np.float32(2.0**40), np.float32(1)]}[op]  # fmt: skip
    names = [f"c{i}" for i in range(len(operands))]
    nodes = [helper.make_node(op, names, ["h"]), helper.make_node("Add", ["x", "h"], ["y"])]
    constants = weights(**dict(zip(names, operands, strict=True)))
    proto = model(nodes, {"x": (FLOAT, [1])}, ["y"], constants)
    tracemalloc.start()
    try:
        with pytest.raises(UnsupportedOpError, match="a constant of"):
            OnnxModel(proto, devices=["CPU"])
        assert tracemalloc.get_traced_memory()[1] < 1 << 26
    finally:
        tracemalloc.stop()


def mutant(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        kind = chance.randrange(3)
        if kind == 0:
            changed[at] = chance.randrange(256)
        elif kind == 1:
            del changed[at : at + chance.randint(1, 8)]
        else:
            changed[at:at] = bytes(chance.randrange(256) for _ in range(chance.randint(1, 8)))
    return bytes(changed)


def small_models() -> list[tuple[bytes, dict[str, Any]]]:
    conv = model(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["h"], pads=[1, 1, 1, 1], strides=[2, 2]),
            helper.make_node("MaxPool", ["h"], ["p"], kernel_shape=[2, 2], ceil_mode=1),
            helper.make_node("Resize", ["p", "", "scales"], ["r"], mode="linear"),
            helper.make_node("Flatten", ["r"], ["f"]),
            helper.make_node("Slice", ["f", "zero", "four", "one"], ["y"]),
        ],
        {"x": (FLOAT, [1, 2, 7, 7])},
        ["y"],
        weights(w=RNG.standard_normal((3, 2, 3, 3)).astype("f"), b=np.ones(3, "f"),
                scales=np.array([1, 1, 2, 2], "f"), zero=np.array([0]),
                four=np.array([4]), one=np.array([1])),
    )  # fmt: skip
    x = RNG.standard_normal((1, 2, 7, 7)).astype("f")
    return [(block(16).SerializeToString(), feeds(1, 3)), (conv.SerializeToString(), {"x": x})]


def run_mutants(count: int, folder: Path) -> int:
    """Run changed files; return how many still computed something."""
    chance, fine = random.Random(3), 0
    path = folder / "mutant.onnx"
    contents = small_models()
    for i in range(count):
        content, given = contents[i % len(contents)]
        path.write_bytes(mutant(content, chance))
        tracemalloc.start()
        try:
            with np.errstate(all="ignore"), OnnxModel(path, devices=["CPU"]) as ours:
                ours.run(given)
            fine += 1
        except Error:
            pass
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert peak < 1 << 29, i
    return fine


def test_changed_files_compute_or_are_our_errors(tmp_path: Path) -> None:
    assert 0 < run_mutants(300, tmp_path) < 300


@pytest.mark.slow
def test_ten_thousand_changed_files(tmp_path: Path) -> None:
    assert 0 < run_mutants(10_000, tmp_path) < 10_000
