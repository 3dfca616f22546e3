"""`ggmlb generate`, `chat`, `perplexity` and `demo`, as a user runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ggmlb.cli import main
from ggmlb.core.errors import shown
from tests.support.processes import ROOT
from tests.support.text_models import write_text_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text_model(tmp_path_factory.mktemp("model") / "m.gguf"))


def test_generate_prints_json(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    args = ["generate", "--model", model, *["--prompt-tokens", "1,260,270", "-n", "5", "--temperature", "0"]]
    assert main([*args, "--logprobs", "4", "--ignore-eos", "--json", "-d", "CPU"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert told["prompt_tokens"] == [1, 260, 270] and len(told["tokens"]) == 5
    assert [step["id"][0] for step in told["logprobs"]] == told["tokens"]
    assert all(len(step["id"]) == len(step["logprob"]) == 4 for step in told["logprobs"])
    assert all(sorted(step["logprob"], reverse=True) == step["logprob"] for step in told["logprobs"])
    assert set(told["timings"]) == {"load_s", "prompt_tokens_per_s", "generated_tokens_per_s"}
    assert main([*args, "--ignore-eos", "-d", "CPU", "--threads", "1"]) == 0
    out, err = capfd.readouterr()
    assert out == shown(told["text"]) + "\n"
    assert re.search(
        r"prompt: 3 tokens, [\d.]+ tokens/s; generated: 5 tokens, [\d.]+ tokens/s; seed \d+$", err.strip()
    )


def test_without_a_seed_texts_differ_and_the_shown_seed_repeats_one(
    model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(*options: str) -> tuple[int, list[int]]:
        args = ["generate", model, "--prompt-tokens", "1,5", "-n", "12", "--temperature", "2", "--top-k", "0"]
        assert main([*args, "--json", "--ignore-eos", "-d", "CPU", *options]) == 0
        found = json.loads(capfd.readouterr().out)
        return found["seed"], found["tokens"]

    seed, tokens = told()
    assert told() != (seed, tokens)
    assert told("--seed", str(seed)) == (seed, tokens)


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--prompt-tokens", "1", "-n", "1", "-d", "CPU"],
        ["perplexity", "-f", "text", "-c", "8", "-d", "CPU"],
        ["show"],
        ["fit", "-d", "CPU"],
        ["diff", "-d", "CPU,CPU", "--prompt", "a"],
        ["quantize", "OUT", "--type", "q8_0"],
        ["chat", "-d", "CPU"],
    ],
    ids=lambda args: args[0],
)
def test_the_model_is_an_argument_or_an_option(
    args: list[str],
    model: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("some words " * 20)
    monkeypatch.setattr("builtins.input", lambda _: "/exit")
    command, *rest = args
    told = []
    for given in ([model], ["-m", model]):
        status = main([command, *given, *rest])
        err = capfd.readouterr().err
        assert status == 0 or "no chat template" in err
        told.append(status)
    assert told[0] == told[1]
    for given in ([], [model, "-m", model]):
        assert main([command, *given, *rest]) == 2
        assert "as the argument MODEL, or with --model FILE (-m)" in " ".join(
            capfd.readouterr().err.replace("│", "").split()
        )


@pytest.mark.parametrize(
    "args",
    [["bench"], ["test"], ["ops"], ["generate", "-p", "a"], ["fit"], ["diff"], ["compare"]],
    ids=lambda a: a[0],
)
def test_an_unknown_device_is_status_4_in_every_command(
    args: list[str], model: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command, *rest = args
    files = {"generate": [model], "fit": [model], "diff": [model], "compare": [model, model]}.get(command, [])
    assert main([command, *files, *rest, "-d", "CPUU,CPU"]) == 4
    assert "there is no device 'CPUU'" in capfd.readouterr().err


def test_a_context_size_of_its_own(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    args = ["generate", model, "--prompt-tokens", "1,5", "-n", "1", "-d", "CPU", "--ctx"]
    for size, why in (
        (60_000_000, "no room for n_ctx of 60,000,000 tokens; give less"),
        (10**12, "give 1 to"),
    ):
        assert main([*args, str(size)]) == 1
        err = capfd.readouterr().err
        assert why in err and "batch" not in err
    assert main([*args, "9000"]) == 0
    assert "the context of 9,000 tokens exceeds the" in capfd.readouterr().err


def test_readmes_quantize_command_takes_readmes_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ggmlb.models import default_text_model

    monkeypatch.chdir(tmp_path)
    Path("model.gguf").symlink_to(default_text_model())
    (line,) = re.findall("^ggmlb (quantize [^#\n]*)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    assert main(line.split()) == 0
    assert Path("out.gguf").stat().st_size > 1e6


@pytest.mark.parametrize(
    ("kind", "plain", "options"),
    [
        ("llama", "-d CPU", "-d OpenCL0,CPU --gpu-layers 2"),
        *(
            ("qwen3moe", "-d OpenCL0,CPU --cpu-experts", f"-d OpenCL0,CPU --expert-cache {size}")
            for size in ("4MiB", "4.5M", "5000000")
        ),
    ],
)
def test_where_layers_and_experts_lie_changes_no_text(
    kind: str, plain: str, options: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pyopencl")
    path = str(write_text_model(tmp_path / "m.gguf", kind, *["q8_0"] * (kind != "llama")))
    args = ["generate", "-m", path, *["--prompt-tokens", "1,5,9", "-n", "4", "--temperature", "0", "--json"]]
    texts = []
    for given in (plain, options):
        assert main([*args, *given.split()]) == 0
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
    lines = iter([question, "/help", "/clear", question, "/exit", question])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert main(["chat", "-m", str(default_text_model()), "--temperature", "0", "-n", "12"]) == 0
    out, err = capfd.readouterr()
    assert out.count("Gravity is a fundamental concept in physics that") == 2 and err.count("Ctrl-D") == 2
