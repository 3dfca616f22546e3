"""`ggmlb fit`: predicted placement and memory of a GGUF model on devices, before it is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from ggmlb.cli import plain
from ggmlb.cli.frame import Column, Row, console, print_table
from ggmlb.cli.model_options import (
    ContextOption,
    CpuExpertsOption,
    ExpertCacheOption,
    GpuLayersOption,
    KvOnOption,
    KvOption,
    LoraOption,
    MemoryOption,
    ModelArgument,
    ModelFileOption,
    OverrideOption,
    UbatchOption,
    WayOption,
    file_and_scale,
    model_file,
    overrides_of,
)
from ggmlb.cli.options import (
    DevicesOption,
    JsonOption,
    LayersOption,
    device_names,
    layers_by_device,
    size_of,
    sizes_by_device,
)
from ggmlb.core.errors import readable_size

if TYPE_CHECKING:
    from rich.console import Console

    from ggmlb.models.text.fit import Fit, Planner
    from ggmlb.models.text.parts import ModelPlacement
    from ggmlb.models.text.ways import Way

BandwidthOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bandwidth",
        metavar="NAME=SIZE",
        help="Bandwidth at which a device reads weights, per second, as CUDA0=900G (default: measured; "
        "repeatable).",
    ),
]

COLUMNS = (
    Column("Device"), Column("Memory", drop=1), Column("Contents"), Column("Size", right=True),
    Column("Free", right=True),
)  # fmt: skip

OTHER_TYPES = ("q8_0", "q4_0")
"""Data types of the KV cache that are smaller than f16, best first."""


class Report(NamedTuple):
    """The result of the command.

    Attributes:
        ways: All ways to split the model.
        way: The chosen one.
        planner: Its planner.
        fit: Its placement and memory.
        process: Memory of this process, and what loading and computing add besides buffers [bytes].
        advice: Options with which it would fit.
    """

    ways: list[Way]
    way: Way
    planner: Planner
    fit: Fit
    process: dict[str, int]
    advice: list[str]


def fit(
    path: ModelArgument = None,
    model: ModelFileOption = None,
    devices: DevicesOption = None,
    ctx: ContextOption = None,
    kv_type: KvOption = "f16",
    memory: MemoryOption = None,
    layers_on: LayersOption = None,
    gpu_layers: GpuLayersOption = None,
    cpu_experts: CpuExpertsOption = False,
    kv_on: KvOnOption = None,
    override: OverrideOption = None,
    expert_cache: ExpertCacheOption = None,
    lora: LoraOption = None,
    ubatch: UbatchOption = None,
    way: WayOption = "best",
    bandwidth: BandwidthOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predict the placement of a model and its memory by device and kind, to the byte; no weights are read.

    Layers and experts are placed to fit, unless options place them. With several memories, all ways to split
    the model are listed with their predicted time per token at full context, from measured bandwidths; the
    fastest that fits is taken. --json has the sizes in bytes. The exit status is 1 if the model does not fit;
    options with which it would fit are printed then.

    Examples:
      ggmlb fit model.gguf -d OpenCL0,CPU --ctx 8192
      ggmlb fit model.gguf -d CUDA0,CPU --memory CUDA0=6GiB --json
    """
    from ggmlb.models.text.fit import Wishes, open_planner
    from ggmlb.models.text.process_memory import process_memory
    from ggmlb.models.text.ways import Ways
    from ggmlb.system.process import n_cpus, resident_nbytes

    wishes = Wishes(
        layers_by_device(layers_on),
        gpu_layers,
        cpu_experts,
        kv_on,
        overrides_of(override),
        sizes_by_device(memory),
        adapters=tuple(Path(file_and_scale(option)[0]) for option in lora or ()),
    )
    cache = None if expert_cache is None else size_of(expert_cache, "--expert-cache")
    names = None if devices is None else device_names(devices)
    with ExitStack() as resources:
        asked = open_planner(resources, model_file(path, model), names, wishes, ctx, kv_type, ubatch, cache)
        ways = Ways(resources, asked, sizes_by_device(bandwidth, "--bandwidth"))
        planned = ways.planned()
        taken = ways.taken(way, planned)
        plain.note_devices(asked.backends, devices)
        assert taken.planner is not None and taken.fit is not None
        advice = list(_advice(taken.planner)) if taken.short else []
        process = {"resident": resident_nbytes() or 0}
        process |= process_memory(taken.planner, taken.fit, n_cpus())._asdict()
        report = Report(planned, taken, taken.planner, taken.fit, process, advice)
        if as_json:
            plain.echo(json.dumps(_as_json(report), indent=2))
        else:
            _print(report)
    if taken.short:
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
    ways, way, planner, (placement, table), process, advice = report
    out = console()
    if len(ways) > 1:
        _print_ways(out, ways, way, list(planner.free))
    room, config = planner.room, planner.config
    context = f"{room.n_ctx:,} tokens of context"
    if not config.state:
        context += f", {room.kv_type.name.lower()} KV cache"
    rows: list[Row] = []
    for device in planner.free:
        uses = [use for use in table if use.device == device]
        rows += [Row((device, use.memory, use.kind, readable_size(use.nbytes))) for use in uses]
        free = planner.free[device]
        told = "unknown" if free == float("inf") else readable_size(int(free))
        cells = (device, "", "total", readable_size(table.total(device)), told)
        rows.append(Row(cells, "red" if device in way.short else "bold"))
    print_table(out, f"{planner.file.path.name}: {config.n_layer} layers, {context}", COLUMNS, rows)
    told = ", ".join(f"{name} {readable_size(n)}" for name, n in process.items() if n)
    plain.echo(f"the process needs about {readable_size(sum(process.values()))} more ({told})")
    for name, parts in _parts(planner, placement).items():
        cost = way.costs[name]
        moved = f", {readable_size(cost.copied)} copied to it" if cost.copied else ""
        plain.echo(f"{name}: {parts}; {readable_size(cost.read)} of weights read per token{moved}")
    if way.short:
        for device, n in way.short.items():
            plain.echo(f"does not fit: {device} lacks {readable_size(n)}")
        plain.echo(
            f"would fit: {', or '.join(advice)}" if advice else "no option makes it fit: name further devices"
        )
    elif len(ways) > 1:
        plain.echo(f"to load the model like this: --way {way.name}")


def _print_ways(out: Console, ways: list[Way], taken: Way, devices: list[str]) -> None:
    """Print the ways to split the model, with time per token and memory of each device."""
    rows = []
    for way in ways:
        cells = [""] * (1 + len(devices))
        told = way.why
        if way.fit is not None:
            totals = (way.fit.table.total(device) for device in devices)
            cells = [f"{1000 * way.time:.1f}", *map(readable_size, totals)]
            lacking = ", ".join(f"{device} lacks {readable_size(n)}" for device, n in way.short.items())
            told = lacking or ("taken" if way is taken else "")
        rows.append(Row((way.name, *cells, told), "bold" if way is taken else ""))
    columns = [Column("Way"), Column("ms/token", right=True)]
    columns += [Column(device, right=True, drop=i + 1) for i, device in enumerate(devices)]
    title = "Ways to split the model, with the time per token at full context"
    print_table(out, title, [*columns, Column("", wraps=True)], rows)


def _parts(planner: Planner, placement: ModelPlacement) -> dict[str, str]:
    """Return what each device holds, in words."""
    from ggmlb.models.layers import held, ranges

    found = held(placement.homes, list(planner.backends))
    for name in planner.backends:
        experts = ranges(i for i, home in placement.experts.items() if home == name)
        more = [f"experts of layers {experts}"] if experts else []
        more += ["KV cache"] if placement.kv_on == name else []
        if more:
            found[name] = ", ".join([*([] if found[name] == "nothing" else [found[name]]), *more])
    return found


def _as_json(report: Report) -> dict[str, Any]:
    ways, way, planner, (placement, table), process, advice = report
    free = {device: None if n == float("inf") else int(n) for device, n in planner.free.items()}
    return {
        "fits": not way.short,
        "way": way.name,
        "ways": [_way_as_json(each) for each in ways] if len(ways) > 1 else [],
        "n_ctx": planner.room.n_ctx,
        "kv_type": planner.room.kv_type.name.lower(),
        "memory": table.as_list(),
        "total": {device: table.total(device) for device in planner.free},
        "free": free,
        "lacks": way.short,
        "process": process,
        "layers": {name: _layers_on(placement, name) for name in planner.backends},
        "experts": {str(layer): home for layer, home in placement.experts.items()},
        "embeddings": placement.homes["embeddings"],
        "output": placement.homes["output"],
        "kv_on": placement.kv_on,
        "per_token": {name: cost._asdict() for name, cost in way.costs.items()},
        "would_fit": advice,
    }


def _way_as_json(way: Way) -> dict[str, Any]:
    if way.planner is None or way.fit is None:
        return {"way": way.name, "why_not": way.why}
    return {
        "way": way.name,
        "devices": list(way.planner.backends),
        "seconds": way.time,
        "lacks": way.short,
        "total": {device: way.fit.table.total(device) for device in way.planner.free},
        "layers": {name: _layers_on(way.fit.placement, name) for name in way.planner.backends},
        "output": way.fit.placement.homes["output"],
        "per_token": {name: cost._asdict() for name, cost in way.costs.items()},
    }


def _layers_on(placement: ModelPlacement, name: str) -> str:
    from ggmlb.models.layers import ranges

    return ranges(i for i, home in placement.homes.items() if home == name and isinstance(i, int))
