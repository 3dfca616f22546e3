"""Connections: what is refused, and how weights get there, also from files that all machines see."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Context, DType
from ggmlb.backends.ray.node import versions
from ggmlb.models import TextModel
from tests.support.processes import python
from tests.support.text_models import write_text_model

PROMPT = [1, 270, 281, 292]


def test_weights_of_a_shared_file_do_not_pass_through_the_driver(address: str, tmp_path: Path) -> None:
    path = write_text_model(tmp_path / "model.gguf", "llama", "q8_0")
    with TextModel(path, ["CPU"], n_ctx=64) as local:
        right = local.logits(PROMPT)
    sent = {}
    for shared in ((), (str(tmp_path),)):
        with ggmlb.connect(address, ["CPU"], shared) as cluster:
            device: Any = cluster.devices[1]
            before = device.link.n_sent
            with TextModel(path, ["node1/CPU", "CPU"], {"node1/CPU": "all"}, n_ctx=64) as model:
                sent[shared] = device.link.n_sent - before
                np.testing.assert_array_equal(model.logits(PROMPT), right)
    through, direct = sent.values()
    assert through > path.stat().st_size / 2
    assert direct < through / 4


def test_progress_is_told(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GGMLB_PROGRESS", "1")
    monkeypatch.setattr("ggmlb.system.progress.SHOW_AFTER_S", 0)
    ctx, told = Context(), ""
    w = ctx.new_tensor(DType.F32, (1 << 18,))
    with ggmlb.connect(address, ["CPU"]) as cluster:
        buffer = ggmlb.alloc_ctx_tensors(ctx, cluster.devices[0].buffer_type)
        while "node0: taking weights: 1 (" not in told:  # the first time that a thread looks
            w.set_array(np.zeros(1 << 18))
            told += capsys.readouterr().err
        buffer.free()
    assert "(1.0 MiB of 1.0 MiB)" in told
    assert "node0: taking weights: " in capsys.readouterr().err  # how long it took


def test_other_versions_are_not_connected_to(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**versions(), "ggmlb": "9.9"}
    monkeypatch.setattr("ggmlb.backends.ray.cluster.versions", lambda: own)
    with pytest.raises(ggmlb.BackendBroken, match=r"the driver has .*ggmlb 9\.9.* install the same versions"):
        ggmlb.connect(address, ["CPU"])


def test_a_device_that_machines_have_not_is_told(address: str) -> None:
    with pytest.raises(ggmlb.RegistryError, match="there is no device 'Abacus0'"):
        ggmlb.connect(address, ["Abacus0"])


CONNECT = "import sys, ggmlb; ggmlb.connect(sys.argv[1], ['CPU'])"


@pytest.mark.slow
def test_who_has_not_the_token_is_refused(nodes: Any) -> None:
    run = python("-c", CONNECT, nodes.address, RAY_AUTH_TOKEN="0" * 64)
    assert run.returncode == 1
    assert "or it needs another RAY_AUTH_TOKEN" in run.stderr


def test_a_connection_is_refused_while_there_is_another(address: str) -> None:
    with ggmlb.connect(address, ["CPU"]), pytest.raises(ggmlb.RegistryError, match=r"close\(\) it first"):
        ggmlb.connect(address, ["CPU"])
