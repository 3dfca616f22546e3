"""Assignment of layers to devices, parsed from users' requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ggmlb.core.errors import ArgumentError, RegistryError, did_you_mean

EMBEDDINGS = "embeddings"
"""Key of the weights before the first layer, in place of a layer's number."""

Layers = str | Iterable[int | str]
"""Layers of a device: `"0-2,5"`, `"all"`, `"embeddings"`, or a list of numbers and such texts."""


def assign_layers(
    layers_on: Mapping[str, Layers] | None, devices: Sequence[str], n_layer: int
) -> dict[int | str, str]:
    """Return the device of each layer, and of the `EMBEDDINGS`.

    Without requests, all layers are on the first device; otherwise, layers not named are on the last
    device. The embeddings are on the last device unless named.

    Args:
        layers_on: For each device named, its layers.
        devices: Names, highest priority first.
        n_layer: Layers of the model.

    Raises:
        RegistryError: A device that is not among `devices`.
        ArgumentError: No such layer, or one requested twice.
    """
    rest = devices[-1] if layers_on else devices[0]
    homes: dict[int | str, str] = {EMBEDDINGS: devices[-1], **dict.fromkeys(range(n_layer), rest)}
    named: dict[int | str, str] = {}
    for device, wanted in (layers_on or {}).items():
        if device not in devices:
            raise RegistryError(f"layers are asked for on {device!r}{did_you_mean(device, devices)}")
        for layer in _read(device, wanted, n_layer):
            if named.setdefault(layer, device) != device:
                what = f"layer {layer}" if layer != EMBEDDINGS else "the embeddings"
                raise ArgumentError(f"{what} cannot lie both on {named[layer]} and on {device}")
    return homes | named


def _read(device: str, wanted: Layers, n_layer: int) -> list[int | str]:
    parts = wanted.split(",") if isinstance(wanted, str) else [str(w) for w in wanted]
    found: list[int | str] = []
    for part in parts:
        text = part.strip()
        span = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
        if text == EMBEDDINGS:
            found.append(EMBEDDINGS)
        elif text == "all":
            found += range(n_layer)
        elif span is None:
            raise ArgumentError(
                f"layers of {device}: {part!r} is not a layer; give numbers and ranges as '0-2,5', "
                f"'all' or '{EMBEDDINGS}'"
            )
        else:
            first, last = int(span[1]), int(span[2] or span[1])
            if not first <= last < n_layer:
                raise ArgumentError(
                    f"layers of {device}: {text} is not within 0-{n_layer - 1}, the model's layers"
                )
            found += range(first, last + 1)
    return found
