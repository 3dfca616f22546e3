"""`ggmlb generate`: text from a GGUF model, streamed or as JSON."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggmlb.cli import plain
from ggmlb.cli.model_options import OpenModel, takes_model
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from ggmlb.models import Generation, TextModel

TemperatureOption = Annotated[
    float, typer.Option("--temperature", help="Sampling temperature; 0: always the most likely token.")
]
SeedOption = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of the random numbers (default: random, shown at the end).", min=0),
]


@takes_model
def generate(
    open_model: OpenModel,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option("--prompt-tokens", metavar="1,2,3", help="Token ids to continue, instead of a text."),
    ] = None,
    chat: Annotated[
        str | None,
        typer.Option("--chat", metavar="TEXT", help="Message of a user, put into the model's chat template."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens to generate.", min=0)
    ] = 128,
    temperature: TemperatureOption = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", help="Sample only from the K most likely tokens (0: no limit).")
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Nucleus sampling: the most likely tokens with this total probability."),
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Minimum probability, relative to the most likely token.")
    ] = 0.05,
    repeat_penalty: Annotated[
        float, typer.Option("--repeat-penalty", help="Penalty of recent tokens (1: none).")
    ] = 1.0,
    seed: SeedOption = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the generation; repeatable.")
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Continue after the end-of-text token.")
    ] = False,
    logprobs: Annotated[
        int, typer.Option("--logprobs", help="Show log-probabilities of the N most likely tokens.", min=0)
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object at the end.")] = False,
) -> None:
    """Generate text with a GGUF model on one or several devices.

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
    seed = new_seed() if seed is None else seed
    with open_model() as opened:
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
        plain.echo(json.dumps({**_as_json(opened, result), "seed": seed}) if as_json else "")
        plain.note(
            f"prompt: {len(result.prompt_tokens):,} tokens, {result.prompt_tokens_per_second:.1f} tokens/s; "
            f"generated: {len(result.tokens):,} tokens, {result.tokens_per_second:.1f} tokens/s; seed {seed}"
        )


def new_seed() -> int:
    """Return a random seed."""
    return random.SystemRandom().getrandbits(32)


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
        "model": model.summary().as_dict(),
        "timings": {
            "load_s": model.load_seconds,
            "prompt_tokens_per_s": result.prompt_tokens_per_second,
            "generated_tokens_per_s": result.tokens_per_second,
            **({"draft_n": n, "draft_n_accepted": result.n_accepted} if (n := result.n_drafted) else {}),
        },
    }
