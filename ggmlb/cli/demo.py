"""`ggmlb demo`: a question answered by a language model, on one device and split over two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ggmlb.cli.frame import console
from ggmlb.cli.options import DevicesOption, LayersOption, device_names, layers_by_device
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console

    from ggmlb.models import Generation

QUESTION = "What do plants need to grow?"
MAX_TOKENS = 24


def demo(
    what: Annotated[str, typer.Argument(help="Demo: chat, or search (semantic search).")] = "chat",
    devices: DevicesOption = None,
    layers_on: LayersOption = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="GGUF file, or model folder for search (default: the installed model).",
        ),
    ] = None,
) -> None:
    """Answer a question with a language model, then again with its layers split over two devices.

    Examples:
      ggmlb demo
      ggmlb demo -d OpenCL0,CPU --layers-on OpenCL0=0-9
      ggmlb demo search
    """
    names = None if devices is None else device_names(devices)
    requests = layers_by_device(layers_on)
    if what == "search":
        from ggmlb.cli.search import search

        search(console(), names, requests, model)
    elif what == "chat":
        _chat(console(), names, requests, model)
    else:
        raise ArgumentError(f"there is no demo {what!r}; give chat or search")


def _chat(
    out: Console, names: list[str] | None, requests: dict[str, list[str]] | None, model: Path | None
) -> None:
    from ggmlb.models import default_text_model

    path = default_text_model() if model is None else model
    out.print(f"[bold]{path.name}[/] answers: {QUESTION}\n")
    first = _answer(out, path, names, requests)
    if names is not None or requests is not None:
        return
    split = _split(path)
    if split is None:
        out.print("\nThere is no second device: pip install 'ggmlb[opencl]' brings one.")
        return
    out.print("\n[bold]The same, its layers split over two devices:[/]\n")
    second = _answer(out, path, *split)
    pairs = list(zip(first.tokens, second.tokens, strict=False))
    n_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    is_whole = n_equal == len(first.tokens) == len(second.tokens)
    told = "[green]The answers agree.[/]" if is_whole else f"The first {n_equal} tokens agree."
    out.print(f"\n{told} Devices round differently: texts may differ where two tokens are nearly as likely.")


def _answer(
    out: Console, path: Path, names: list[str] | None, requests: dict[str, list[str]] | None
) -> Generation:
    """Answer the question on these devices, and print the device of each layer and the speed."""
    from ggmlb.cli.search import print_devices
    from ggmlb.models import Placement, TextModel

    with TextModel(path, placement=Placement(names, requests), n_ctx=512) as model:
        print_devices(out, model.backends, model.homes)
        out.print()

        def write(piece: str) -> None:
            out.print(piece, end="", markup=False, style="cyan")
            sys.stdout.flush()

        result = model.generate(
            [{"role": "user", "content": QUESTION}], on_token=write, max_tokens=MAX_TOKENS, temperature=0
        )
        out.print(
            f" ...\n\nLoaded in {model.load_seconds:.1f} s; "
            f"{len(result.prompt_tokens)} tokens of prompt took "
            f"{result.prompt_seconds:.1f} s, then {result.tokens_per_second:.0f} tokens per second."
        )
    return result


def _split(path: Path) -> tuple[list[str], dict[str, list[str]]] | None:
    """Return a device with memory of its own and one in host memory, with half of the layers each."""
    import ggmlb

    known = [d for d in ggmlb.devices() if d.is_automatic]
    found = [d for d in known if not d.buffer_type.is_host]
    if not found:
        return None
    other = next((d for d in found if d.reg.name == "OpenCL"), found[0]).name
    host = [d.name for d in known if d.buffer_type.is_host]
    meta = ggmlb.open_gguf(path).metadata
    n_layer = meta.integer(f"{meta.text('general.architecture')}.block_count")
    half = n_layer // 2
    best = next((name for name in host if name != "CPU"), "CPU")
    names = list(dict.fromkeys([other, best, "CPU"]))
    return names, {other: [f"0-{half - 1}"], best: [f"{half}-{n_layer - 1}"]}
