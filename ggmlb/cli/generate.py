"""`ggmlb generate`: text from a GGUF model, streamed or as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggmlb.cli import plain
from ggmlb.cli.options import DevicesOption, LayersOption, device_names, layers_by_device, sizes_by_device
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from ggmlb import BufferType
    from ggmlb.models import Generation, TextModel

GgufOption = Annotated[Path, typer.Option("--model", "-m", metavar="FILE", help="The model, a GGUF file.")]
GpuLayersOption = Annotated[
    int | None,
    typer.Option("--gpu-layers", "-ngl", help="So many of the last layers on the first device.", min=0),
]
ContextOption = Annotated[
    int | None, typer.Option("--ctx", "-c", help="Tokens that are kept; by default at most 4096.", min=1)
]
KvOption = Annotated[str, typer.Option("--kv-type", help="Type of keys and values: f16, q8_0, q4_0, f32.")]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-ot",
        metavar="REGEX=DEVICE",
        help="Where weights lie whose names a pattern finds, as 'exps=CPU'. May be given several times.",
    ),
]
KvOnOption = Annotated[
    str | None,
    typer.Option("--kv-on", metavar="NAME", help="The device that keeps all keys and values, and attends."),
]
CpuExpertsOption = Annotated[bool, typer.Option("--cpu-experts", help="All experts on the processor.")]
MemoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--memory",
        metavar="NAME=SIZE",
        help="Most memory on a device, as OpenCL0=200MiB; by default what is free. Several.",
    ),
]
FitOption = Annotated[
    bool,
    typer.Option(help="Place layers and experts so that they fit, unless options say where they lie."),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", "-t", help="Threads on processors; all by default.", min=1)
]
UbatchOption = Annotated[
    int | None,
    typer.Option(
        "--ubatch", help="Tokens that devices pass on in a pipeline, 1 to 512; no pipeline by default.", min=1
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[=SCALE]",
        help="A LoRA adapter, a GGUF file, and what it is multiplied by. May be given several times.",
    ),
]
TemperatureOption = Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")]
SeedOption = Annotated[int, typer.Option("--seed", help="Of the random numbers.")]


def open_model(
    model: Path,
    devices: str | None,
    layers_on: list[str] | None,
    gpu_layers: int | None,
    ctx: int | None,
    kv_type: str,
    override: list[str] | None,
    threads: int | None,
    ubatch: int | None = None,
    lora: list[str] | None = None,
    cpu_experts: bool = False,
    kv_on: str | None = None,
    memory: list[str] | None = None,
    fit: bool = True,
) -> TextModel:
    """Open a model as the options say.

    Raises:
        Error: As `TextModel`.
        ArgumentError: An option is not as its help says.
    """
    from ggmlb.models import TextModel

    opened = TextModel(
        model,
        None if devices is None else device_names(devices),
        layers_by_device(layers_on),
        gpu_layers,
        ctx,
        kv_type,
        overrides_of(override),
        threads=threads,
        n_ubatch=ubatch,
        cpu_experts=cpu_experts,
        kv_on=kv_on,
        memory_limits=sizes_by_device(memory),
        fit=fit,
    )
    try:
        for option in lora or ():
            opened.load_adapter(*_file_and_scale(option))
    except BaseException:
        opened.close()
        raise
    return opened


def overrides_of(options: list[str] | None) -> dict[str, str | BufferType]:
    """Parse `["exps=CPU"]` into devices by regular expression.

    Raises:
        ArgumentError: An option is not `REGEX=DEVICE`.
    """
    overrides: dict[str, str | BufferType] = {}
    for option in options or ():
        pattern, equals, device = option.rpartition("=")
        if not (pattern and equals and device):
            raise ArgumentError(f"--override {option}: give REGEX=DEVICE, as 'exps=CPU'")
        overrides[pattern] = device
    return overrides


def _file_and_scale(option: str) -> tuple[str, float]:
    """Parse `FILE[=SCALE]`; what no number follows is a file's name with `=` in it."""
    file, equals, scale = option.rpartition("=")
    try:
        return (file, float(scale)) if file and equals else (option, 1.0)
    except ValueError:
        return option, 1.0


def generate(
    model: GgufOption,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text to go on with.")] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option("--prompt-tokens", metavar="1,2,3", help="The same as token numbers.")
    ] = None,
    chat: Annotated[
        str | None, typer.Option("--chat", metavar="TEXT", help="A question, in the model's chat template.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens.", min=0)] = 128,
    temperature: TemperatureOption = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Sample from so many; 0: all.")] = 40,
    top_p: Annotated[float, typer.Option("--top-p", help="Sample from this probability together.")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p", help="Least share of the likeliest's odds.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option("--repeat-penalty", help="Above 1: repeat less.")] = 1.0,
    seed: SeedOption = 0,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="A text that ends it; several.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of text.")] = False,
    logprobs: Annotated[int, typer.Option("--logprobs", help="Log-probabilities of so many.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
    devices: DevicesOption = None,
    layers_on: LayersOption = None,
    gpu_layers: GpuLayersOption = None,
    ctx: ContextOption = None,
    kv_type: KvOption = "f16",
    override: OverrideOption = None,
    threads: ThreadsOption = None,
    lora: LoraOption = None,
    ubatch: UbatchOption = None,
    cpu_experts: CpuExpertsOption = False,
    kv_on: KvOnOption = None,
    memory: MemoryOption = None,
    fit: FitOption = True,
) -> None:
    """Generate text with a GGUF model, on any devices.

    Examples:
      ggmlb generate -m model.gguf -p "Once upon a time"
      ggmlb generate -m model.gguf --chat "Why is the sky blue?" --temperature 0
      ggmlb generate -m model.gguf -p "1 + 1 =" -d OpenCL0,CPU --gpu-layers 10 --json
      ggmlb generate -m model.gguf -p "Once upon a time" --lora pirate.gguf=0.8
    """
    if sum(given is not None for given in (prompt, prompt_tokens, chat)) != 1:
        raise ArgumentError("give one of --prompt, --prompt-tokens and --chat")
    asked: Any = prompt
    if prompt_tokens is not None:
        asked = _numbers(prompt_tokens)
    elif chat is not None:
        asked = [{"role": "user", "content": chat}]
    with open_model(
        model,
        devices,
        layers_on,
        gpu_layers,
        ctx,
        kv_type,
        override,
        threads,
        ubatch,
        lora,
        cpu_experts,
        kv_on,
        memory,
        fit,
    ) as opened:
        result = opened.generate(
            asked,
            on_token=None if as_json else write_piece,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        plain.echo(json.dumps(_as_json(opened, result)) if as_json else "")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"--prompt-tokens {text}: give numbers, as 1,2,3") from None


def write_piece(piece: str) -> None:
    """Print a piece of text at once, with escaped control characters."""
    plain.echo(piece, end="")


def _as_json(model: TextModel, result: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": result.prompt_tokens,
        "tokens": result.tokens,
        "text": result.text,
        "logprobs": [{"id": ids, "logprob": logs} for ids, logs in result.logprobs],
        "stopped_by": result.stopped_by,
        "timings": {
            "load_s": model.load_seconds,
            "prompt_tokens_per_s": result.prompt_tokens_per_second,
            "generated_tokens_per_s": result.tokens_per_second,
        },
    }
