"""OnnxBackend: the adapter for ONNX's own tests, and for programs that use `onnx.backend.base`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx.backend.base import Backend, BackendRep, namedtupledict
from onnx.backend.test.runner import BackendIsNotSupposedToImplementIt

from ggmlb.core.errors import UnsupportedOpError
from ggmlb.models.onnx.model import OnnxModel

if TYPE_CHECKING:
    import onnx


class OnnxRep(BackendRep):  # type: ignore[misc]
    """A prepared model; `run` takes the inputs in the model's order."""

    def __init__(self, model: OnnxModel) -> None:
        self.model = model

    def run(self, inputs: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the results in the model's order."""
        given = dict(zip(self.model.inputs, map(np.asarray, inputs), strict=False))
        try:
            found = self.model.run(given)
        except UnsupportedOpError as error:
            raise BackendIsNotSupposedToImplementIt(error.message) from error
        results: tuple[Any, ...] = namedtupledict("Outputs", [*found])(*found.values())
        return results


class OnnxBackend(Backend):  # type: ignore[misc]
    """ONNX's interface for runtimes; `device` is a name of ggmlb's, or `CPU`."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> OnnxRep:
        """Return the model on a device, with the CPU behind it."""
        names: Sequence[str] = list(dict.fromkeys([device, "CPU"]))
        try:
            return OnnxRep(OnnxModel(model, devices=names))
        except UnsupportedOpError as error:
            raise BackendIsNotSupposedToImplementIt(error.message) from error

    @classmethod
    def run_model(
        cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any
    ) -> tuple[Any, ...]:
        """Compute a model once."""
        found: tuple[Any, ...] = cls.prepare(model, device).run(inputs)
        return found

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether tests may ask for a device: the CPU's alone, as ONNX names them."""
        return device == "CPU"
