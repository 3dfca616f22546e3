"""Text models: random ones of every architecture, on every device here, beside the CPU in float32."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import ggmlb
from ggmlb import ArgumentError, FreedError, ModelError
from ggmlb.models import Options, Placement, TextModel
from ggmlb.models.runs import Runs
from ggmlb.models.text.generation import n_equal
from tests.support.text_models import KINDS, N_VOCAB, write_text_model

PROMPT = [1, *(260 + (7 * i) % 55 for i in range(20))]
DEVICES = [d.name for d in ggmlb.devices() if d.name != "CPU"]


def log_probs(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def step_by_step(model: TextModel, n: int) -> np.ndarray:
    """Logits after each token of `PROMPT` from the `n`-th on, but the last, computed one at a time."""
    forced = iter(PROMPT[n:])
    steps: list[np.ndarray] = []

    def force(tokens: object, logits: np.ndarray) -> np.ndarray:
        steps.append(logits)
        return np.where(np.arange(N_VOCAB) == next(forced), 1, 0).astype(np.float32)

    model.generate(
        PROMPT[:n], max_tokens=len(PROMPT) - n, temperature=0, logits_processor=force, ignore_eos=True
    )
    return np.array(steps)


@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_is_as_all_at_once(models: Callable[..., Path], kind: str) -> None:
    """Keys and values that are kept, masks, windows and padding change nothing."""
    with TextModel(models(kind), ["CPU"], n_ctx=64) as model:
        whole = model.logits(PROMPT)
        steps = step_by_step(model, 6)
    assert np.abs(log_probs(steps) - log_probs(whole[5:-1])).max() < 2e-3


@pytest.mark.skipif(len(DEVICES) < 2, reason="OpenCL and LLVM are not both here")
@pytest.mark.parametrize("kind", ["llama", "llama-experts", "gemma3", "mamba"])
def test_layers_on_three_devices(models: Callable[..., Path], kind: str) -> None:
    with TextModel(models(kind), ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    placement = Placement(["OpenCL0", "LLVM", "CPU"], {"OpenCL0": "0", "LLVM": "1"})
    with TextModel(models(kind), placement=placement, n_ctx=64) as model:
        found = log_probs(model.logits(PROMPT))
        assert model.scheduler is not None
        assert {p.device for p in model.scheduler.placement} == {"OpenCL0", "LLVM", "CPU"}
    assert np.abs(found - expected).max() < 2e-2


@pytest.mark.skipif("LLVM" not in DEVICES, reason="needs llvmlite")
@pytest.mark.parametrize("kind", ["qwen3moe", "gpt-oss", "mamba", "rwkv7", "gemma4-inputs"])
def test_no_layer_leaves_llvm(models: Callable[..., Path], kind: str) -> None:
    """Neither in a prompt nor in a single step: a graph is one split."""
    with TextModel(models(kind), ["LLVM", "CPU"], n_ctx=64) as model:
        for run in (lambda: model.logits(PROMPT), lambda: model.generate(PROMPT, max_tokens=3)):
            run()
            assert model.scheduler is not None
            assert model.scheduler.n_splits == 1
            assert {p.device for p in model.scheduler.placement} == {"LLVM"}


ROUNDED = 0.06
"""Bound of the mean distance from the CPU where activations are rounded to 8 bits; elsewhere 2e-3."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f16", "q8_0", "q4_0", "q4_1", "q4_K", "q6_K"])
def test_types_of_weights(models: Callable[..., Path], dtype: str, device: str) -> None:
    with TextModel(models("llama", dtype), ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    with TextModel(models("llama", dtype), [device, "CPU"], n_ctx=64) as model:
        found = log_probs(model.logits(PROMPT))
    assert np.abs(found - expected).mean() < (2e-3 if dtype == "f16" or device == "OpenCL0" else ROUNDED)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_devices_agree(models: Callable[..., Path], kind: str, device: str) -> None:
    with TextModel(models(kind), ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    with TextModel(models(kind), placement=Placement([device, "CPU"], {device: "1-2"}), n_ctx=64) as model:
        found = log_probs(model.logits(PROMPT))
        assert model.scheduler is not None and model.scheduler.n_splits >= 1
    assert np.abs(found - expected).max() < (3e-2 if "ggml" in device else 2e-2)  # experts in f16


KV_MEANS = {"f32": 1e-4, "f16": 2e-3, "bf16": 0.02, "q8_0": 0.03, "q4_0": 0.4}
"""Bounds of the mean distance of log-probabilities from those with keys and values in f32."""


@pytest.mark.parametrize("kv_type", KV_MEANS)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_types_of_keys_and_values(models: Callable[..., Path], kind: str, kv_type: str) -> None:
    """Each rounds as its blocks do, and alike on every device but ggml's, which rounds queries too."""
    with TextModel(models(kind), ["CPU"], n_ctx=64, kv_type="f32") as model:
        exact = log_probs(model.logits(PROMPT))
    with TextModel(models(kind), ["CPU"], n_ctx=64, kv_type=kv_type) as model:
        expected = log_probs(model.logits(PROMPT))
    assert np.abs(expected - exact).mean() < KV_MEANS[kv_type]
    for device in DEVICES:
        with TextModel(models(kind), [device, "CPU"], n_ctx=64, kv_type=kv_type) as model:
            found = log_probs(model.logits(PROMPT))
        part = 2 if "ggml" in device else 10
        assert np.abs(found - expected).mean() < KV_MEANS[kv_type] / part + 1e-3


def test_types_of_keys_and_values_that_are_wrong(models: Callable[..., Path]) -> None:
    with pytest.raises(
        ArgumentError, match=r"q4_k has blocks of 256 elements, which do not divide .* heads of 64; use f16"
    ):
        TextModel(models(), ["CPU"], n_ctx=64, kv_type="q4_K")
    with pytest.raises(ggmlb.DTypeError, match="q99"):
        TextModel(models(), ["CPU"], n_ctx=64, kv_type="q99")


@pytest.mark.parametrize("device", DEVICES)
def test_gpu_layers_are_the_last_ones(models: Callable[..., Path], device: str) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    for n, on_device in ((0, set()), (2, {1, 2}), (99, {0, 1, 2})):
        with TextModel(models(), placement=Placement([device, "CPU"], n), n_ctx=64) as model:
            found = {part for part, home in model.homes.items() if home == device}
            assert found == on_device | ({"output"} if n else set())
            assert np.abs(log_probs(model.logits(PROMPT)) - expected).max() < 2e-2


@pytest.mark.skipif("OpenCL0" not in DEVICES, reason="LLVM computes in the CPU's memory: nothing is moved")
@pytest.mark.parametrize("kind", ["llama-experts", "qwen3moe"])
def test_experts_stay_on_the_cpu(models: Callable[..., Path], kind: str) -> None:
    with TextModel(models(kind), ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT[:1]))
    placement = Placement(["OpenCL0", "CPU"], overrides={"exps": "CPU"})
    with TextModel(models(kind), placement=placement, n_ctx=64) as model:
        found = log_probs(model.logits(PROMPT[:1]))
        assert model.scheduler is not None
        placed = {(p.op, p.device) for p in model.scheduler.placement}
    assert ("MUL_MAT_ID", "CPU") in placed and ("MUL_MAT_ID", "OpenCL0") not in placed
    assert ("MUL_MAT", "OpenCL0") in placed
    assert np.abs(found - expected).max() < 2e-2
    with pytest.raises(ArgumentError, match=r"'exps' is for 'CUDA7'; the devices are CPU"):
        TextModel(models(kind), placement=Placement(["CPU"], overrides={"exps": "CUDA7"}))


@pytest.mark.skipif("OpenCL0" not in DEVICES, reason="LLVM and the CPU compute in turn")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mamba"])
def test_a_pipeline_of_devices(
    models: Callable[..., Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's parts are passed on without waiting for any but the last, and give the same logits."""
    waits: list[object] = []
    wait = Runs.wait
    monkeypatch.setattr(Runs, "wait", lambda runs: (waits.append(runs), wait(runs)))
    options = Options(max_tokens=3, temperature=0, ignore_eos=True, logprobs=9)
    asked = {"placement": Placement(["OpenCL0", "CPU"], {"OpenCL0": "1-2"}), "n_ctx": 64}
    with TextModel(models(kind), **asked) as model:
        expected = model.generate(PROMPT, options)
    with ggmlb.sanitize(), TextModel(models(kind), **asked, n_ubatch=4) as model:
        waits.clear()
        found = model.generate(PROMPT, options)
        # Twenty-one tokens are six parts, of which only the last is waited for, as is each new token.
        assert len(waits) == options.max_tokens
        assert model.scheduler is not None and model.scheduler.n_copies == 4
        many = model.generate_many([PROMPT, PROMPT[3:], PROMPT[:11]], options)
    assert many[0].tokens == found.tokens == expected.tokens
    for one in (found, many[0]):
        assert [ids for ids, _ in one.logprobs] == [ids for ids, _ in expected.logprobs]
        assert np.allclose([p for _, p in one.logprobs], [p for _, p in expected.logprobs], atol=2e-3)
    with pytest.raises(ArgumentError, match="n_ubatch is 513; give 1 to 512"):
        TextModel(models(kind), ["CPU"], n_ubatch=513)


@pytest.mark.skipif("OpenCL0" not in DEVICES, reason="no device here has memory of its own")
@pytest.mark.parametrize("kind", ["llama-experts", "qwen3moe", "qwen2moe", "gpt-oss"])
def test_experts_used_most_are_cached(models: Callable[..., Path], kind: str) -> None:
    """Steps of one token compute from the cache, whatever it holds; longer ones from host memory."""
    devices = ["OpenCL0", "CPU"]
    with TextModel(models(kind), devices, n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    with pytest.raises(
        ArgumentError, match=r"one expert of each layer takes [\d,]+, .* give ([\d,]+)"
    ) as found:
        TextModel(models(kind), devices, Placement(expert_cache=1), n_ctx=64)
    least = int(str(found.value).rpartition("give ")[2].removesuffix(" or more").replace(",", ""))
    misses = []
    for n_slots in (2, 3, 4):
        placement = Placement(devices, expert_cache=least * n_slots // 2)
        with TextModel(models(kind), placement=placement, n_ctx=64) as model:
            steps = step_by_step(model, 1)
            assert np.abs(log_probs(steps) - expected[:-1]).max() < 2e-2
            assert model.experts is not None and model.scheduler is not None
            assert model.experts.n_slots == n_slots and model.experts.nbytes == least * n_slots // 2
            assert model.experts.n_hits + model.experts.n_misses == 2 * 3 * len(steps)
            assert {p.device for p in model.scheduler.placement if p.op == "MUL_MAT_ID"} == {"OpenCL0"}
            misses.append(model.experts.n_misses)
            assert np.abs(log_probs(model.logits(PROMPT)) - expected).max() < 2e-2
    assert misses[0] > misses[1] > misses[2] and misses[2] <= 4 * 3


@pytest.mark.skipif("OpenCL0" not in DEVICES, reason="no device here has memory of its own")
def test_layers_may_use_different_numbers_of_experts(tmp_path: Path) -> None:
    used = {"expert_used_count": np.array([1, 3, 2], np.int32)}
    path = write_text_model(tmp_path / "m.gguf", "llama-experts", changes=used)
    devices = ["OpenCL0", "CPU"]
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
        assert model.trace(PROMPT, "blk.*.ffn_chosen")["blk.1.ffn_chosen"].shape == (len(PROMPT), 3)
    with pytest.raises(ArgumentError, match=r"a token uses 3: give ([\d,]+)") as found:
        TextModel(path, devices, Placement(expert_cache=1), n_ctx=64)
    least = int(str(found.value).rpartition("give ")[2].removesuffix(" or more").replace(",", ""))
    with TextModel(path, placement=Placement(devices, expert_cache=least), n_ctx=64) as model:
        assert np.abs(log_probs(step_by_step(model, 1)) - expected[:-1]).max() < 2e-2


def test_an_expert_cache_that_cannot_be(models: Callable[..., Path]) -> None:
    with pytest.raises(ArgumentError, match="has no experts"):
        TextModel(models(), placement=Placement(["CPU"], expert_cache=1 << 30))
    with pytest.raises(ArgumentError, match="no layer is on a GPU"):
        TextModel(models("qwen3moe"), placement=Placement(["CPU"], expert_cache=1 << 30))


def test_the_same_seed_gives_the_same_text(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        first = model.generate(PROMPT, max_tokens=12, seed=7, temperature=1.5, top_k=0, top_p=1, min_p=0)
        again = model.generate(PROMPT, max_tokens=12, seed=7, temperature=1.5, top_k=0, top_p=1, min_p=0)
        other = model.generate(PROMPT, max_tokens=12, seed=8, temperature=1.5, top_k=0, top_p=1, min_p=0)
    assert first.tokens == again.tokens != other.tokens


def test_sequences_that_take_turns_do_not_see_each_other(models: Callable[..., Path]) -> None:
    prompts = [PROMPT, PROMPT[:3], PROMPT[5:9], PROMPT[2:14], [5]]
    options = Options(max_tokens=9, temperature=0, ignore_eos=True, logprobs=3)
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        alone = [model.generate(prompt, options) for prompt in prompts]
        together = model.generate_many(prompts, options)
    for one, other in zip(alone, together, strict=True):
        assert one.tokens == other.tokens
        assert np.allclose([p for _, p in one.logprobs], [p for _, p in other.logprobs], atol=2e-3)


def test_sessions_keep_their_room(models: Callable[..., Path]) -> None:
    """Others wait for the room that is left; a session that found none has kept nothing."""
    options = Options(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = [PROMPT[:5], PROMPT[3:9], PROMPT[6:11]]
    with TextModel(models(), ["CPU"], n_ctx=36) as model:
        alone = [model.generate(prompt, options).tokens for prompt in prompts]
        session, other = model.session(), model.session()
        session.generate(PROMPT[:15], options)
        assert [found.tokens for found in model.generate_many(prompts, options)] == alone
        with pytest.raises(ggmlb.AllocationError, match="end other sequences"):
            other.generate(PROMPT[:18], options)
        assert other.tokens == []
        session.close()
        assert other.generate(PROMPT[:18], options).tokens == model_alone(
            models("llama"), PROMPT[:18], options
        )


@pytest.mark.parametrize("kind", ["mamba", "rwkv7", "lfm2"])
def test_states_of_a_prompt_longer_than_a_batch(models: Callable[..., Path], kind: str) -> None:
    prompt = (PROMPT * 26)[:531]
    with TextModel(models(kind), ["CPU"], n_ctx=600) as model:
        found = model.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True, logprobs=5)
        expected = log_probs(model.logits(prompt)[-1])
    ids, values = found.logprobs[0]
    assert np.abs(expected[ids] - values).max() < 2e-3


@pytest.mark.skipif("OpenCL0" not in DEVICES, reason="a device with memory of its own")
@pytest.mark.parametrize("moved", ["cache_", "state_"])
def test_keys_and_states_of_a_layer_have_their_own_places(models: Callable[..., Path], moved: str) -> None:
    with TextModel(models("falcon-h1"), ["CPU"], n_ctx=64) as model:
        expected = log_probs(model.logits(PROMPT))
    asked = Placement(["OpenCL0", "CPU"], {"OpenCL0": "all"}, {moved: "CPU"})
    with TextModel(models("falcon-h1"), placement=asked, n_ctx=64) as model:
        memory = model._loaded.memory
        assert memory.cells is not None and memory.slots is not None
        on_host = [all(b.is_host for b in part.buffers) for part in (memory.cells, memory.slots)]
        assert on_host == [moved == "cache_", moved == "state_"]
        assert np.abs(log_probs(model.logits(PROMPT)) - expected).max() < 2e-2
        forecast, allocated = model.memory
        assert forecast == allocated


@pytest.mark.parametrize("kind", ["mamba", "rwkv7", "lfm2"])
def test_recurrent_sequences_share_slots(models: Callable[..., Path], kind: str) -> None:
    """More prompts than slots wait for one another; sessions hold theirs, and go on from a whole prefix."""
    options = Options(max_tokens=3, temperature=0, ignore_eos=True)
    prompts = [PROMPT[i % 7 : 9 + i % 5] for i in range(20)]
    with TextModel(models(kind), ["CPU"], n_ctx=1024) as model:
        alone = [model.generate(prompt, options).tokens for prompt in prompts]
        sessions = [model.session() for _ in range(14)]
        for session, prompt in zip(sessions, prompts, strict=False):
            session.generate(prompt, options)
        assert [found.tokens for found in model.generate_many(prompts, options)] == alone
        first = sessions[0]
        for prompt in (first.tokens + PROMPT[:3], PROMPT[:5], first.tokens):
            assert first.generate(prompt, options).tokens == model.generate(prompt, options).tokens
        more = [model.session() for _ in range(3)]
        for session in more[:2]:
            session.generate([1], options)
        with pytest.raises(ggmlb.AllocationError, match="other sequences use all 16"):
            more[2].generate([1], options)
        assert more[2].tokens == []
        more[0].close()
        assert more[2].generate(PROMPT[:4], options).tokens == model_alone(models(kind), PROMPT[:4], options)


@pytest.mark.parametrize(
    ("kind", "device"),
    [("mamba", "CPU"), ("rwkv7", "LLVM"), ("falcon-h1", "OpenCL0"), ("lfm2", "CPU+OpenCL0")],
)
def test_states_return_to_the_end_of_an_earlier_prompt(
    models: Callable[..., Path], kind: str, device: str
) -> None:
    """As if a chat's next prompt lacks the end of the last one, and what was generated after it."""
    prompt = (PROMPT * 3)[:40]
    options = Options(max_tokens=5, temperature=0, ignore_eos=True)
    turns = [prompt, [*prompt[:36], *PROMPT[::-1][:14]], [*prompt[:33], 7, 8, 9], [*prompt[:20], 7, 8, 9]]
    if not {*device.split("+")} <= {*DEVICES, "CPU"}:
        pytest.skip(f"not here: {device}")
    with TextModel(models(kind), list(dict.fromkeys([device, "CPU"])), n_ctx=512) as model:
        alone = [model.generate(turn, options).tokens for turn in turns]
        memory = model._loaded.memory
        assert memory.slots is not None
        with model.session() as session:
            kept = []
            for turn, expected in zip(turns, alone, strict=True):
                kept.append(memory.reachable(session._sequence, n_equal(session.tokens, turn, len(turn) - 1)))
                assert session.generate(turn, options).tokens == expected
            assert kept == [0, 32, 32, 0], "the checkpoint of the first prompt, of 40, serves twice"
        assert not memory.slots._checkpoints, "checkpoints end with their sequence"
        with model.queue() as queue:
            jobs = []
            for turn, expected in zip(turns, alone, strict=True):
                jobs.append(queue.submit(turn, options))
                assert jobs[-1].wait(600).tokens == expected
            assert [job.n_reused for job in jobs] == [0, 32, 32, 0]


def test_the_oldest_checkpoint_makes_room(models: Callable[..., Path]) -> None:
    options = Options(max_tokens=1, temperature=0)
    with TextModel(models("mamba"), ["CPU"], n_ctx=1024) as model:
        slots = model._loaded.memory.slots
        assert slots is not None
        sessions = [model.session() for _ in range(6)]
        for session in sessions:
            session.generate((PROMPT * 3)[:40], options)
        assert [slots.reachable(s._sequence, 39) for s in sessions] == [0, 0, 32, 32, 32, 32]
        assert model._loaded.memory.copy(sessions[0]._sequence, 999, 39) == 0
        sessions[3].close()
        assert [slots.reachable(s._sequence, 39) for s in sessions] == [0, 0, 32, 0, 32, 32]
        model.logits(PROMPT)
        model.generate(PROMPT[:20], options)  # too short for a checkpoint
        assert len(slots._checkpoints) == 3


def model_alone(path: Path, prompt: list[int], options: Options) -> list[int]:
    with TextModel(path, ["CPU"], n_ctx=64) as model:
        return model.generate(prompt, options).tokens


@pytest.mark.parametrize("kind", ["mamba", "rwkv7", "lfm2", "falcon-h1", "deepseek2"])
def test_a_state_of_a_recurrent_model(models: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    options = Options(max_tokens=4, temperature=0, ignore_eos=True)
    with TextModel(models(kind), ["CPU"], n_ctx=64) as model:
        session = model.session()
        session.generate(PROMPT[:10], options)
        session.save_state(tmp_path / "state")
        expected = session.generate(session.tokens + PROMPT[:2], options).tokens
    with TextModel(models(kind), ["CPU"], n_ctx=64) as model:
        other = model.session()
        other.load_state(tmp_path / "state")
        assert other.generate(other.tokens + PROMPT[:2], options).tokens == expected
    with (
        TextModel(models("llama"), ["CPU"], n_ctx=64) as model,
        pytest.raises(ModelError, match="is a state of another model"),
    ):
        model.session().load_state(tmp_path / "state")


def test_options_that_are_wrong(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=32) as model:
        for prompt, says in (
            (([]), "the prompt is empty"),
            ([N_VOCAB], "tokens are 0 to"),
            ([3, {"role": "user", "content": "x"}], r"prompt\[[01]\] is a"),
            ([{"role": "user", "content": "x"}, 3], r"prompt\[[01]\] is a"),
            ([1] * 33, "n_ctx is 32"),
        ):
            with pytest.raises(ArgumentError, match=says):
                model.generate(prompt)
        with pytest.raises(ArgumentError, match=r"temprature is no option.*temperature"):
            model.generate([1], temprature=0)
        with pytest.raises(ArgumentError, match="top_p is 2"):
            model.generate([1], top_p=2)
        assert len(model.generate([1] * 30, max_tokens=100, ignore_eos=True).tokens) == 3  # all that fits
        assert model.generate([1], max_tokens=0).tokens == []
    with pytest.raises(FreedError):
        model.generate([1])


def test_an_unknown_architecture_names_those_that_are_known(
    tmp_path: Path, models: Callable[..., Path]
) -> None:
    for name, says in (
        ("lamma", r"'lamma' is not known; did you mean 'llama'\?; llama.cpp computes others.*llama-cpp.md"),
        ("qqqqq", r"'qqqqq' is not known; known: .*gpt-oss.*llama.*qwen3, .*; llama.cpp"),
    ):
        (tmp_path / "m.gguf").write_bytes(models().read_bytes().replace(b"llama", name.encode()))
        with pytest.raises(ModelError, match=says):
            TextModel(tmp_path / "m.gguf")


def test_a_session_computes_what_is_new(models: Callable[..., Path], tmp_path: Path) -> None:
    options = Options(max_tokens=4, temperature=0, ignore_eos=True, logprobs=3)
    with TextModel(models("gemma3"), ["CPU"], n_ctx=64) as model:
        session = model.session()
        first = session.generate(PROMPT[:10], options)
        assert session.tokens == PROMPT[:10] + first.tokens[:-1]
        for prompt in (PROMPT[:10] + first.tokens + PROMPT[10:14], PROMPT[:7], PROMPT):
            found, expected = session.generate(prompt, options), model.generate(prompt, options)
            assert found.tokens == expected.tokens
            assert np.allclose([p for _, p in found.logprobs], [p for _, p in expected.logprobs], atol=2e-3)
        session.save_state(tmp_path / "state")
        other = model.session()
        other.load_state(tmp_path / "state")
        assert other.tokens == session.tokens
        prompt = session.tokens + PROMPT[:2]
        assert other.generate(prompt, options).tokens == session.generate(prompt, options).tokens
        session.close()
    with (
        TextModel(models("gemma3"), ["CPU"], n_ctx=64, kv_type="q8_0") as model,
        pytest.raises(ModelError, match="the state does not fit"),
    ):
        model.session().load_state(tmp_path / "state")


def test_a_state_is_taken_whole_or_not_at_all(models: Callable[..., Path], tmp_path: Path) -> None:
    """Whatever is wrong with a file, the session goes on from what it has; a session refuses other models."""
    options = Options(max_tokens=4, temperature=0, ignore_eos=True)
    state, other = tmp_path / "state", tmp_path / "other"
    with TextModel(models(), ["CPU"], n_ctx=40) as model:
        expected = model.generate(PROMPT, options).tokens
        session = model.session()
        session.generate(PROMPT, options)
        session.save_state(state)
        file = ggmlb.open_gguf(state)
        tensors = {name: file.array(name) for name in file}
        metadata = dict(file.metadata)
        raw = state.read_bytes()
        wrong: list[tuple[dict[str, object], dict[str, object]]] = [
            ({"general.type": "model"}, {}),
            ({"ggmlb.session.model": "0"}, {}),
            ({}, {"tokens": np.zeros(len(tensors["tokens"]), np.float32)}),
            ({}, {"tokens": np.full(len(tensors["tokens"]), -1, np.int32)}),
            ({}, {"tokens": np.zeros((2, 3), np.int32)}),
            ({}, {"tokens": tensors["tokens"][:-1]}),
            ({}, {"cache_v.2": tensors["cache_v.2"][:, :-1]}),
            ({}, {"cache_v.2": tensors["cache_v.2"].view(np.float16)}),
        ]
        for changed_metadata, changed_tensors in wrong:
            ggmlb.save_gguf(other, metadata | changed_metadata, tensors | changed_tensors)
            with pytest.raises(ModelError):
                session.load_state(other)
        for n in (0, 10, 100, len(raw) // 2, len(raw) - 500):
            other.write_bytes(raw[:n])
            with pytest.raises(ModelError):
                session.load_state(other)
        for path in (tmp_path / "nothing", tmp_path, models()):
            with pytest.raises(ModelError):
                session.load_state(path)
        full = model.session()
        session.generate(PROMPT[:4], options)
        full.generate(PROMPT[:17], max_tokens=1)
        kept = session.tokens
        with pytest.raises(ggmlb.AllocationError, match="end some"):
            session.load_state(state)
        assert session.tokens == kept
        full.close()
        session.load_state(state)
        assert session.tokens == tensors["tokens"].tolist()
        assert session.generate(PROMPT, options).tokens == expected
        before = state.read_bytes()
        with pytest.raises(ModelError, match="cannot write"):
            session.save_state(tmp_path / "no folder" / "state")
        assert state.read_bytes() == before
        empty = model.session()
        empty.save_state(other)
        session.load_state(other)
        assert session.tokens == []
    variant = write_text_model(tmp_path / "variant.gguf", seed=1)
    with TextModel(variant, ["CPU"], n_ctx=40) as model, pytest.raises(ModelError, match="of another model"):
        model.session().load_state(state)


def test_texts_come_in_whole_characters_and_end_at_stop_texts(models: Callable[..., Path]) -> None:
    """The forced tokens are bytes: what they say is cut before a stop text, which may span tokens."""
    said = "ab\u00e9\U0001f600cd stop here".encode()
    tokens = iter([3 + byte for byte in said])

    def force(_: object, logits: np.ndarray) -> np.ndarray:
        return np.where(np.arange(N_VOCAB) == next(tokens), 1, 0).astype(np.float32)

    pieces: list[str] = []
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        found = model.generate(
            [1],
            on_token=pieces.append,
            max_tokens=60,
            temperature=0,
            stop=["xyz", "op h"],
            logits_processor=force,
        )
    assert found.text == "".join(pieces) == "ab\u00e9\U0001f600cd st" and found.stopped_by == "stop"
    assert "\u00e9" in pieces and "\U0001f600" in pieces


def test_perplexity_is_that_of_the_logits(models: Callable[..., Path]) -> None:
    text = "abc def ghi " * 8
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        tokens = model.tokens_of(text)
        found = model.perplexity(text, n_ctx=16)
        losses = []
        for i in range(len(tokens) // 16):
            chunk = [1, *tokens[i * 16 + 1 : (i + 1) * 16]]
            log = log_probs(model.logits(chunk))
            losses += [-log[j, chunk[j + 1]] for j in range(8, 15)]
        with pytest.raises(ArgumentError, match="give at least a chunk of 16"):
            model.perplexity("a", n_ctx=16)
    assert np.isclose(found.value, np.exp(np.mean(losses)), rtol=1e-4) and found.n_tokens == len(losses)


def test_embeddings_have_length_1(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        assert np.isclose(np.linalg.norm(model.embed(PROMPT)), 1)


def test_the_default_devices_are_a_models_own(
    models: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GGMLB_DEVICES", "CPU")
    with TextModel(models(), n_ctx=64) as model:
        assert [backend.name for backend in model.backends] == ["CPU"]


PLACES: tuple[list[str], ...] = (["CPU"], *([name, "CPU"] for name in DEVICES if name in ("LLVM", "OpenCL0")))


@pytest.mark.parametrize("devices", PLACES, ids="+".join)
@pytest.mark.parametrize("kind", ["llama", "mamba", "lfm2"])
def test_callbacks_may_use_the_model(models: Callable[..., Path], kind: str, devices: list[str]) -> None:
    """What one call computes does not depend on the calls inside it; a session refuses those on itself."""
    options = Options(max_tokens=5, temperature=0, ignore_eos=True, logprobs=3, stop=["xyz"])
    with TextModel(models(kind), devices, n_ctx=128) as model:
        expected = model.generate(PROMPT, options)
        calls = [
            lambda: model.generate(PROMPT[3:9], max_tokens=2),
            lambda: model.logits(PROMPT[:5]),
            lambda: model.trace(PROMPT[:3]),
            lambda: model.session().generate(PROMPT[:4], max_tokens=2),
        ]

        def use_the_model(tokens: object, logits: np.ndarray) -> np.ndarray:
            for call in calls:
                call()
            return logits

        def use_the_session(piece: str) -> None:
            for call in (lambda: session.generate(PROMPT), session.close, lambda: session.save_state("s")):
                with pytest.raises(ggmlb.GraphError, match="the session is in use"):
                    call()

        found = model.generate(PROMPT, options, logits_processor=use_the_model)
        session = model.session()
        for prompt in (PROMPT[:12], PROMPT):
            in_session = session.generate(prompt, options, on_token=use_the_session)
    assert found.tokens == in_session.tokens == expected.tokens
    for (ids, values), (others, expected_values) in zip(found.logprobs, expected.logprobs, strict=True):
        assert ids == others and np.allclose(values, expected_values, atol=1e-4)


@pytest.mark.parametrize("devices", PLACES, ids="+".join)
def test_threads_share_a_model(models: Callable[..., Path], devices: list[str]) -> None:
    options = Options(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = [PROMPT[i:] for i in range(4)]
    with TextModel(models(), devices, n_ctx=256) as model, ThreadPoolExecutor(4) as threads:
        expected = [model.generate(prompt, options).tokens for prompt in prompts]

        def repeat(i: int) -> list[list[int]]:
            session = model.session()
            each = [
                model.generate,
                lambda *a: next(iter(model.generate_many([a[0]], a[1]))),
                session.generate,
            ]
            return [each[n % 3](prompts[i], options).tokens for n in range(6)]

        assert list(threads.map(repeat, range(4))) == [[tokens] * 6 for tokens in expected]
        begun = threads.submit(lambda: [model.logits(PROMPT) for _ in range(10_000)])
        model.logits(PROMPT)
        model.close()
        with pytest.raises(FreedError):
            begun.result()


def test_steering_blocks_end_in_any_order(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        plain = model.logits(PROMPT)
        first, second = (model.steering({layer: np.ones(256)}) for layer in (0, 1))
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with model.steering({1: np.ones(256)}, -1):
            assert np.array_equal(model.logits(PROMPT), plain)
        second.__exit__(None, None, None)
        assert np.array_equal(model.logits(PROMPT), plain)


@pytest.mark.parametrize("devices", PLACES, ids="+".join)
@pytest.mark.parametrize(
    ("kind", "weight", "says"),
    [
        ("llama", "blk.1.ffn_down.weight", r"first in 'blk.1.ffn_down' on {0}: the weight '{1}' has NaN"),
        ("llama", "output_norm.weight", r"first in 'output_norm' on \w+: the weight '{1}' has NaN"),
        ("mamba", "blk.0.ssm_a", r"first in 'blk.0.\w+' on \w+: the weight '{1}' has NaN"),
    ],
)
def test_nan_in_a_weight_is_named(
    tmp_path: Path, kind: str, weight: str, says: str, devices: list[str]
) -> None:
    """By every call that computes something of the logits, sampled or not."""
    path = write_text_model(tmp_path / "nan.gguf", kind)
    file = ggmlb.open_gguf(path)
    tensors = {name: np.array(file.array(name)) for name in file}
    tensors[weight].flat[7] = np.nan
    ggmlb.save_gguf(path, file.metadata, tensors)
    with TextModel(path, devices, n_ctx=64) as model:
        session = model.session()
        for call in (
            lambda: model.generate(PROMPT, temperature=0),
            lambda: model.generate(PROMPT, logprobs=3, repeat_penalty=1.1),
            lambda: session.generate(PROMPT),
            lambda: model.embed(PROMPT),
            lambda: model.perplexity("abc def ghi " * 8, n_ctx=16),
        ):
            with pytest.raises(ModelError, match=says.format(devices[0], weight)) as error:
                call()
            assert str(path) in str(error.value)
        assert session.tokens == []
        assert np.isnan(model.trace(PROMPT, "logits")["logits"]).any()


@pytest.mark.parametrize("devices", PLACES, ids="+".join)
def test_nan_of_one_prompt_does_not_reach_the_next(models: Callable[..., Path], devices: list[str]) -> None:
    with TextModel(models(), devices, n_ctx=64) as model:
        expected = model.logits(PROMPT[:3])
        for call in (lambda: model.logits(PROMPT), lambda: model.trace(PROMPT)):
            with (
                model.steering({0: np.resize(np.float32([3e38, -3e38, 1]), 256)}),
                model.steering({1: np.resize(np.float32([3e38, 3e38, 1]), 256)}),
            ):
                for _ in range(2):
                    with suppress(ModelError):  # of some devices' norms, not all
                        call()
            assert np.array_equal(model.logits(PROMPT[:3]), expected)


def test_processors_that_leave_no_token(models: Callable[..., Path]) -> None:
    with TextModel(models(), ["CPU"], n_ctx=64) as model:
        for value, says in (
            (-np.inf, "-inf for every token"),
            (np.nan, "nan"),
            (np.inf, "inf; give numbers"),
        ):
            for temperature in (0, 1):
                with pytest.raises(ArgumentError, match=f"logits_processor returned {says}"):
                    model.generate(
                        [1],
                        temperature=temperature,
                        logits_processor=lambda _, logits, value=value: logits + value,
                    )


def test_a_parameter_beyond_float32_is_refused(tmp_path: Path) -> None:
    """By the op, whatever device would compute it."""
    path = write_text_model(tmp_path / "m.gguf")
    file = ggmlb.open_gguf(path)
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": np.float64(1e-300)}
    tensors = {name: np.array(file.array(name)) for name in file}
    ggmlb.save_gguf(path, dict(file.metadata) | scaling, tensors)
    for device in ("CPU", *DEVICES):
        with pytest.raises(ArgumentError, match=r"rope.*: freq_scale is .*; give a finite float32 number"):
            TextModel(path, [device], n_ctx=32)
