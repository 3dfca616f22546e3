"""Fitting of text models to devices' memory, from metadata alone; limits of memory are posed."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import AllocationError, ArgumentError
from ggmlb.cli.app import run
from ggmlb.models import Placement, TextModel
from ggmlb.models.mapped_file import Extent
from ggmlb.models.text.planner import Planner, open_planner
from tests.models.test_text_model import PROMPT, log_probs
from tests.support.adapters import adapted, write_adapter
from tests.support.text_models import N_VOCAB

CARD, OTHER = "OpenCL0", "OpenCL1"
NAMES = {d.name for d in ggmlb.devices()}
pytestmark = pytest.mark.skipif(CARD not in NAMES, reason="there is no device with memory of its own")
N_LAYER = 5


@pytest.fixture
def models(models: Callable[..., Path]) -> Callable[..., Path]:
    return lambda kind="llama", dtype="q8_0": models(kind, dtype, N_LAYER)


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Forecasts come from metadata alone."""
    if "computes" not in request.node.name:
        monkeypatch.setattr(Extent, "rows", None)


def planned(
    path: Path, limits: Mapping[str, int], devices: list[str] | None = None, n_ctx: int = 256, **options: Any
) -> tuple[Planner, Any]:
    """The planner, and the placement that it finds."""
    with ExitStack() as resources:
        asked = Placement(devices or [CARD, "CPU"], limits=limits, **options)
        planner = open_planner(resources, path, asked, n_ctx)
        return planner, planner.best()


def on(found: Any, device: str) -> list[int]:
    return [i for i, home in found.placement.homes.items() if home == device and isinstance(i, int)]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", ["llama", pytest.param("gemma2", marks=SLOW), pytest.param("mamba", marks=SLOW)]
)
def test_as_many_of_the_last_layers_as_have_room(models: Callable[..., Path], kind: str) -> None:
    sizes = {}
    for n in range(N_LAYER + 1):
        for output in ("CPU", CARD):
            said: dict[str, list[int | str]] = {CARD: [*range(N_LAYER - n, N_LAYER)], "CPU": ["embeddings"]}
            said[output].append("output")
            _, found = planned(models(kind), {}, layers=said)
            sizes[n, output] = found.table.total(CARD), found.table.total(CARD, "weights")
    assert sizes[0, "CPU"] == (0, 0)
    ends = sorted(total for total, _ in sizes.values())[1:]
    for limit in [n + more for n in ends for more in (-1, 0)]:
        most = max(weights for total, weights in sizes.values() if total <= limit)
        planner, found = planned(models(kind), {CARD: limit})
        assert found.table.total(CARD, "weights") == most and not planner.lacks(found.table), limit
        n, output = len(on(found, CARD)), found.placement.homes["output"]
        assert on(found, CARD) == list(range(N_LAYER - n, N_LAYER))
        assert (found.table.total(CARD), most) == sizes[n, output]


@pytest.mark.parametrize("kind", ["falcon-h1", "lfm2"])
def test_keys_and_states_count_where_they_are(models: Callable[..., Path], kind: str) -> None:
    """An override of keys alone leaves states with their layers, and the reverse."""
    sizes = {}
    for moved in ("", "cache_", "state_", "cache_|state_"):
        asked = Placement([CARD, "CPU"], overrides={moved: "CPU"} if moved else {})
        with ExitStack() as resources:
            base = open_planner(resources, models(kind), asked, 256)._sizes().base
        sizes[moved] = np.array([base[i, CARD] for i in range(N_LAYER)])
    keys, states = sizes[""] - sizes["cache_"], sizes[""] - sizes["state_"]
    assert [bool(n) for n in keys] == [kind == "falcon-h1" or i % 2 == 1 for i in range(N_LAYER)]
    assert [bool(n) for n in states] == [kind == "falcon-h1" or i % 2 == 0 for i in range(N_LAYER)]
    assert np.array_equal(sizes[""] - keys - states, sizes["cache_|state_"])


def test_a_card_too_small_for_the_output_takes_layers(models: Callable[..., Path]) -> None:
    path = models("gemma3", "q8_0")
    _, found = planned(path, {}, layers={CARD: "3-4", "CPU": "output"})
    limit = found.table.total(CARD)
    planner, found = planned(path, {CARD: limit})
    assert on(found, CARD) == [3, 4] and found.placement.homes["output"] == "CPU"
    assert found.table.total(CARD) == limit and not planner.lacks(found.table)


def test_an_output_that_is_the_embeddings_is_counted_once_in_the_file(models: Callable[..., Path]) -> None:
    path = models("gemma3", "q8_0")
    _, found = planned(path, {}, ["CPU"])
    assert found.table.total("CPU", "weights") < path.stat().st_size


def test_experts_leave_the_device_before_layers(models: Callable[..., Path]) -> None:
    path = models("qwen3moe")
    _, everything = planned(path, {})
    _, no_experts = planned(path, {}, overrides={"exps": "CPU"})
    full, least = everything.table.total(CARD), no_experts.table.total(CARD)
    assert {no_experts.placement.experts_device(i) for i in range(N_LAYER)} == {"CPU"} and least < full / 2
    moved = []
    for limit in np.linspace(full, least, 7).astype(int).tolist():
        planner, found = planned(path, {CARD: limit})
        assert not planner.lacks(found.table) and on(found, CARD) == list(range(N_LAYER))
        moved.append(sorted(found.placement.experts))
    assert len(set(map(len, moved))) > 4 and moved[0] == [] and moved[-1] == list(range(N_LAYER))
    assert all(set(few) <= set(more) for few, more in pairwise(moved))
    planner, found = planned(path, {CARD: least * 4 // 5})
    assert 0 < len(on(found, CARD)) < N_LAYER and not planner.lacks(found.table)
    assert set(found.placement.experts) == set(on(found, CARD))


@pytest.mark.skipif(OTHER not in NAMES, reason="there is one device with memory of its own")
def test_uneven_devices_are_filled_in_their_order(models: Callable[..., Path]) -> None:
    path, devices = models(), [CARD, OTHER, "CPU"]
    _, found = planned(path, {}, layers=3)
    first = found.table.total(CARD)
    _, found = planned(path, {}, [OTHER, "CPU"], layers={OTHER: "0-1"})
    second = found.table.total(OTHER)
    planner, found = planned(path, {CARD: first, OTHER: second}, devices)
    assert [on(found, name) for name in devices] == [[2, 3, 4], [0, 1], []]
    assert not planner.lacks(found.table)
    planner, found = planned(path, {CARD: 10, OTHER: second}, devices)
    assert not on(found, CARD) and on(found, OTHER)[-1] == N_LAYER - 1 and not planner.lacks(found.table)


def test_what_is_loaded_is_missing_in_the_next_forecast(models: Callable[..., Path], request: Any) -> None:
    request.getfixturevalue("monkeypatch").undo()
    path = models()
    before, _ = planned(path, {})
    with TextModel(path, [CARD, "CPU"], n_ctx=256) as model:
        taken = model.memory.allocated.total(CARD)
        during, _ = planned(path, {})
    assert before.free[CARD] - during.free[CARD] == taken > 0


def test_adapters_and_caches_are_predicted(
    models: Callable[..., Path], tmp_path: Path, request: Any, capsys: Any
) -> None:
    request.getfixturevalue("monkeypatch").undo()  # adapters are written, and the model is loaded
    path = models("qwen3moe")
    names = adapted(path)[::4]
    files = [write_adapter(tmp_path / f"{i}.gguf", path, names, seed=i) for i in range(2)]
    options: dict[str, Any] = {"n_ctx": 256, "n_ubatch": 64}
    options["placement"] = Placement([CARD, "CPU"], 3, expert_cache=3 << 20)
    asked = ["fit", str(path), "-d", f"{CARD},CPU", "--ctx", "256", "--expert-cache", "3MiB"]
    asked += ["--ubatch", "64", "--gpu-layers", "3", "--json"]
    assert run(asked) == 0
    plain = json.loads(capsys.readouterr().out)["memory"]
    assert run([*asked, "--lora", f"{files[0]}=0.5", "--lora", str(files[1])]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    gc.collect()  # what other tests have left on the device
    before = ggmlb.device_by_name(CARD).memory[0]
    with TextModel(path, **options, adapters=[(files[0], 0.5), (files[1], 1)]) as model:
        forecast, allocated = model.memory
        assert forecast == allocated and forecast.as_list() == found != plain
        assert before - ggmlb.device_by_name(CARD).memory[0] == allocated.total(CARD)
        assert {"adapters", "experts"} <= {use.kind for use in allocated if use.device == CARD}
        model.generate(PROMPT, max_tokens=2, ignore_eos=True)
        assert model.memory.allocated == allocated, "graphs with adapters have the memory that was reserved"
    with TextModel(path, **options) as model:
        assert model.memory.allocated.as_list() == plain
        first = model.load_adapter(files[0], scale=0)
        model.load_adapter(files[1])
        assert model.memory.forecast == model.memory.allocated == forecast
        model.generate(PROMPT, max_tokens=2, ignore_eos=True)
        first.close()
        assert model.memory.forecast == model.memory.allocated
        assert model.memory.allocated.total(kind="adapters") < forecast.total(kind="adapters")


def test_a_plan_that_stops_fitting_is_told_by_the_figures(models: Callable[..., Path], request: Any) -> None:
    request.getfixturevalue("monkeypatch").undo()
    path = models()
    _, found = planned(path, {}, layers=5)
    _, longer = planned(path, {}, n_ctx=512, layers=5)
    limit = {CARD: found.table.total(CARD)}
    planner, found = planned(path, limit, layers=5)
    assert not planner.lacks(found.table)
    planner, found = planned(path, limit, n_ctx=512, layers=5)
    assert planner.lacks(found.table) == {CARD: longer.table.total(CARD) - limit[CARD]}, "another context"
    n_ctx = 1 << 20
    for _ in range(2):  # as many tokens as the device has room for
        planner, most = planned(path, {}, n_ctx=n_ctx, layers=5)
        for_a_token = (most.table.total(CARD) - longer.table.total(CARD)) / (n_ctx - 512)
        n_ctx += int((planner.free[CARD] - (4 << 20) - most.table.total(CARD)) / for_a_token)
    planner, most = planned(path, {}, n_ctx=n_ctx, layers=5)
    assert not planner.lacks(most.table, is_strict=False)
    with TextModel(path, [CARD, "CPU"], n_ctx=256) as model:
        taken = model.memory.allocated.total(CARD)
        planner, second = planned(path, {}, n_ctx=n_ctx, layers=5)
        short = planner.lacks(second.table, is_strict=False)
    assert second.table == most.table and 0 < short[CARD] <= taken, "a second model"


def test_what_fits_computes_the_same(models: Callable[..., Path]) -> None:
    path = models("llama-experts", "f32")
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    with TextModel(path, [CARD, "CPU"], n_ctx=64) as model:
        full = model.memory.allocated.total(CARD)
    for options, kinds in (
        ({"limits": {CARD: full // 2}}, {"weights", "kv", "compute"}),
        ({"limits": {CARD: full // 3}}, {"weights", "kv", "compute"}),
        ({"overrides": {r"blk\.[0-2]\..*exps": "CPU"}}, {"weights", "kv", "compute"}),
        ({"overrides": {"cache_": "CPU"}}, {"weights", "compute"}),
        ({"layers": {CARD: "all", "CPU": "output"}}, {"weights", "kv", "compute"}),
    ):
        with TextModel(path, placement=Placement([CARD, "CPU"], **options), n_ctx=64) as model:  # type: ignore[arg-type]
            assert np.abs(log_probs(model.logits(PROMPT)) - expected).max() < 2e-2
            forecast, allocated = model.memory
            assert forecast == allocated
            assert {use.kind for use in allocated if use.device == CARD} == kinds
            assert allocated.total(CARD) <= options.get("limits", {CARD: full})[CARD]  # type: ignore
            assert model.scheduler is not None
            attends = {p.device for p in model.scheduler.placement if p.op == "FLASH_ATTN_EXT"}
            assert attends == {"CPU"} if "kv" not in kinds else CARD in attends


def test_what_does_not_fit_is_refused_before_anything_is_read(models: Callable[..., Path]) -> None:
    with pytest.raises(AllocationError, match=r"does not fit: OpenCL0 needs [\d,]+ bytes and has 1,000; `gg"):
        TextModel(models(), placement=Placement([CARD], limits={CARD: 1000}), n_ctx=64)
    with pytest.raises(AllocationError, match="OpenCL0 needs") as caught:
        TextModel(models(), placement=Placement([CARD, "CPU"], 5, limits={CARD: 1000}), n_ctx=64)
    assert caught.value.asked > caught.value.free == 1000
    with pytest.raises(AllocationError, match="CPU needs"):
        TextModel(models(), placement=Placement(["CPU"], limits={"CPU": 1000}), n_ctx=64)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"limits": {"CUDA9": 1}}, "limits: 'CUDA9' is none of the devices; they are OpenCL0, CPU"),
        (
            {"overrides": {"cache_": "CUDA9"}},
            "override 'cache_' is for 'CUDA9'; the devices are OpenCL0, CPU",
        ),
        (
            {"overrides": {"exps": "CPU"}},
            "the override 'exps' matches no tensor; see the names by ggmlb show",
        ),
        (
            {"overrides": {"cache_k": ggmlb.device_by_name("CPU").buffer_type}},
            "the override 'cache_k' moves the KV cache to CPU; give one of the devices OpenCL0, CPU",
        ),
        ({"overrides": {"(": "CPU"}}, r"the override '\(' is not a regular expression"),
        (
            {"layers": -1},
            "layers is -1; give how many of the last layers to put on the first device, 0 or more, or a",
        ),
        ({"layers": "rows"}, "split mode 'rows': there is none of this name; did you mean 'row'"),
    ],
)
def test_placements_that_cannot_be(models: Callable[..., Path], wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        TextModel(models(), placement=Placement([CARD, "CPU"], **wrong))
    with pytest.raises(ArgumentError, match="devices are given twice"):
        TextModel(models(), [CARD], placement=Placement([CARD, "CPU"], **wrong))


def test_options_that_contradict_each_other(models: Callable[..., Path], capsys: Any) -> None:
    path = str(models())
    for options, says in (
        ("-d OpenCL0 --cpu-experts", "--cpu-experts: none of OpenCL0 is a processor; add CPU"),
        ("-d OpenCL0,CPU --kv-on CUDA9", "--kv-on CUDA9: give one of the devices OpenCL0, CPU"),
        ("-d OpenCL0 -ngl 1 --layers-on OpenCL0=1", "--gpu-layers and --layers-on were both given"),
    ):
        assert run(["fit", path, *options.split()]) == 1
        assert says in capsys.readouterr().err
    assert run(["generate", path, "-p", "A", "-ngl", "1", "--split-mode", "row"]) == 1
    assert "--split-mode row chooses the layers; leave out --gpu-layers" in capsys.readouterr().err


# -- the command -----------------------------------------------------------------------------------


def test_the_command_prints_what_fits(models: Callable[..., Path], capsys: Any) -> None:
    path = str(models("qwen3moe"))
    asked = ["fit", path, "-d", f"{CARD},CPU", "--ctx", "256", "--split-mode", "layer"]
    assert run([*asked, "--cpu-experts"]) == 0
    text = capsys.readouterr().out
    assert re.search(
        "further memory of the process: about .* [MG]iB .resident .*, vocabulary .*, scratch ", text
    )
    assert f"{CARD}: layers 0-4, the output; each token reads" in text
    assert "CPU: the embeddings, experts of layers 0-4; each token reads" in text
    assert run([*asked, "--json", "--kv-on", "CPU"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["process"]["resident"] > 16 << 20 and found["process"]["logits"] == 16 * N_VOCAB * 4
    assert (
        found["fits"]
        and found["layers"] == {CARD: "0-4", "CPU": ""}
        and set(found["kv_cache"].values()) == {"CPU"}
    )
    with ExitStack() as resources:
        asked = Placement([CARD, "CPU"], overrides={"cache_": "CPU"})
        planner = open_planner(resources, path, asked, 256)
        assert found["memory"] == planner.forecast(planner.asked).as_list()
    assert found["per_token"][CARD]["copied"] > N_LAYER * 256 * 4  # what attention gives


def test_the_command_tells_what_would_fit(models: Callable[..., Path], capsys: Any) -> None:
    path = str(models())
    _, found = planned(Path(path), {}, n_ctx=4096, layers=4)
    limit = found.table.total(CARD)
    asked = ["fit", path, "-d", f"{CARD},CPU", "--ctx", "4096", "--memory", f"{CARD}={limit}", "--json"]
    assert run([*asked, "--gpu-layers", "5"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert not told["fits"] and told["lacks"][CARD] == told["total"][CARD] - limit > 0
    (advice,) = (a for a in told["would_fit"] if a.startswith("--gpu-layers"))
    assert advice == "--gpu-layers 4"
    assert run([*asked, *advice.split()]) == 0
    assert run(["fit", path, "-d", CARD, "--memory", f"{CARD}=1KiB"]) == 1
    text = capsys.readouterr().out
    assert f"does not fit: {CARD} lacks" in text and "no option makes it fit: name further devices" in text
    small = [*asked[:4], "--ctx", "100000", "--kv-type", "f32", "--memory", f"{CARD}={8 * limit}", "--json"]
    assert run([*small, "--gpu-layers", "5"]) == 1
    told = json.loads(capsys.readouterr().out)["would_fit"]
    for advice in told:
        assert run([*small, "--gpu-layers", "5", *advice.split()]) == 0
    assert any(a.startswith("--ctx") for a in told)


def test_a_pattern_that_is_none(models: Callable[..., Path], capsys: Any) -> None:
    assert run(["fit", str(models()), "-d", "OpenCL0,CPU", "--override", "(=CPU"]) == 1
    assert "override '(' is not a regular expression" in capsys.readouterr().err


@pytest.mark.parametrize("size", ["OpenCL0", "=1MiB", "OpenCL0=much", "OpenCL0=1XiB", "OpenCL0=-1"])
def test_sizes_that_are_none(models: Callable[..., Path], capsys: Any, size: str) -> None:
    assert run(["fit", str(models()), "--memory", size]) == 1
    assert re.search("give (NAME=SIZE|a size), as .*200MiB", capsys.readouterr().err)
