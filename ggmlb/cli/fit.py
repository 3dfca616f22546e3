"""`ggmlb fit`: where a GGUF model would lie on some devices, and whether it fits, before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import console
from ggmlb.cli.model_options import (
    ContextOption,
    CpuExpertsOption,
    GpuLayersOption,
    KvOnOption,
    KvOption,
    MemoryOption,
    OverrideOption,
    overrides_of,
)
from ggmlb.cli.options import (
    DevicesOption,
    JsonOption,
    LayersOption,
    device_names,
    layers_by_device,
    sizes_by_device,
)
from ggmlb.core.errors import readable_size

if TYPE_CHECKING:
    from ggmlb.models.memory_table import MemoryTable
    from ggmlb.models.text.decoder import Cost
    from ggmlb.models.text.fit import Planner
    from ggmlb.models.text.parts import Placement

OTHER_TYPES = ("q8_0", "q4_0")
"""Types of keys and values that take less room than f16, best first."""


class Report(NamedTuple):
    """What is printed.

    Attributes:
        planner: The planner.
        placement: Where the parts lie.
        table: Bytes by device and kind.
        costs: What a token costs each device.
        short: Bytes that devices lack.
        advice: Options with which it would fit.
    """

    planner: Planner
    placement: Placement
    table: MemoryTable
    costs: dict[str, Cost]
    short: dict[str, int]
    advice: list[str]


def fit(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The model, a GGUF file.")],
    devices: DevicesOption = None,
    ctx: ContextOption = None,
    kv_type: KvOption = "f16",
    memory: MemoryOption = None,
    layers_on: LayersOption = None,
    gpu_layers: GpuLayersOption = None,
    cpu_experts: CpuExpertsOption = False,
    kv_on: KvOnOption = None,
    override: OverrideOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show where a model would lie, by device and kind, to the byte; no weights are read.

    Layers and experts are placed so that all devices have room, unless options say where they lie. The
    status is 1 if it does not fit; what would fit is told then.

    Examples:
      ggmlb fit model.gguf -d OpenCL0,CPU --ctx 8192
      ggmlb fit model.gguf -d CUDA0,CPU --memory CUDA0=6GiB --json
    """
    from ggmlb.models.text.fit import Wishes, open_planner

    wishes = Wishes(
        layers_by_device(layers_on),
        gpu_layers,
        cpu_experts,
        kv_on,
        overrides_of(override),
        sizes_by_device(memory),
    )
    names = None if devices is None else device_names(devices)
    with ExitStack() as resources:
        planner = open_planner(resources, file, names, wishes, ctx, kv_type)
        placement, table = planner.best()
        short = planner.lacks(table)
        costs = planner.costs(placement)
        advice = list(_advice(planner)) if short else []
        report = Report(planner, placement, table, costs, short, advice)
        if as_json:
            plain.echo(json.dumps(_as_json(report), indent=2))
        else:
            _print(report)
    if short:
        raise typer.Exit(1)


def _advice(planner: Planner) -> Iterator[str]:
    """Yield options with which it would fit."""
    from ggmlb import DType

    most = planner.largest_context()
    if most:
        yield f"--ctx {most}"
    if planner.config.state is None:
        for name in OTHER_TYPES:
            dtype = DType.parse(name)
            heads = (planner.config.n_key, planner.config.n_value)
            is_smaller = dtype.row_size(256) < planner.room.kv_type.row_size(256)
            suits = is_smaller and not any(n % dtype.block_size for n in heads)
            if suits and planner.with_room(kv_type=dtype).best_fits():
                yield f"--kv-type {name}"
                break
    asked = planner.wishes.gpu_layers
    if asked:
        n = planner.most_gpu_layers()
        if n is not None and n < asked:
            yield f"--gpu-layers {n}"


def _print(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    planner, placement, table, costs, short, advice = report
    out = console()
    room, config = planner.room, planner.config
    kept = (
        f"{room.n_ctx} tokens"
        if config.state
        else f"{room.n_ctx} tokens of {room.kv_type.name.lower()} keys and values"
    )
    shown = Table(title=f"{planner.file.path.name}: {config.n_layer} layers, {kept}", title_justify="left")
    for name in ("Device", "Memory", "Contents"):
        shown.add_column(name, no_wrap=True)
    for name in ("Bytes", "Free"):
        shown.add_column(name, justify="right", no_wrap=True)
    for device in planner.free:
        for use in (u for u in table if u.device == device):
            shown.add_row(*map(Text, (device, use.memory, use.kind, f"{use.nbytes:,}", "")))
        free = planner.free[device]
        told = "unknown" if free == float("inf") else f"{int(free):,}"
        shown.add_row(
            device, "", "total", f"{table.total(device):,}", told, style="red" if device in short else "bold"
        )
    out.print(shown)
    for name, parts in _parts(planner, placement).items():
        cost = costs[name]
        moved = f", and {readable_size(cost.copied)} are copied to it" if cost.copied else ""
        plain.echo(f"{name}: {parts}; each token reads {readable_size(cost.read)} of weights{moved}")
    if short:
        for device, n in short.items():
            plain.echo(f"does not fit: {device} lacks {readable_size(n)} ({n:,} bytes)")
        plain.echo(f"would fit: {', or '.join(advice)}" if advice else "nothing fits: name further devices")


def _parts(planner: Planner, placement: Placement) -> dict[str, str]:
    """What lies on each device, in words."""
    from ggmlb.models.layers import EMBEDDINGS, OUTPUT

    found = {}
    for name in planner.backends:
        layers = _layers_on(placement, name)
        experts = [i for i, home in placement.experts.items() if home == name]
        parts = [f"layers {_ranges(layers)}"] if layers else []
        parts += [f"experts of layers {_ranges(experts)}"] if experts else []
        parts += ["the output"] if placement.homes[OUTPUT] == name else []
        parts += ["the embeddings"] if placement.homes[EMBEDDINGS] == name else []
        parts += ["keys and values"] if placement.kv_on == name else []
        found[name] = ", ".join(parts) or "nothing"
    return found


def _ranges(numbers: list[int]) -> str:
    """`[0, 1, 2, 5]` as `"0-2,5"`."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _as_json(report: Report) -> dict[str, Any]:
    planner, placement, table, costs, short, advice = report
    free = {device: None if n == float("inf") else int(n) for device, n in planner.free.items()}
    return {
        "fits": not short,
        "n_ctx": planner.room.n_ctx,
        "kv_type": planner.room.kv_type.name.lower(),
        "memory": table.as_list(),
        "total": {device: table.total(device) for device in planner.free},
        "free": free,
        "lacks": short,
        "layers": {name: _ranges(_layers_on(placement, name)) for name in planner.backends},
        "experts": {str(layer): home for layer, home in placement.experts.items()},
        "embeddings": placement.homes["embeddings"],
        "output": placement.homes["output"],
        "kv_on": placement.kv_on,
        "per_token": {name: cost._asdict() for name, cost in costs.items()},
        "would_fit": advice,
    }


def _layers_on(placement: Placement, name: str) -> list[int]:
    return [i for i, home in placement.homes.items() if home == name and isinstance(i, int)]
