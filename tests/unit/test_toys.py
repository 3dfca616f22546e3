"""CONTRIBUTING.md says which files a new op, type, backend and model touch: one of each is added and runs.

Each is added to a copy of the tree. The files that differ afterwards must be those that the page lists, and
each of these must differ; the new thing then runs in processes that find the copy.
"""

from __future__ import annotations

import json
import re
import shutil
from filecmp import cmp
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.support.processes import python

ROOT = Path(__file__).parents[2]
COPIED = (
    "ggmlb",
    "docs",
    "pyproject.toml",
    "tests/__init__.py",
    "tests/conftest.py",
    "tests/conformance",
    "tests/support",
    "tests/meta",
)
PAGE = (ROOT / "CONTRIBUTING.md").read_text()


def listed(what: str) -> list[str]:
    """The files of a list of the page, as patterns."""
    (items,) = re.findall(rf"^\*\*{what}\*\*.*\n\n((?:- .*\n(?:  .*\n)*)+)", PAGE, re.MULTILINE)
    paths = re.findall(r"^- `([^`]+)`", items, re.MULTILINE)
    return [re.sub(r"<\w+>", "*", path) for path in paths]


class Tree:
    """A copy of the tree, without what no toy needs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in COPIED:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, root / name)

    def write(self, path: str, text: str) -> None:
        """Add a file."""
        file = self.root / path
        assert not file.exists()
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)

    def append(self, path: str, text: str) -> None:
        """Add a text at the end of a file."""
        file = self.root / path
        file.write_text(file.read_text() + text)

    def replace(self, path: str, old: str, new: str) -> None:
        """Put a text in the place of one that is there once."""
        text = (self.root / path).read_text()
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        (self.root / path).write_text(text.replace(old, new))

    def run(self, *args: str) -> str:
        """Run Python, where it finds the copy; return what it printed."""
        done = python(*args, cwd=self.root, PYTHONPATH=str(self.root), PYTHONDONTWRITEBYTECODE="1")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def changed(self) -> set[str]:
        """The files that are new or have another text."""
        files = (p for p in self.root.rglob("*") if p.is_file())
        paths = {file.relative_to(self.root) for file in files}
        return {str(p) for p in paths if not (ROOT / p).is_file() or not cmp(ROOT / p, self.root / p, False)}

    def check(self, what: str) -> None:
        """Check that what differs is what the page lists."""
        changed, patterns = self.changed(), listed(what)
        assert [p for p in changed if not any(fnmatch(p, pattern) for pattern in patterns)] == []
        assert [pattern for pattern in patterns if not any(fnmatch(p, pattern) for p in changed)] == []


def passed(tree: Tree, devices: str, *chosen: str) -> set[str]:
    """The modes of the kit in which cases passed, none having failed."""
    told = tree.run("-m", "ggmlb", "test", "--devices", devices, *chosen, "--mode", "all", "--json")
    return {r["mode"] for r in json.loads(told)["results"] if r["outcome"] == "passed"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "tree")


OP = '''\
    def toy(self, a: Tensor, more: float = 0.0) -> Tensor:
        """Return `a * a + more`."""
        return self._op(Op.TOY, a.dtype, a.ne, (a,), {"more": more})

    def sum('''
OP_SPEC = """\
SPECS = (
    OpSpec(Op.TOY, params=("more",), inplace=1, shard=elementwise),
"""
OP_CASES = """

@cases(Op.TOY, on_main("toy"), on_rows("toy", 0.5))
def toy(p: Program) -> None:
    p.out("toy", p.operand(F32, p.ne(), *ROWS, beyond=ANY), p.float(0.1, 1))
"""
OP_RULE = '''

@RULES.rule(Op.TOY, operands(FLOATS))
def toy(lw: NodeLowering, t: Tensor) -> None:
    """The square, and a little more."""
    more = t.params["more"]

    def kernel(y: Array, x: Array) -> None:
        np.multiply(x, x, out=y)
        np.add(y, more, out=y)

    lw.rowwise(kernel, t, *t.sources)
'''
OP_PROGRAM = """
import numpy as np
import ggmlb
from ggmlb.core.errors import ArgumentError

with ggmlb.init_by_name("CPU") as cpu:
    c = ggmlb.Context()
    x = c.set_input(c.new_tensor("f32", (5, 3)))
    y = c.toy(c.toy(x, more=0.5), 1)
    graph = ggmlb.Graph().build_forward_expand(y)
    with ggmlb.GraphAllocator(cpu.default_buffer_type) as allocator:
        allocator.alloc_graph(graph)
        assert (y.buffer, y.offset) == (y.src[0].buffer, y.src[0].offset)  # in place
        x.set_array(np.full((3, 5), 2.0))
        cpu.graph_compute(graph)
        np.testing.assert_allclose(y.to_numpy(), (4 + 0.5) ** 2 + 1)
    for wrong in ((3,), (x, "much")):
        try:
            c.toy(*wrong)
        except ArgumentError as error:
            assert "toy" in str(error)
        else:
            raise SystemExit(f"toy took {wrong}")
"""


def test_a_new_op(tree: Tree) -> None:
    tree.replace("ggmlb/core/enums.py", '    GLU = "GLU"\n', '    GLU = "GLU"\n    TOY = "TOY"\n')
    family = "ggmlb/core/ops/reduce.py"
    tree.replace(family, "    def sum(", OP)
    tree.replace(family, "import per_row", "import elementwise, per_row")
    tree.replace(family, "SPECS = (\n", OP_SPEC)
    tree.append("ggmlb/testing/ops/rows.py", OP_CASES)
    tree.append("ggmlb/backends/cpu/ops/reduce.py", OP_RULE)
    tree.run("-c", OP_PROGRAM)
    assert passed(tree, "CPU,Meta(CPU,CPU)", "--ops", "toy") == {"test", "support", "perf"}
    tree.run("-m", "ggmlb", "ops", "--devices", "CPU", "--markdown", "docs/ops.md")
    assert re.search(r"^\| toy \| floats \|", (tree.root / "docs/ops.md").read_text(), re.MULTILINE)
    tree.check("A new op")


CODEC = """

def _read_toy(values: Floats, blocks: Blocks) -> None:
    values[:] = blocks["qs"] * f32(blocks["d"])[:, None]


def _write_toy(blocks: Blocks, columns: Floats) -> None:
    blocks["d"] = np.abs(columns).max(0) / np.float32(127)
    with np.errstate(all="ignore"):
        blocks["qs"] = np.nan_to_num(np.rint(columns / f32(blocks["d"]))).clip(-127, 127).T


Q8_TOY = Codec(layout(d="f2", qs=("i1", 16)), _read_toy, _write_toy)
"""
TYPE_PROGRAM = """
import numpy as np
import ggmlb
from ggmlb.core import dtypes

toy = ggmlb.DType.parse("q8_toy")
assert (toy.is_quantized, toy.row_size(32)) == (True, 36)
rows = np.random.default_rng(0).uniform(-1, 1, (4, 32)).astype(np.float32)
blocks = dtypes.quantize(rows, toy)
assert blocks.shape == (4, 36)
values = dtypes.dequantize(blocks, toy)
np.testing.assert_allclose(values, rows, atol=0.01)

ctx = ggmlb.Context()
w = ctx.new_tensor("q8_toy", (32, 4))
x = ctx.new_tensor("f32", (32, 2))
y = ctx.mul_mat(w, x)
with ggmlb.init_by_name("CPU") as cpu, ggmlb.alloc_ctx_tensors(ctx, cpu):
    w.set_array(rows)
    x.set_array(rows[:2])
    cpu.graph_compute(ggmlb.Graph().build_forward_expand(y))
    np.testing.assert_array_equal(w.to_numpy(), values)
    np.testing.assert_allclose(y.to_numpy(), rows[:2] @ values.T, rtol=1e-5)
"""


def test_a_new_type(tree: Tree) -> None:
    tree.replace("ggmlb/core/dtypes.py", "\n    Q2_0 = ", "\n    Q8_TOY = 99, 16, simple.Q8_TOY\n    Q2_0 = ")
    tree.append("ggmlb/core/quants/simple.py", CODEC)
    tree.run("-c", TYPE_PROGRAM)
    modes = passed(tree, "CPU", "--ops", "mul_mat,get_rows,cpy", "--pattern", "q8_toy")
    assert modes == {"test", "grad", "support"}
    tree.check("A new type")


BACKEND_TEST = """

@pytest.mark.parametrize("mode", ["behaviour", "test", "support"])
def test_the_abacus_passes(mode: str) -> None:
    assert faults(device_by_name("Abacus0"), mode, SAMPLE, least=0.001) == []  # it has few ops
"""


def test_a_new_backend(tree: Tree) -> None:
    """That of the page about writing one, as a folder of ours."""
    module = (ROOT / "ggmlb/testing/template/__init__.py").read_text()
    tree.write("ggmlb/backends/abacus/__init__.py", module)
    tree.replace("pyproject.toml", "\ncpu = ", '\nabacus = "ggmlb.backends.abacus:backend_reg"\ncpu = ')
    tree.append("tests/conformance/test_kit.py", BACKEND_TEST)
    kit = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance/test_kit.py", "-k", "abacus")
    assert re.search(r"^3 passed, [1-9]\d* deselected in", tree.run(*kit), re.MULTILINE)
    tree.check("A new backend")


MODEL = '''
"""A toy model: the mean of the vectors of a text's words, through a layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ggmlb import Context, Graph, Scheduler, init_by_name
from ggmlb.models.folder import ModelFolder
from ggmlb.models.tensor_file import TensorFile
from ggmlb.models.weights import Source, Weights


class Toy:
    """Words in, a vector out."""

    def __init__(self, path: Path, device: str) -> None:
        folder = ModelFolder(path)
        n_vocab, n_embd = (folder.json("config.json")[key] for key in ("n_vocab", "n_embd"))
        self._weights = Weights(TensorFile(folder.file("model.safetensors")))
        self._stream = init_by_name(device)
        sources = {
            "words": Source(("words",), (n_vocab, n_embd), is_matrix=True),
            "layer": Source(("layer",), (n_embd, n_embd), is_matrix=True, is_multiplied=True),
        }
        self._placed = self._weights.place(sources, self._stream)

    def embed(self, words: Sequence[int]) -> npt.NDArray[np.float32]:
        """Return the vector of a text."""
        ctx = Context()
        ids = ctx.set_input(ctx.new_tensor("i32", (len(words),)))
        rows = ctx.get_rows(self._placed["words"], ids)
        mean = ctx.transpose(ctx.mean(ctx.cont(ctx.transpose(rows))))
        out = ctx.set_output(ctx.tanh(ctx.mul_mat(self._placed["layer"], ctx.cont(mean))))
        graph = Graph().build_forward_expand(out)
        with Scheduler([self._stream]) as scheduler:
            scheduler.alloc_graph(graph)
            ids.set_array(np.asarray(words, np.int32))
            scheduler.graph_compute(graph)
            return out.to_numpy()

    def free(self) -> None:
        """Free the weights and the stream."""
        self._weights.free()
        self._stream.free()
'''.lstrip()
MODEL_PROGRAM = """
import json
from pathlib import Path
import numpy as np
from safetensors.numpy import save_file
from ggmlb.models import Toy

folder = Path("model")
folder.mkdir()
(folder / "config.json").write_text(json.dumps({"n_vocab": 10, "n_embd": 4}))
words = np.random.default_rng(0).standard_normal((10, 4), np.float32)
save_file({"words": words, "layer": np.eye(4, dtype=np.float32) / 2}, folder / "model.safetensors")
toy = Toy(folder, "CPU")
np.testing.assert_allclose(toy.embed([3, 1, 4]), np.tanh(words[[3, 1, 4]].mean(0) / 2), rtol=1e-5)
toy.free()
for path in folder.iterdir():
    path.unlink()
folder.rmdir()
"""


def test_a_new_model(tree: Tree) -> None:
    pytest.importorskip("safetensors")
    tree.write("ggmlb/models/toy.py", MODEL)
    names = "ggmlb/models/__init__.py"
    tree.replace(names, "\n__all__ = [", 'from ggmlb.models.toy import Toy\n\n__all__ = ["Toy", ')
    tree.run("-c", MODEL_PROGRAM)
    tree.check("A new model")


ARCHITECTURE = '''
"""Toy: layers of different sizes, every other one without RoPE, a feed-forward part of its own."""

from dataclasses import dataclass, replace

from ggmlb import RopeType
from ggmlb.models import register_architecture
from ggmlb.models.text.blocks import Block, Slices, Weight, attentions, decoder_layers, windowed
from ggmlb.models.text.config import TextConfig


@dataclass(frozen=True)
class Squared(Block):
    """The square of what is positive."""

    output = "ffn_out"
    n_ff: int

    def weights(self, n_embd):
        up, down = (Slices(axis, (1,), self.n_ff, "ff") for axis in (1, 0))
        return [
            Weight("ffn_up.weight", (self.n_ff, n_embd), "product", up),
            Weight("ffn_down.weight", (n_embd, self.n_ff), "product", down),
        ]

    def apply(self, graph, layer, x):
        y = graph.ctx.sqr(graph.ctx.relu(graph.product(f"blk.{layer}.ffn_up", x)))
        return graph.product(f"blk.{layer}.ffn_down", graph.label(f"blk.{layer}.ffn_act", y))


@register_architecture("toy")
def toy(keys):
    attention = windowed(keys, attentions(keys, RopeType.NORMAL), 2)
    attention[1::2] = [replace(a, rope=None) for a in attention[1::2]]
    layers = decoder_layers(attention, map(Squared, keys.counts("feed_forward_length")))
    return TextConfig.read(keys, layers, logit_scale=keys.real("logit_scale", 1.0))
'''.lstrip()
ARCHITECTURE_PROGRAM = """
from pathlib import Path
import numpy as np
import ggmlb
from ggmlb.models import TextModel
from tests.support.gguf_files import write_gguf
from tests.support.text_models import N_VOCAB, vocabulary

HEADS, KV_HEADS, FF, WINDOW, N, KEY = (4, 2, 6), (2, 1, 6), (64, 32, 96), 3, 32, 8
rng = np.random.default_rng(0)
w = {"token_embd": rng.standard_normal((N_VOCAB, N)), "output_norm": rng.uniform(0.5, 2, N)}
for i, (heads, kv, ff) in enumerate(zip(HEADS, KV_HEADS, FF)):
    shapes = {"attn_q": (heads * KEY, N), "attn_k": (kv * KEY, N), "attn_v": (kv * KEY, N)}
    shapes |= {"attn_output": (N, heads * KEY), "ffn_up": (ff, N), "ffn_down": (N, ff)}
    w |= {f"blk.{i}.{k}": rng.standard_normal(s) / s[1] ** 0.5 for k, s in shapes.items()}
    w |= {f"blk.{i}.{k}": rng.uniform(0.5, 2, N) for k in ("attn_norm", "ffn_norm")}
keys = {
    "context_length": 64, "embedding_length": N, "block_count": 3, "attention.key_length": KEY,
    "attention.head_count": np.array(HEADS, np.int32),
    "attention.head_count_kv": np.array(KV_HEADS, np.int32),
    "feed_forward_length": np.array(FF, np.int32), "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.sliding_window": WINDOW, "logit_scale": 0.5,
}
keys = {"general.architecture": "toy", **{f"toy.{k}": v for k, v in keys.items()}, **vocabulary()}
path = write_gguf(Path("toy.gguf"), keys, {f"{k}.weight": v.astype(np.float32) for k, v in w.items()})

def norm(name, x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w[name]

def rotated(x):
    angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, KEY, 2) / KEY)
    even, odd = x[..., ::2], x[..., 1::2]
    parts = even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)
    return np.stack(parts, -1).reshape(x.shape)

def logits(ids):
    x, weights = w["token_embd"][ids], []
    distance = np.arange(len(ids))[:, None] - np.arange(len(ids))
    for i, (heads, kv) in enumerate(zip(HEADS, KV_HEADS)):
        h = norm(f"blk.{i}.attn_norm", x)
        q, k, v = ((h @ w[f"blk.{i}.attn_{p}"].T).reshape(len(ids), -1, KEY) for p in "qkv")
        q, k = (q, k) if i % 2 else (rotated(q), rotated(k))
        k, v = (np.repeat(y, heads // kv, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / KEY**0.5
        scores[:, (distance < 0) | ((distance >= WINDOW) & (i % 2 == 0))] = -np.inf
        weights.append(np.exp(scores - scores.max(-1, keepdims=True)))
        weights[-1] /= weights[-1].sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights[-1], v).reshape(len(ids), -1)
        x = x + mixed @ w[f"blk.{i}.attn_output"].T
        h = norm(f"blk.{i}.ffn_norm", x) @ w[f"blk.{i}.ffn_up"].T
        x = x + np.maximum(h, 0) ** 2 @ w[f"blk.{i}.ffn_down"].T
    return norm("output_norm", x) @ w["token_embd"].T * 0.5, weights

ids = [1, 300, 270, 281, 290, 265, 277]
expected, weights = logits(ids)
pairs = [["OpenCL0+CPU", "CPU"]] if "OpenCL0" in {device.name for device in ggmlb.devices()} else []
for devices in [["CPU"], *pairs]:
    with TextModel(path, devices, n_ctx=64, kv_type="f32") as model:
        np.testing.assert_allclose(model.logits(ids), expected, atol=1e-3)
        found = model.generate(ids, max_tokens=3, temperature=0, ignore_eos=True).tokens
        for n in range(3):
            assert found[n] == logits([*ids, *found[:n]])[0][-1].argmax()
        forecast, allocated = model.memory
        assert forecast == allocated
        if devices == ["CPU"]:
            traced = model.trace(ids, "blk.*.attn_weights")
            for i in range(3):
                np.testing.assert_allclose(traced[f"blk.{i}.attn_weights"], weights[i], atol=1e-4)
            adapter = model.new_adapter(rank=4, seed=0)
            epochs = model.finetune(adapter, "abc def ghi " * 20, n_epochs=3, n_ctx=16, n_batch=2)
            assert epochs[-1].train.loss < epochs[0].train.loss
path.unlink()
"""


def test_a_new_architecture_of_another_package(tree: Tree) -> None:
    """Found by its entry point; layers differ in heads, KV heads, hidden sizes, windows and RoPE."""
    tree.write("ggmlb_toy.py", ARCHITECTURE)
    tree.write("ggmlb_toy-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: ggmlb_toy\nVersion: 1.0\n")
    tree.write("ggmlb_toy-1.0.dist-info/entry_points.txt", "[ggmlb.architectures]\ntoy = ggmlb_toy:toy\n")
    tree.run("-c", ARCHITECTURE_PROGRAM)
    assert all(path.startswith("ggmlb_toy") for path in tree.changed())


ARCHITECTURE_HERE = '''
"""A toy architecture, whose layers are those of Llama."""

from __future__ import annotations

from ggmlb import RopeType
from ggmlb.models.text.architectures import register_architecture
from ggmlb.models.text.blocks import attentions, decoder_layers, feed_forwards
from ggmlb.models.text.config import TextConfig
from ggmlb.models.text.keys import Keys


@register_architecture("toy")
def toy(keys: Keys) -> TextConfig:
    """Read a model."""
    return TextConfig.read(keys, decoder_layers(attentions(keys, RopeType.NORMAL), feed_forwards(keys)))
'''.lstrip()
ARCHITECTURE_HERE_PROGRAM = """
from pathlib import Path
from ggmlb.models import TextModel
from tests.support.text_models import write_text_model

tokens = []
for kind in ("toy", "llama"):
    path = write_text_model(Path("toy.gguf"), kind)
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        tokens.append(model.generate([1, 300, 270], max_tokens=5, temperature=0, ignore_eos=True).tokens)
    path.unlink()
assert len(tokens[0]) == 5 and tokens[0] == tokens[1]
"""


def test_a_new_architecture(tree: Tree) -> None:
    tree.write("ggmlb/models/text/architectures/toy.py", ARCHITECTURE_HERE)
    tree.replace("tests/support/text_models.py", '\n    "llama": {},', '\n    "llama": {},\n    "toy": {},')
    tree.run("-c", ARCHITECTURE_HERE_PROGRAM)
    tree.check("A new architecture")
