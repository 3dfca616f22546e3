"""Options of the commands that open a GGUF model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ggmlb.cli import plain
from ggmlb.cli.options import (
    AddressOption,
    DevicesOption,
    LayersOption,
    count,
    device_names,
    layers_by_device,
    size_of,
    sizes_by_device,
)
from ggmlb.core.errors import ArgumentError

if TYPE_CHECKING:
    from ggmlb import BufferType
    from ggmlb.models import TextModel

ModelArgument = Annotated[
    Path | None, typer.Argument(metavar="[MODEL]", help="GGUF file; of a split model, the first part.")
]
ModelFileOption = Annotated[
    Path | None,
    typer.Option("--model", "-m", metavar="FILE", help="GGUF file, in place of the argument MODEL."),
]
GpuLayersOption = Annotated[
    int | None,
    count(
        "--gpu-layers",
        "-ngl",
        help="Number of layers to offload to the first device, from the last down (default: all that fit).",
        least=0,
    ),
]
ContextOption = Annotated[
    int | None, count("--ctx", "-c", help="Context size in tokens (default: the model's, at most 4096).")
]
KvOption = Annotated[
    str, typer.Option("--kv-type", metavar="TYPE", help="Data type of the KV cache: f32, f16, q8_0 or q4_0.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-ot",
        metavar="REGEX=DEVICE",
        help="Device for the weights whose names match a pattern, as 'exps=CPU' (repeatable).",
    ),
]
KvOnOption = Annotated[
    str | None,
    typer.Option(
        "--kv-on",
        metavar="NAME",
        help="Device that holds the whole KV cache and computes attention (default: each layer's own).",
    ),
]
CpuExpertsOption = Annotated[
    bool, typer.Option("--cpu-experts", help="Keep the experts' weights of all layers in CPU memory.")
]
MemoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--memory",
        metavar="NAME=SIZE",
        help="Memory limit of a device, as OpenCL0=200MiB (default: its free memory; repeatable).",
    ),
]
WayOption = Annotated[
    str,
    typer.Option(
        "--way",
        metavar="WAY",
        help="Split over devices: layers (whole layers, in the order of --devices), fastest (whole layers, "
        "fastest device first), shared (each layer over several devices), rows (matrices by rows), or best "
        "(least predicted time per token).",
    ),
]
ExpertCacheOption = Annotated[
    str | None,
    typer.Option(
        "--expert-cache",
        metavar="SIZE",
        help="Device memory for a cache of the experts used most, as 2GiB; all experts stay in host memory.",
    ),
]
FitOption = Annotated[
    bool, typer.Option(help="Place layers and experts to fit device memory, unless other options place them.")
]
ThreadsOption = Annotated[
    int | None, count("--threads", "-t", help="Number of CPU threads (default: all cores).")
]
UbatchOption = Annotated[
    int | None,
    count(
        "--ubatch",
        help="Micro-batch of a pipeline over several devices, 1 to 512 tokens (default: no pipeline).",
    ),
]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[=SCALE]",
        help="LoRA adapter, a GGUF file, and its scale (default: 1; repeatable).",
    ),
]


OpenModel = Callable[..., "TextModel"]
"""Opens the model as the options say; arguments by name take their place."""


def model_file(argument: Path | None, option: Path | None) -> Path:
    """Return the model's file, given as an argument or as an option.

    Raises:
        BadParameter: It is not given, or twice.
    """
    if (argument is None) == (option is None):
        raise typer.BadParameter("give the model once: as the argument MODEL, or with --model FILE (-m)")
    return argument or option  # type: ignore[return-value]


def open_model(
    path: ModelArgument = None,
    model: ModelFileOption = None,
    devices: DevicesOption = None,
    layers_on: LayersOption = None,
    gpu_layers: GpuLayersOption = None,
    ctx: ContextOption = None,
    kv_type: KvOption = "f16",
    override: OverrideOption = None,
    cpu_experts: CpuExpertsOption = False,
    expert_cache: ExpertCacheOption = None,
    kv_on: KvOnOption = None,
    memory: MemoryOption = None,
    way: WayOption = "layers",
    fit: FitOption = True,
    lora: LoraOption = None,
    ubatch: UbatchOption = None,
    threads: ThreadsOption = None,
    address: AddressOption = None,
) -> TextModel:
    """Open a model as the options say.

    Raises:
        Error: As `TextModel`.
        ArgumentError: An option is not as its help says.
    """
    from ggmlb.models import TextModel

    opened = TextModel(
        model_file(path, model),
        None if devices is None else device_names(devices),
        layers_by_device(layers_on),
        gpu_layers,
        ctx,
        kv_type,
        overrides_of(override),
        None if expert_cache is None else size_of(expert_cache, "--expert-cache"),
        threads=threads,
        n_ubatch=ubatch,
        cpu_experts=cpu_experts,
        kv_on=kv_on,
        adapters=[file_and_scale(option) for option in lora or ()],
        memory_limits=sizes_by_device(memory),
        way=way,
        fit=fit,
    )
    if opened.n_ctx > (n := opened.config.n_ctx_train):
        plain.note(f"the context of {opened.n_ctx:,} tokens exceeds the {n:,} that the model was trained for")
    plain.note_devices((stream.device.name for stream in opened.backends), devices)
    return opened


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `open_model`, in place of its first parameter, an `OpenModel`.

    An option that the command has itself is its own: it passes it on when it opens the model, or not.
    """
    (_, *own), options = _parameters(command), _parameters(open_model)
    names = {parameter.name for parameter in own}
    others = [parameter for parameter in options if parameter.name not in names]

    @wraps(command)
    def run(**given: Any) -> None:
        chosen = {parameter.name: given.pop(parameter.name) for parameter in others}
        command(partial(open_model, **chosen), **given)

    both = [*others[:2], *own, *others[2:]]
    run.__signature__ = Signature(both)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in both}
    return run


def _parameters(function: Callable[..., Any]) -> list[Parameter]:
    """Return the parameters with their annotations as typer reads them, each to be given by name."""
    # Not by get_type_hints: before Python 3.11 it hides annotations of options that are None by default.
    found = signature(function, eval_str=True, locals={"TextModel": Any})
    return [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in found.parameters.values()]


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


def file_and_scale(option: str) -> tuple[str, float]:
    """Parse `FILE[=SCALE]`; what no number follows is a file's name with `=` in it."""
    file, equals, scale = option.rpartition("=")
    try:
        return (file, float(scale)) if file and equals else (option, 1.0)
    except ValueError:
        return option, 1.0
