"""Most likely tokens that a device finds, which are read in place of all logits; here, an OpenCL device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggmlb
from ggmlb import Tensor
from ggmlb.models import Placement, TextModel
from ggmlb.models.runs import Runs
from ggmlb.models.text.sampling import N_BEST

PROMPTS = [[260 + (7 * i) % 55 for i in range(n)] for n in (9, 30, 2)]
ON_OPENCL: dict[str, Any] = {"devices": ["OpenCL0", "CPU"], "placement": Placement(layers={"OpenCL0": "all"})}

pytestmark = pytest.mark.skipif(
    "OpenCL0" not in [d.name for d in ggmlb.devices()], reason="a device with memory of its own"
)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of each read of results."""
    found: list[int] = []
    inner = Runs.read

    def counted(runs: Any, *results: Tensor) -> list[np.ndarray]:
        found.append(sum(result.nbytes for result in results))
        return inner(runs, *results)

    monkeypatch.setattr(Runs, "read", counted)
    yield found


def tokens(path: Path, n_best: int, zero: bool = False, **options: Any) -> list[list[int]]:
    """Tokens generated after the prompts, alone and in a batch; the model finds the `n_best` likeliest."""
    with TextModel(path, n_ctx=256, **ON_OPENCL) as model:
        model._engine.decoder._n_best = n_best
        if zero:
            head = model._loaded.tensors["output.weight"]
            head.set(np.zeros(head.nbytes, np.uint8))
        common = {"max_tokens": 5, "ignore_eos": True, **options}
        return [
            *(found.tokens for found in model.generate_many(PROMPTS, **common)),
            model.generate(PROMPTS[0], **common).tokens,
        ]


@pytest.mark.parametrize("kind", ["llama", "mamba"])
@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 2, "top_p": 1, "min_p": 0, "top_k": 60},
], ids=["greedy", "default", "wide"])  # fmt: skip
def test_tokens_are_the_same(
    models: Callable[..., Path], read: list[int], kind: str, options: dict[str, Any]
) -> None:
    expected = tokens(models(kind), 0, **options)
    assert min(read) > 8 * N_BEST
    read.clear()
    assert tokens(models(kind), N_BEST, **options) == expected
    assert {8 * N_BEST * 4, 8 * N_BEST} <= set(read) and set(read[-4:]) == {8 * N_BEST}


@pytest.mark.parametrize("options", [{"temperature": 0}, {"seed": 5}], ids=["greedy", "default"])
def test_of_equal_logits_the_first_tokens_are_taken(
    models: Callable[..., Path], read: list[int], options: dict[str, Any]
) -> None:
    """A device may have others among its candidates, so all logits are read."""
    found = tokens(models(), N_BEST, zero=True, **options)
    assert found == tokens(models(), 0, zero=True, **options)
    assert max(max(row) for row in found) < 40 and max(read) > 8 * N_BEST * 4


def test_options_that_need_all_logits(models: Callable[..., Path], read: list[int]) -> None:
    with TextModel(models(), n_ctx=256, **ON_OPENCL) as model:
        model._engine.decoder._n_best = N_BEST
        found = model.generate(PROMPTS[0], max_tokens=3, logprobs=2, temperature=0, ignore_eos=True)
        assert [ids[0] for ids, _ in found.logprobs] == found.tokens
        assert min(read) > 8 * N_BEST


def test_processors_find_none(models: Callable[..., Path]) -> None:
    with TextModel(models(), n_ctx=256, **ON_OPENCL) as model:
        assert model._engine.decoder._n_best == 0


def test_nan_is_an_error(models: Callable[..., Path]) -> None:
    with TextModel(models(), n_ctx=256, **ON_OPENCL) as model:
        model._engine.decoder._n_best = N_BEST
        head = model._loaded.tensors["output.weight"]
        values = head.to_numpy().copy()
        values[7] = -np.float32(np.nan)
        head.set_array(values)
        with pytest.raises(ggmlb.Error, match="NaN"):
            model.generate(PROMPTS[0], max_tokens=3)
