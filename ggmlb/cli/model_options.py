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
    from ggmlb.models import Placement, TextModel

ModelArgument = Annotated[
    Path | None, typer.Argument(metavar="[MODEL]", help="GGUF file; of a split model, the first part.")
]
ModelFileOption = Annotated[
    Path | None,
    typer.Option(
        "--model",
        "-m",
        metavar="FILE",
        help="GGUF file, or a name as org/repo:Q4_K_M; as the argument MODEL.",
    ),
]
GpuLayersOption = Annotated[
    int | None,
    typer.Option(
        "--gpu-layers",
        "-ngl",
        help="Number of layers on the first device, counted from the last (default: as many as fit).",
        min=0,
    ),
]
ContextOption = Annotated[
    int | None, count("--ctx", "-c", help="Context size in tokens (default: the model's, at most 4096).")
]
KvOption = Annotated[
    str,
    typer.Option(
        "--kv-type", metavar="TYPE", help="Data type of the KV cache: f32, f16, bf16, q8_0 or q4_0."
    ),
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-ot",
        metavar="REGEX=DEVICE",
        help="Device of the tensors whose names match a regular expression, as 'exps=CPU'; repeatable.",
    ),
]
KvOnOption = Annotated[
    str | None,
    typer.Option(
        "--kv-on",
        metavar="NAME",
        help="Device of the KV cache, which computes attention (default: that of each layer).",
    ),
]
CpuExpertsOption = Annotated[
    bool, typer.Option("--cpu-experts", help="Keep the experts of all layers on the CPU.")
]
MemoryOption = Annotated[
    list[str] | None,
    typer.Option(
        "--memory",
        metavar="NAME=SIZE",
        help="Memory limit of a device, as OpenCL0=200MiB (default: its free memory); repeatable.",
    ),
]
SplitModeOption = Annotated[
    str,
    typer.Option(
        "--split-mode",
        "-sm",
        help="How several devices share the model: layer (whole layers, devices filled in order), fastest "
        "(the fastest device filled first), tensor (each layer on several devices), row (rows of matrices), "
        "or best (least predicted time per token).",
    ),
]
ExpertCacheOption = Annotated[
    str | None,
    typer.Option(
        "--expert-cache",
        metavar="SIZE",
        help="Keep all experts in host memory, and the most used ones in this much device memory, as 2GiB.",
    ),
]
FitOption = Annotated[
    bool,
    typer.Option(help="Place layers and experts so that they fit; --no-fit: all layers on the first device."),
]
ThreadsOption = Annotated[
    int | None, typer.Option("--threads", "-t", help="Number of CPU threads (default: all).", min=1)
]
UbatchOption = Annotated[
    int | None,
    typer.Option(
        "--ubatch", help="Tokens per step of a pipeline over devices, 1 to 512 (default: no pipeline).", min=1
    ),
]
DraftOption = Annotated[
    Path | None,
    typer.Option(
        "--draft",
        "-md",
        metavar="FILE",
        help="Smaller model of the same vocabulary, which drafts tokens that the model verifies together.",
    ),
]
DraftMaxOption = Annotated[int, count("--draft-max", help="Maximum number of tokens of a draft.")]
LoraOption = Annotated[
    list[str] | None,
    typer.Option(
        "--lora",
        metavar="FILE[=SCALE]",
        help="LoRA adapter, a GGUF file; =SCALE multiplies its effect (default: 1); repeatable.",
    ),
]


ALL_LAYERS = 1 << 20
"""More layers than a model has."""

EXPERTS, KV_CACHE = r"_exps\.", r"^(cache|state)_"
"""Patterns of the weights of experts, and of the tensors of the KV cache or of recurrent states."""

OpenModel = Callable[..., "TextModel"]
"""Opens the model with the options of the command line; keyword arguments replace single options."""


def model_file(argument: Path | None, option: Path | None) -> Path:
    """Return the model file, given as an argument or as an option.

    Raises:
        BadParameter: Neither is given, or both.
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
    split_mode: SplitModeOption = "layer",
    fit: FitOption = True,
    lora: LoraOption = None,
    draft: DraftOption = None,
    draft_max: DraftMaxOption = 3,
    ubatch: UbatchOption = None,
    threads: ThreadsOption = None,
    address: AddressOption = None,
) -> TextModel:
    """Open a model with the options of the command line.

    Raises:
        Error: As `TextModel`.
        ArgumentError: The value of an option is invalid.
    """
    from ggmlb.models import TextModel

    placement = placement_of(
        devices, layers_on=layers_on, gpu_layers=gpu_layers, override=override, cpu_experts=cpu_experts,
        kv_on=kv_on, memory=memory, expert_cache=expert_cache, split_mode=split_mode, fit=fit,
    )  # fmt: skip
    opened = TextModel(
        model_file(path, model),
        placement=placement,
        n_ctx=ctx,
        kv_type=kv_type,
        threads=threads,
        n_ubatch=ubatch,
        adapters=[file_and_scale(option) for option in lora or ()],
        draft=draft,
        n_draft=draft_max,
    )
    if opened.n_ctx > (n := opened.config.n_ctx_train):
        plain.note(f"the context of {opened.n_ctx:,} tokens exceeds the {n:,} that the model was trained for")
    plain.note_devices((stream.device.name for stream in opened.backends), devices)
    return opened


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that it has the options of `open_model`; its first parameter opens the model.

    Of options that both have, the command's own is used; it may pass it to `open_model`.
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


def placement_of(
    devices: str | None,
    *,
    layers_on: list[str] | None,
    gpu_layers: int | None,
    override: list[str] | None,
    cpu_experts: bool,
    kv_on: str | None,
    memory: list[str] | None,
    expert_cache: str | None,
    split_mode: str = "layer",
    fit: bool = True,
) -> Placement:
    """Return the placement given by options.

    Raises:
        ArgumentError: The value of an option is invalid, or options contradict each other.
    """
    from ggmlb.models import Placement
    from ggmlb.models.devices import device_names as with_defaults
    from ggmlb.models.devices import host_device

    if layers_on is not None and gpu_layers is not None:
        raise ArgumentError("--gpu-layers and --layers-on were both given; give one of them")
    by_device = layers_by_device(layers_on)
    layers: int | str | dict[str, list[str]] | None = by_device or gpu_layers
    if split_mode != "layer":
        if layers is not None and split_mode != "best":
            raise ArgumentError(
                f"--split-mode {split_mode} chooses the layers; leave out --gpu-layers and --layers-on"
            )
        layers = split_mode if layers is None else layers
    elif layers is None and not fit:
        layers = ALL_LAYERS
    named = None if devices is None else device_names(devices)
    names = with_defaults(named, list(by_device or ()))
    overrides: dict[str, str | BufferType] = {}
    for option in override or ():
        pattern, equals, device = option.rpartition("=")
        if not (pattern and equals and device):
            raise ArgumentError(f"--override {option}: give REGEX=DEVICE, as 'exps=CPU'")
        overrides[pattern] = device
    if cpu_experts:
        host = host_device(names)
        if host is None:
            raise ArgumentError(f"--cpu-experts: none of {', '.join(names)} is a processor; add CPU")
        overrides[EXPERTS] = host
    if kv_on is not None:
        if kv_on not in names:
            raise ArgumentError(f"--kv-on {kv_on}: give one of the devices {', '.join(names)}")
        overrides[KV_CACHE] = kv_on
    cache = None if expert_cache is None else size_of(expert_cache, "--expert-cache")
    return Placement(named, layers, overrides, sizes_by_device(memory), cache)


def file_and_scale(option: str) -> tuple[str, float]:
    """Parse `FILE[=SCALE]`; if no number follows the last `=`, all of it is the file's name."""
    file, equals, scale = option.rpartition("=")
    try:
        return (file, float(scale)) if file and equals else (option, 1.0)
    except ValueError:
        return option, 1.0
