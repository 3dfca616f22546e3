"""MiniLM through the CUDA backend on the played driver: layers on two devices, and all on two cards."""

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
import ggmlb
import ggmlb.backends.cuda
from tests.support.host_driver import HostDriver
driver = HostDriver(n_devices=2)
ggmlb.backends.cuda.load_driver = lambda: driver
from ggmlb.models import BertEmbedder
texts = json.load(open("tests/golden/minilm/sentences.json"))[:3]
by_rows = ggmlb.reg_by_name("CUDA").get_proc_address("split_buffer_type")(0, (1, 2))
options = {
    "layers": {"devices": ["CUDA0", "CPU"], "layers_on": {"CUDA0": "0-2", "CPU": "3-5"}},
    "rows": {"devices": ["CUDA0", "CPU"], "override_tensors": {"(qkv|out|up|down).*weight": by_rows}},
    "meta": {"devices": ["CUDA0+CUDA1", "CPU"]},
}
with BertEmbedder(**options[sys.argv[2]]) as embedder:
    found = [embedder.embed(texts) for _ in range(3)]
assert driver.counts["replay"] > 0, driver.counts
np.save(sys.argv[1], np.stack(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["layers", "rows", "meta"])
def test_minilm_on_several_devices(tmp_path: Path, how: str) -> None:
    file = tmp_path / "found.npy"
    subprocess.run([sys.executable, "-c", PROGRAM, str(file), how], cwd=ROOT, check=True)
    with np.load(ROOT / "tests/golden/minilm/embeddings.npz") as golden:
        want = golden["embeddings"][:3]
    assert len(json.loads((ROOT / "tests/golden/minilm/sentences.json").read_text())) >= 3
    for found in np.load(file):
        assert np.abs(found - want).max() < 1e-5
