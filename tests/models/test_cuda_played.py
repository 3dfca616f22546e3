"""MiniLM through the CUDA backend on the played driver, its layers split with the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, sys
import numpy as np
sys.path.insert(0, "tests/support")
import ggmlb.backends.cuda
from host_driver import HostDriver
ggmlb.backends.cuda.load_driver = HostDriver
from ggmlb.models import BertEmbedder
texts = json.load(open("tests/golden/minilm/sentences.json"))[:3]
with BertEmbedder(devices=["CUDA0", "CPU"], layers_on={"CUDA0": "0-2", "CPU": "3-5"}) as embedder:
    found = [embedder.embed(texts) for _ in range(3)]
    counts = embedder.backends[0].device.driver.counts
assert counts["replay"] > 0, counts
np.save(sys.argv[1], np.stack(found))
"""


@pytest.mark.slow
def test_minilm_split_with_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "found.npy"
    subprocess.run([sys.executable, "-c", PROGRAM, str(file)], cwd=ROOT, check=True)
    with np.load(ROOT / "tests/golden/minilm/embeddings.npz") as golden:
        want = golden["embeddings"][:3]
    assert len(json.loads((ROOT / "tests/golden/minilm/sentences.json").read_text())) >= 3
    for found in np.load(file):
        assert np.abs(found - want).max() < 1e-5
