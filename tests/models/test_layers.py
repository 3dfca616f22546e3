"""Which device holds which layer: what users write, and what is wrong with it."""

from __future__ import annotations

import pytest

from ggmlb.core.errors import ArgumentError, RegistryError
from ggmlb.models.layers import EMBEDDINGS, OUTPUT, assign_layers

TWO = ["OpenCL0", "CPU"]


@pytest.mark.parametrize(
    ("layers_on", "devices", "expected"),
    [
        (None, ["CPU"], "CCCC C"),
        (None, TWO, "OOOO C"),
        ({"OpenCL0": "0-1"}, TWO, "OOCC C"),
        ({"CPU": "0-1", "OpenCL0": "2-3"}, TWO, "CCOO C"),
        ({"OpenCL0": "3,0"}, TWO, "OCCO C"),
        ({"OpenCL0": [0, "2-3"]}, TWO, "OCOO C"),
        ({"OpenCL0": " all "}, TWO, "OOOO C"),
        ({"OpenCL0": "embeddings"}, TWO, "CCCC O"),
        ({"OpenCL0": "all,embeddings"}, TWO, "OOOO O"),
        ({"OpenCL0": "1,1-2"}, TWO, "COOC C"),
        ({"CPU": "0-1"}, ["CPU", "OpenCL0"], "CCOO O"),
    ],
)
def test_assigns(layers_on: dict[str, object] | None, devices: list[str], expected: str) -> None:
    homes = assign_layers(layers_on, devices, 4)  # type: ignore[arg-type]
    found = "".join(homes[i][0] for i in range(4)) + " " + homes[EMBEDDINGS][0]
    assert found == expected


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ("0-4", "not within 0-3"),
        ("3-1", "not within 0-3"),
        ("7", "not within 0-3"),
        ("first", "'first' is not a layer"),
        ("", "'' is not a layer"),
        ("-1", "'-1' is not a layer"),
    ],
)
def test_refuses_wrong_layers(layers: str, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        assign_layers({"OpenCL0": layers}, TWO, 4)


@pytest.mark.parametrize(
    ("layers_on", "expected"),
    [
        (None, "OOOO C O"),
        ({"OpenCL0": "0-1"}, "OOCC C C"),
        ({"OpenCL0": "0-1,output"}, "OOCC C O"),
        ({"OpenCL0": "all,embeddings", "CPU": "output"}, "OOOO O C"),
    ],
)
def test_the_output_lies_with_the_last_layer_unless_named(
    layers_on: dict[str, object] | None, expected: str
) -> None:
    homes = assign_layers(layers_on, TWO, 4, (EMBEDDINGS, OUTPUT))  # type: ignore[arg-type]
    assert "".join(homes[i][0] for i in range(4)) + f" {homes[EMBEDDINGS][0]} {homes[OUTPUT][0]}" == expected
    with pytest.raises(ArgumentError, match=r"'output' is not a layer.*'all' or 'embeddings'$"):
        assign_layers({"OpenCL0": "output"}, TWO, 4)


def test_refuses_a_layer_on_two_devices() -> None:
    with pytest.raises(ArgumentError, match="layer 2 is requested on OpenCL0 and on CPU"):
        assign_layers({"OpenCL0": "0-2", "CPU": "2-3"}, TWO, 4)


def test_refuses_a_device_that_is_not_used() -> None:
    with pytest.raises(RegistryError, match="'OpenCL1'; did you mean 'OpenCL0'"):
        assign_layers({"OpenCL1": "0"}, TWO, 4)
