"""`ggmlb generate`, `chat`, `perplexity` and `demo`, as a user runs them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ggmlb.cli import main
from ggmlb.core.errors import shown
from tests.support.text_models import write_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text_model(tmp_path_factory.mktemp("model") / "m.gguf"))


def test_generate_prints_json(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    args = [
        "generate",
        "--model",
        model,
        "--prompt-tokens",
        "1,260,270",
        "--max-tokens",
        "5",
        "--temperature",
        "0",
    ]
    assert main([*args, "--logprobs", "4", "--ignore-eos", "--json", "-d", "CPU"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["prompt_tokens"] == [1, 260, 270] and len(told["tokens"]) == 5
    assert [step["id"][0] for step in told["logprobs"]] == told["tokens"]
    assert all(len(step["id"]) == len(step["logprob"]) == 4 for step in told["logprobs"])
    assert all(sorted(step["logprob"], reverse=True) == step["logprob"] for step in told["logprobs"])
    assert set(told["timings"]) == {"load_s", "prompt_tokens_per_s", "generated_tokens_per_s"}
    assert main([*args, "--ignore-eos", "-d", "CPU", "--threads", "1"]) == 0
    assert capfd.readouterr().out == shown(told["text"]) + "\n"


def test_layers_split_over_devices_make_the_same_text(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyopencl")
    texts = []
    for options in (["-d", "CPU"], ["-d", "OpenCL0,CPU", "--gpu-layers", "2"]):
        args = [
            "generate",
            "-m",
            model,
            "--prompt-tokens",
            "1,5,9",
            "-n",
            "6",
            "--temperature",
            "0",
            "--json",
        ]
        assert main([*args, *options]) == 0
        texts.append(json.loads(capfd.readouterr().out)["tokens"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("size", ["4MiB", "4.5M", "5000000"])
def test_a_cache_of_experts_makes_the_same_text(
    size: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyopencl")
    path = str(write_text_model(tmp_path / "m.gguf", "qwen3moe", "q8_0"))
    args = ["generate", "-m", path, "--prompt-tokens", "1,5,9", "-n", "4", "--temperature", "0", "--json"]
    texts = []
    for options in (["--cpu-experts"], ["--expert-cache", size]):
        assert main([*args, "-d", "OpenCL0,CPU", *options]) == 0
        texts.append(json.loads(capfd.readouterr().out)["tokens"])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--prompt", "a", "--expert-cache", "much"], "--expert-cache much: give a size, as 200MiB or 6G"),
        (["--prompt", "a", "--memory", "CPU=much"], "--memory CPU= much: give a size"),
        ([], "give one of --prompt, --prompt-tokens and --chat"),
        (["--prompt", "a", "--chat", "b"], "give one of"),
        (["--prompt-tokens", "1,x"], "give numbers"),
        (["--prompt-tokens", "9999"], "tokens are 0 to"),
        (["--chat", "a"], "no chat template"),
        (["--prompt", "a", "--override", "exps"], "give REGEX=DEVICE"),
        (["--prompt", "a", "--top-p", "3"], "top_p is 3"),
    ],
)
def test_wrong_options(model: str, options: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "-m", model, "-d", "CPU", *options]) == 1
    out, err = capfd.readouterr()
    assert says in err and err.count("\n") == 1 and not out


def test_perplexity(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("some words " * 20)
    args = ["perplexity", "-m", model, "-f", str(text), "-c", "32", "-d", "CPU"]
    assert main([*args, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["value"] > 1 and told["n_chunks"] >= 2
    assert main(args) == 0
    assert f"perplexity {told['value']:.4f}" in capfd.readouterr().out


def test_a_text_that_is_empty(model: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (text := tmp_path / "text").write_text("")
    for args in (["perplexity", "-m", model], ["compare", model, model]):
        assert main([*args, "-f", str(text), "-d", "CPU"]) == 1
        assert f"{text} is empty; give a text" in capfd.readouterr().err


def test_demo_answers_on_one_device_and_on_two(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyopencl")
    assert main(["demo"]) == 0
    out, _ = capfd.readouterr()
    assert out.count("Plants need") == 2
    assert "OpenCL0" in out and "agree." in out


def test_chat(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from ggmlb.models import default_text_model

    question = "What is gravity?"  # whose answer is no near tie: prefixes are kept
    lines = iter([question, "/clear", question, ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", "-m", str(default_text_model()), "--temperature", "0", "-n", "12"]) == 0
    out, err = capfd.readouterr()
    assert out.count("Gravity is a fundamental concept in physics that") == 2 and "Ctrl-D" in err
