"""Placement: devices of a language model's weights and KV cache, as requested and as resolved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ggmlb import BufferType
from ggmlb.core.arguments import checked_methods, named
from ggmlb.models.layers import Layers
from ggmlb.runtime.alloc import override_for

CACHE_NAMES = ("cache_k", "cache_v")
STATE_NAMES = ("state_conv", "state_scan", "state_time", "state_channel")
KV_NAMES = (*CACHE_NAMES, *STATE_NAMES)
"""Names of the tensors of a layer's KV cache, or recurrent states; a point and the layer's number follow."""


@named("Placement(...)")
@checked_methods
@dataclass(frozen=True)
class Placement:
    r"""The devices of a `TextModel`, and which parts of the model go to each.

    Most programs need `devices`, and sometimes `layers`. By default, as many layers as fit go to the first
    device, the next ones to the second, and so on.

    Example: `TextModel(path, placement=Placement(["CUDA0", "CPU"], layers=20))`

    Attributes:
        devices: Device names, highest priority first; the last one runs the ops that no other supports. By
            default the first GPU, accelerators in the CPU's memory (LLVM), and the CPU. `"CUDA0+CUDA1"` is a
            meta device: both compute each layer together.
        layers: The layers of each device. A number: that many of the last layers, and the output, on the
            first device, the rest on the second (llama.cpp's `--gpu-layers`). A mapping: layers by device, as
            `{"CUDA0": "0-9", "CPU": "output"}`; see `assign_layers`. A name of `STRATEGIES`, or `"best"`: how
            the devices share the model; `"best"` takes the one with the least predicted time per token.
        overrides: Devices of single tensors, by regular expression over their names; the first match counts.
            `{"exps": "CPU"}` leaves all experts on the CPU, `{r"blk\.[0-3]\..*exps": "CPU"}` those of four
            layers; `{"cache_": "CPU"}` puts the KV cache there, and with it attention (`cache_k.N`,
            `cache_v.N`; `state_conv.N` of recurrent models). A value may be any `BufferType` for weights;
            `"CUDA0_Split"` splits the rows of matrices over all CUDA devices.
        limits: Most bytes on a device, as `{"CUDA0": 6 << 30}`; by default its free memory.
        expert_cache: Memory for the most used experts on the devices of their layers [bytes]; all experts
            are in host memory then. By default there is no cache.
    """

    devices: Sequence[str] | None = None
    layers: int | str | Mapping[str, Layers] | None = None
    overrides: Mapping[str, str | BufferType] | None = None
    limits: Mapping[str, int] | None = None
    expert_cache: int | None = None


@dataclass(frozen=True)
class ResolvedPlacement:
    """The device of each part of a model: layers, experts, embeddings, output, single tensors.

    Attributes:
        homes: The device of each layer, of the `"embeddings"`, and of the `"output"`.
        experts: The device of a layer's experts, where it differs from the layer's.
        overrides: Devices of the model, or other memory, of single tensors, by regular expression.
    """

    homes: Mapping[int | str, str]
    experts: Mapping[int, str] = field(default_factory=dict)
    overrides: Mapping[str, str | BufferType] = field(default_factory=dict)

    @property
    def buffer_types(self) -> dict[str, BufferType | None]:
        """Buffer types requested for tensors, by regular expression; `None` where a device was requested."""
        return {
            pattern: None if isinstance(where, str) else where for pattern, where in self.overrides.items()
        }

    def device_of(self, name: str, layer: int | str) -> str:
        """Return the device of the tensor `name`; `layer`: its layer, `"embeddings"` or `"output"`."""
        found = override_for(name, self.overrides)
        if isinstance(found, str):
            return found
        if isinstance(layer, int) and is_expert(name):
            return self.experts.get(layer, self.homes[layer])
        return self.homes[layer]

    def experts_device(self, layer: int) -> str | None:
        """Return the device of a layer's experts; `None` if it is the layer's own."""
        found = override_for(f"blk.{layer}.ffn_up_exps.weight", self.overrides)
        return found if isinstance(found, str) else self.experts.get(layer)

    def kv_override(self, layer: int, names: Sequence[str] = KV_NAMES) -> str | None:
        """Return the device of a layer's KV cache or recurrent states; `None` if it is the layer's own."""
        found = [override_for(f"{name}.{layer}", self.overrides) for name in names]
        return next((device for device in found if isinstance(device, str)), None)


def is_expert(name: str) -> bool:
    """Whether a weight holds the matrices of all experts of a layer, judged by its name."""
    return name.endswith("_exps.weight")
