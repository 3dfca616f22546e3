"""Parallel strategies of text models: their costs beside each other, and the fastest that fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import ggmlb
from ggmlb import ArgumentError, DType
from ggmlb.cli.app import run
from ggmlb.models import Placement, TextModel
from ggmlb.models import rates as rates_module
from ggmlb.models.rates import Rates, measured_rates
from ggmlb.models.text.planner import open_planner
from ggmlb.models.text.strategies import BEST, STRATEGIES, ParallelStrategy, StrategyPlanner
from tests.support.processes import python

CARD = "OpenCL0"
NAMES = {d.name for d in ggmlb.devices()}
pytestmark = pytest.mark.skipif(CARD not in NAMES, reason="there is no device with memory of its own")
SLOW, FAST = Rates(1e9, 1e9, 1e-4, 1e-5), Rates(1e11, 1e10, 1e-5, 1e-6)


@pytest.fixture
def pose(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Rates]], None]:
    """Sets the rates of devices; without it they are measured."""

    def pose(rates: Mapping[str, Rates]) -> None:
        monkeypatch.setattr(rates_module, "measured_rates", lambda device, *_: rates[device.name])

    return pose


def planned(
    path: Path, devices: list[str], limits: Mapping[str, int] | None = None, **options: Any
) -> dict[str, ParallelStrategy]:
    with ExitStack() as resources:
        asked = Placement(devices, limits=limits or {}, **options)
        strategies = StrategyPlanner(resources, open_planner(resources, path, asked, 256))
        found = strategies.planned()
        return {each.name: each for each in found} | {BEST: strategies.taken(BEST, found)}


def test_rates_are_measured(models: Callable[..., Path]) -> None:
    for name in sorted(NAMES & {"CPU", "LLVM", CARD}):
        device = ggmlb.device_by_name(name)
        found = measured_rates(device, DType.Q8_0, (256, 256))
        assert found.read > 1e6 and found.move > 1e6 and 0 < found.call < 1 and 0 <= found.launch < 1
        assert measured_rates(device, DType.Q8_0, (256, 256)) is found


def test_the_time_of_a_token_is_that_of_its_bytes_calls_and_nodes(
    models: Callable[..., Path], pose: Callable[..., None]
) -> None:
    pose({CARD: SLOW, "CPU": FAST})
    strategies = planned(models("qwen3"), [CARD, "CPU"])
    cost = strategies["layer"].costs[CARD]
    assert cost.read > 1e6 and cost.kv_read == 3 * 2 * 256 * 128 * 2 and cost.calls > 3 < cost.launches
    assert cost.seconds == pytest.approx(
        (cost.read + cost.kv_read + cost.copied) / 1e9 + 1e-4 * cost.calls + 1e-5 * cost.launches
    )
    host = strategies["fastest"].costs["CPU"]
    assert (host.read, host.kv_read, host.copied, host.calls) == (cost.read, cost.kv_read, 0, 0)
    assert host.seconds == pytest.approx((host.read + host.kv_read) / 1e11 + 1e-6 * host.launches)
    shared = strategies["tensor"].costs[f"{CARD}+CPU"]
    assert shared.read == cost.read and shared.calls >= 3 * 2 * 2 + cost.calls
    assert shared.seconds > cost.read / 2 / 1e9  # the slower half, not both


def test_the_cheapest_that_fits_is_taken(models: Callable[..., Path], pose: Callable[..., None]) -> None:
    path = models("llama", "q8_0", 5)
    pose({CARD: SLOW, "CPU": FAST})
    assert planned(path, [CARD, "CPU"])[BEST].name == "fastest"
    pose({CARD: FAST, "CPU": SLOW})
    strategies = planned(path, [CARD, "CPU"])
    assert (
        strategies[BEST].name == "layer"
        and strategies["fastest"].why == "the devices are already in order of speed"
    )
    times = []
    assert strategies["layer"].fit is not None
    whole = strategies["layer"].fit.table.total(CARD)
    for part in (4, 3, 2, 1):
        each = planned(path, [CARD, "CPU"], {CARD: whole * part // 4})["layer"]
        assert not each.short
        times.append(each.time)
    assert times == sorted(times) and len(set(times)) == 4, "what has less room takes longer"
    pose({CARD: SLOW, "CPU": FAST})
    strategies = planned(path, [CARD, "CPU"], {"CPU": 1000})
    assert set(strategies["fastest"].short) == {"CPU"}, "the fastest does not fit"


def test_other_parameters_keep_the_order_of_devices(models: Callable[..., Path]) -> None:
    with ExitStack() as resources:
        planner = open_planner(resources, models(), Placement([CARD, "CPU"]), 64)
        fastest = planner.over(resources, [CARD, "CPU"], planner.requested, ["CPU", CARD])
        assert fastest.order == fastest.with_params(n_ctx=32).order == ["CPU", CARD]


def test_strategies_that_are_not_possible_say_why(
    models: Callable[..., Path], pose: Callable[..., None]
) -> None:
    pose({CARD: SLOW, "CPU": FAST, "LLVM": FAST})
    strategies = planned(models("qwen3moe"), [CARD, "CPU"])
    assert strategies["tensor"].why.startswith(
        f"{CARD}+CPU: different devices cannot share layers with experts"
    )
    assert strategies["row"].why == f"rows need several OpenCL devices; there is only {CARD}"
    assert (
        planned(models(), [f"{CARD}+CPU", "CPU"])["tensor"].why == "the request already joins devices with +"
    )
    assert [*planned(models(), ["CPU"])] == ["layer", BEST]
    assert [*planned(models(), [CARD, "CPU"], layers=1)] == ["layer", BEST]
    for name, says in (
        ("row", "the layers of each device are given, or there is only one"),
        ("rows", "'row'"),
    ):
        with pytest.raises(ArgumentError, match=says):
            TextModel(models(), placement=Placement(["CPU"], name))


def test_a_model_is_loaded_by_a_strategy(models: Callable[..., Path], pose: Callable[..., None]) -> None:
    pose({CARD: SLOW, "CPU": FAST})
    for name, home in (("layer", CARD), ("fastest", "CPU"), (BEST, "CPU"), ("tensor", f"{CARD}+CPU")):
        with TextModel(models(), placement=Placement([CARD, "CPU"], name), n_ctx=64) as model:
            assert {model.homes[i] for i in range(3)} == {home} == {model.homes["output"]}
            assert len(model.generate([5, 6], max_tokens=2, ignore_eos=True).tokens) == 2
            forecast, allocated = model.memory
            assert forecast == allocated


def test_the_command_shows_the_strategies(
    models: Callable[..., Path], pose: Callable[..., None], capsys: Any
) -> None:
    pose({CARD: SLOW, "CPU": SLOW})
    asked = ["fit", str(models()), "-d", f"{CARD},CPU", "--ctx", "256"]
    assert run([*asked, "--bandwidth", "CPU=100G"]) == 0
    text = capsys.readouterr().out
    assert "Token [ms]" in text and "rows need several" in text and "--split-mode fastest" in text
    assert f"{CARD}: nothing" in text
    assert run([*asked, "--bandwidth", f"{CARD}=100G", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["split_mode"] == "layer"
    assert [each["split_mode"] for each in found["split_modes"]] == list(STRATEGIES)
    assert (
        found["split_modes"][0]["seconds"] < found["split_modes"][2]["seconds"]
        and "why_not" in found["split_modes"][3]
    )
    assert run([*asked, "--split-mode", "row"]) == 1
    assert "split mode 'row': rows need several" in capsys.readouterr().err
    assert run([*asked, "--bandwidth", "CUDA7=1G"]) == 1
    assert "bandwidth: 'CUDA7' is none of the devices" in capsys.readouterr().err


TWO = """
import sys
from contextlib import ExitStack
import numpy as np
from ggmlb.models import Placement, TextModel
from ggmlb.models.text.planner import open_planner
from ggmlb.models.text.strategies import StrategyPlanner

path, devices, prompt = sys.argv[1], ["OpenCL0", "OpenCL1", "CPU"], [5, 6, 7, 8]
with TextModel(path, ["CPU"], n_ctx=64) as model:
    expected = model.logits(prompt)
limits = {}
for _ in range(2):
    with ExitStack() as resources:
        asked = open_planner(resources, path, Placement(devices, limits=limits), 64)
        strategies = StrategyPlanner(resources, asked).planned()
        assert [each.why for each in strategies if each.name != "fastest"] == ["", "", ""], strategies
    tables = {each.name: each.fit.table for each in strategies if each.fit}
    for each in ("layer", "tensor", "row"):
        with TextModel(path, placement=Placement(devices, each, limits=limits), n_ctx=64) as model:
            forecast, allocated = model.memory
            assert forecast == allocated == tables[each], (each, forecast, allocated)
            assert np.abs(model.logits(prompt) - expected).max() < 2e-2, each
            assert all(allocated.total(name) <= most for name, most in limits.items())
            of_weights = [allocated.total(name, "weights") for name in devices]
            assert each == "layer" or min(of_weights[:2]) > 0, (each, allocated)
    whole = tables["layer"].total("OpenCL0")
    limits = {"OpenCL0": whole * 2 // 3, "OpenCL1": whole // 3}
print("done")
"""


def test_layers_and_rows_over_two_uneven_devices(models: Callable[..., Path]) -> None:
    done = python("-c", TWO, str(models("llama", "f32")), POCL_DEVICES="pthread pthread")
    if "RegistryError" in done.stderr and "OpenCL1" in done.stderr:
        pytest.skip("the OpenCL runtime is not PoCL")
    assert done.stdout.strip() == "done", done.stderr
