"""`ggmlb fit`: the memory of a GGUF model on some devices, and whether it fits, before it is loaded."""

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
    SplitModeOption,
    UbatchOption,
    file_and_scale,
    model_file,
    placement_of,
)
from ggmlb.cli.options import DevicesOption, JsonOption, LayersOption, sizes_by_device
from ggmlb.core.errors import readable_size

if TYPE_CHECKING:
    from rich.console import Console

    from ggmlb.models.text.placement import ResolvedPlacement
    from ggmlb.models.text.planner import Fit, Planner
    from ggmlb.models.text.strategies import ParallelStrategy

BandwidthOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bandwidth",
        metavar="NAME=SIZE",
        help="Memory bandwidth of a device per second, as CUDA0=900G (default: measured); repeatable.",
    ),
]

COLUMNS = (
    Column("Device"), Column("Memory", drop=1), Column("Contents"), Column("Size", right=True),
    Column("Free", right=True),
)  # fmt: skip

OTHER_TYPES = ("q8_0", "q4_0")
"""Types of the KV cache that are smaller than f16, the most precise first."""


class Report(NamedTuple):
    """The memory of a model and the split modes compared, to be printed.

    Attributes:
        strategies: All split modes.
        chosen: The split mode in use.
        planner: Its planner.
        fit: Its placement and memory.
        process: Bytes of this process, and bytes that loading and computing add outside of buffers.
        advice: Options with which the model would fit.
    """

    strategies: list[ParallelStrategy]
    chosen: ParallelStrategy
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
    split_mode: SplitModeOption = "best",
    bandwidth: BandwidthOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the memory of a model by device and kind, to the byte, and whether it fits; no weights are read.

    Layers and experts are placed so that they fit, unless options place them. For several devices with
    separate memory, each split mode is shown with the predicted time per token at full context, from measured
    bandwidths; the fastest that fits is chosen. If the model does not fit, the exit status is 1, and options
    with which it would fit are shown.

    Examples:
      ggmlb fit model.gguf -d OpenCL0,CPU --ctx 8192
      ggmlb fit model.gguf -d CUDA0,CPU --memory CUDA0=6GiB --json
    """
    from ggmlb.models.text.planner import open_planner
    from ggmlb.models.text.process_memory import process_memory
    from ggmlb.models.text.strategies import StrategyPlanner
    from ggmlb.system.process import n_cpus, resident_nbytes

    requested = placement_of(
        devices, layers_on=layers_on, gpu_layers=gpu_layers, override=override, cpu_experts=cpu_experts,
        kv_on=kv_on, memory=memory, expert_cache=expert_cache,
    )  # fmt: skip
    adapters = [Path(file_and_scale(option)[0]) for option in lora or ()]
    with ExitStack() as resources:
        asked = open_planner(resources, model_file(path, model), requested, ctx, kv_type, ubatch, adapters)
        strategies = StrategyPlanner(resources, asked, sizes_by_device(bandwidth, "--bandwidth"))
        planned = strategies.planned()
        chosen = strategies.taken(split_mode, planned)
        plain.note_devices(asked.backends, devices)
        assert chosen.planner is not None and chosen.fit is not None
        advice = list(_advice(chosen.planner)) if chosen.short else []
        process = {"resident": resident_nbytes() or 0}
        process |= process_memory(chosen.planner, chosen.fit, n_cpus())._asdict()
        report = Report(planned, chosen, chosen.planner, chosen.fit, process, advice)
        if as_json:
            plain.echo(json.dumps(_as_json(report), indent=2))
        else:
            _print(report)
    if chosen.short:
        raise typer.Exit(1)


def _advice(planner: Planner) -> Iterator[str]:
    """Yield options with which the model would fit."""
    from ggmlb import DType

    most = planner.largest_context()
    if most:
        yield f"--ctx {most}"
    if planner.config.has_kv:
        for name in OTHER_TYPES:
            dtype = DType.parse(name)
            heads = [n for a in planner.config.attentions if a for n in (a.n_key, a.n_value)]
            is_smaller = dtype.row_size(256) < planner.params.kv_type.row_size(256)
            suits = is_smaller and not any(n % dtype.block_size for n in heads)
            if suits and planner.with_params(kv_type=dtype).best_fits():
                yield f"--kv-type {name}"
                break
    asked = planner.requested.layers
    if asked and isinstance(asked, int):
        n = planner.most_gpu_layers()
        if n is not None and n < asked:
            yield f"--gpu-layers {n}"


def _print(report: Report) -> None:
    strategies, chosen, planner, (placement, table), process, advice = report
    out = console()
    if len(strategies) > 1:
        _print_strategies(out, strategies, chosen, list(planner.free))
    params, config = planner.params, planner.config
    context = f"{params.n_ctx:,} tokens of context"
    if config.has_kv:
        context += f", {params.kv_type.name.lower()} KV cache"
    rows: list[Row] = []
    for device in planner.free:
        uses = [use for use in table if use.device == device]
        rows += [Row((device, use.memory, use.kind, readable_size(use.nbytes))) for use in uses]
        free = planner.free[device]
        room = "unknown" if free == float("inf") else readable_size(int(free))
        cells = (device, "", "total", readable_size(table.total(device)), room)
        rows.append(Row(cells, "red" if device in chosen.short else "bold"))
    print_table(out, f"{planner.file.path.name}: {config.n_layer} layers, {context}", COLUMNS, rows)
    parts = ", ".join(f"{name} {readable_size(n)}" for name, n in process.items() if n)
    plain.echo(f"further memory of the process: about {readable_size(sum(process.values()))} ({parts})")
    for name, words in _parts(planner, placement).items():
        cost = chosen.costs[name]
        moved = f", and {readable_size(cost.copied)} are copied to it" if cost.copied else ""
        plain.echo(f"{name}: {words}; each token reads {readable_size(cost.read)} of weights{moved}")
    if chosen.short:
        for device, n in chosen.short.items():
            plain.echo(f"does not fit: {device} lacks {readable_size(n)}")
        plain.echo(
            f"would fit: {', or '.join(advice)}" if advice else "no option makes it fit: name further devices"
        )
    elif len(strategies) > 1:
        plain.echo(f"to load it like this: --split-mode {chosen.name}")


def _print_strategies(
    out: Console, strategies: list[ParallelStrategy], chosen: ParallelStrategy, devices: list[str]
) -> None:
    """Print the strategies, with the time of a token, and the memory of each device."""
    rows = []
    for each in strategies:
        cells = [""] * (1 + len(devices))
        note = each.why
        if each.fit is not None:
            totals = (each.fit.table.total(device) for device in devices)
            cells = [f"{1000 * each.time:.1f}", *map(readable_size, totals)]
            lacking = ", ".join(f"{device} lacks {readable_size(n)}" for device, n in each.short.items())
            note = lacking or ("chosen" if each is chosen else "")
        rows.append(Row((each.name, *cells, note), "bold" if each is chosen else ""))
    columns = [Column("Split mode"), Column("Token [ms]", right=True)]
    columns += [Column(device, right=True, drop=i + 1) for i, device in enumerate(devices)]
    title = "Split modes, with the predicted time of a token at the end of a full context"
    print_table(out, title, [*columns, Column("", wraps=True)], rows)


def _parts(planner: Planner, placement: ResolvedPlacement) -> dict[str, str]:
    """Return the parts of the model on each device, in words."""
    from ggmlb.models.layers import held, ranges

    found = held(placement.homes, list(planner.backends))
    layers = range(planner.config.n_layer)
    for name in planner.backends:
        experts = ranges(i for i in layers if placement.experts_device(i) == name)
        more = [f"experts of layers {experts}"] if experts and planner.config.experts else []
        kv = ranges(i for i in layers if placement.kv_override(i) == name)
        more += [f"the KV cache of layers {kv}"] if kv else []
        if more:
            found[name] = ", ".join([*([] if found[name] == "nothing" else [found[name]]), *more])
    return found


def _as_json(report: Report) -> dict[str, Any]:
    strategies, chosen, planner, (placement, table), process, advice = report
    layers = range(planner.config.n_layer)
    free = {device: None if n == float("inf") else int(n) for device, n in planner.free.items()}
    return {
        "fits": not chosen.short,
        "split_mode": chosen.name,
        "split_modes": [_strategy_as_json(each) for each in strategies] if len(strategies) > 1 else [],
        "n_ctx": planner.params.n_ctx,
        "kv_type": planner.params.kv_type.name.lower(),
        "memory": table.as_list(),
        "total": {device: table.total(device) for device in planner.free},
        "free": free,
        "lacks": chosen.short,
        "process": process,
        "layers": {name: _layers_on(placement, name) for name in planner.backends},
        "experts": {str(i): device for i in layers if (device := placement.experts_device(i))},
        "embeddings": placement.homes["embeddings"],
        "output": placement.homes["output"],
        "kv_cache": {str(i): device for i in layers if (device := placement.kv_override(i))},
        "per_token": {name: cost._asdict() for name, cost in chosen.costs.items()},
        "would_fit": advice,
    }


def _strategy_as_json(strategy: ParallelStrategy) -> dict[str, Any]:
    if strategy.planner is None or strategy.fit is None:
        return {"split_mode": strategy.name, "why_not": strategy.why}
    return {
        "split_mode": strategy.name,
        "devices": list(strategy.planner.backends),
        "seconds": strategy.time,
        "lacks": strategy.short,
        "total": {device: strategy.fit.table.total(device) for device in strategy.planner.free},
        "layers": {name: _layers_on(strategy.fit.placement, name) for name in strategy.planner.backends},
        "output": strategy.fit.placement.homes["output"],
        "per_token": {name: cost._asdict() for name, cost in strategy.costs.items()},
    }


def _layers_on(placement: ResolvedPlacement, name: str) -> str:
    from ggmlb.models.layers import ranges

    return ranges(i for i, home in placement.homes.items() if home == name and isinstance(i, int))
