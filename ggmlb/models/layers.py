"""Assignment of layers to devices, parsed from requests such as `"0-2,5"`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ggmlb.core.errors import ArgumentError, RegistryError, did_you_mean

EMBEDDINGS = "embeddings"
"""Key of the weights before the first layer, in place of a layer's number."""

OUTPUT = "output"
"""Key of the weights after the last layer."""

Layers = str | Iterable[int | str]
"""Layers of a device: `"0-2,5"`, `"all"`, `"embeddings"`, `"output"`, or a list of numbers and such texts."""


def assign_layers(
    layers_on: Mapping[str, Layers] | None,
    devices: Sequence[str],
    n_layer: int,
    parts: Sequence[str] = (EMBEDDINGS,),
) -> dict[int | str, str]:
    """Assign layers and other `parts` (embeddings, output) to devices, as `layers_on` requests.

    Without requests, all layers are on the first device; otherwise, other layers are on the last device. By
    default, the embeddings are on the last device, and the output on that of the last layer.

    Args:
        layers_on: Layers by device.
        devices: Names, highest priority first.
        n_layer: Number of layers.
        parts: Other parts of the model: `EMBEDDINGS`, `OUTPUT`.

    Raises:
        RegistryError: A device that is not among `devices`.
        ArgumentError: No such layer, or one requested twice.
    """
    rest = devices[-1] if layers_on else devices[0]
    named: dict[int | str, str] = {}
    for device, wanted in (layers_on or {}).items():
        if device not in devices:
            raise RegistryError(f"layers are requested on {device!r}{did_you_mean(device, devices)}")
        for layer in _read(device, wanted, n_layer, parts):
            if named.setdefault(layer, device) != device:
                what = f"the {layer}" if isinstance(layer, str) else f"layer {layer}"
                raise ArgumentError(f"{what} is requested on {named[layer]} and on {device}; name it once")
    homes = dict.fromkeys(range(n_layer), rest) | named
    beside = {EMBEDDINGS: devices[-1], OUTPUT: homes[n_layer - 1]}
    return {part: beside[part] for part in parts} | homes


def held(homes: Mapping[int | str, str], devices: Sequence[str]) -> dict[str, str]:
    """Describe the parts on each of `devices` (`"layers 0-2,5, the output"`); `homes`: device by part."""
    found = {}
    for device in devices:
        parts = [part for part, home in homes.items() if home == device]
        layers = [part for part in parts if isinstance(part, int)]
        words = [f"layers {ranges(layers)}"] if layers else []
        words += [f"the {part}" for part in parts if isinstance(part, str)]
        found[device] = ", ".join(words) or "nothing"
    return found


def ranges(numbers: Iterable[int]) -> str:
    """Format layer numbers as ranges, such as `"0-2,5"`, which `assign_layers` parses."""
    found: list[list[int]] = []
    for n in sorted(numbers):
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _read(device: str, wanted: Layers, n_layer: int, parts: Sequence[str]) -> list[int | str]:
    texts = wanted.split(",") if isinstance(wanted, str) else [str(w) for w in wanted]
    found: list[int | str] = []
    for given in texts:
        text = given.strip()
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if text in parts:
            found.append(text)
        elif text == "all":
            found += range(n_layer)
        elif span is None:
            raise ArgumentError(
                f"layers of {device}: {given!r} is not a layer; give numbers and ranges as '0-2,5', "
                f"'all' or {' or '.join(map(repr, parts))}"
            )
        else:
            first, last = int(span[1]), int(span[2] or span[1])
            if not first <= last < n_layer:
                raise ArgumentError(
                    f"layers of {device}: {text} is not within 0-{n_layer - 1}, the model's layers"
                )
            found += range(first, last + 1)
    return found
