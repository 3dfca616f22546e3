"""`ggmlb chat`: a conversation with a GGUF model."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Annotated, Any

import typer

from ggmlb.cli import plain
from ggmlb.cli.generate import SeedOption, TemperatureOption, new_seed, write_piece
from ggmlb.cli.model_options import OpenModel, takes_model

HELP = (
    "/clear begins a new chat; /exit, an empty line or Ctrl-D ends it; Ctrl-C ends an answer; "
    "/help shows this line."
)


@takes_model
def chat(
    open_model: OpenModel,
    system: Annotated[
        str | None, typer.Option("--system", help="System message, the first of the conversation.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Maximum number of tokens of an answer.", min=1)
    ] = 512,
    temperature: TemperatureOption = 0.8,
    seed: SeedOption = None,
) -> None:
    """Chat with a GGUF model; each turn computes only its new tokens.

    Examples:
      ggmlb chat -m model.gguf
      ggmlb chat -m model.gguf --system "Answer in one sentence." --temperature 0
    """
    with suppress(ImportError):
        import readline  # noqa: F401 (gives `input` line editing)
    with open_model() as opened:
        session = opened.session()
        first = [] if system is None else [{"role": "system", "content": system}]
        messages: list[Any] = list(first)
        _ = opened.chat_template  # so that a model without one is refused before anything is typed
        plain.echo(HELP, sys.stderr)
        seed = new_seed() if seed is None else seed
        plain.note(f"seed {seed}, one more for each answer")
        while (text := _ask()) not in (None, "/exit"):
            if text == "/clear":
                messages = list(first)
            if text in ("/clear", "/help"):
                plain.echo(HELP if text == "/help" else "a new chat", sys.stderr)
                continue
            messages.append({"role": "user", "content": text})
            pieces: list[str] = []

            def take(piece: str, pieces: list[str] = pieces) -> None:
                pieces.append(piece)
                write_piece(piece)

            with suppress(KeyboardInterrupt):
                session.generate(
                    messages, on_token=take, max_tokens=max_tokens, temperature=temperature, seed=seed
                )
            seed += 1
            plain.echo("")
            messages.append({"role": "assistant", "content": "".join(pieces)})


def _ask() -> str | None:
    """Return the next line; `None` at the end."""
    try:
        return input("> ").strip() or None
    except (EOFError, KeyboardInterrupt):
        return None
