"""from_torch: a PyTorch module, exported to ONNX in memory, as an OnnxModel."""

from __future__ import annotations

import importlib
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggmlb import DType
from ggmlb.core.arguments import checked
from ggmlb.core.errors import ArgumentError, UnsupportedOpError

if TYPE_CHECKING:
    from ggmlb.models.onnx import OnnxModel


@checked
def from_torch(
    module: Any,
    example: Any,
    devices: Sequence[str] | Mapping[str, float] | None = None,
    weights: DType | str | None = None,
    dynamic_axes: Mapping[str, Sequence[int]] | None = None,
) -> OnnxModel:
    """Return a PyTorch module as a model on devices; its inputs are `x0`, `x1`, ..., its results `y0`, ...

    The results of a module that returns a mapping, as those of `transformers`, are the tensors in it.

    The module is exported once, for inference, in operator set 17, by `torch.onnx.export` without its
    compiler. `OnnxModel` describes `devices` and `weights`.

    Args:
        module: A `torch.nn.Module`.
        example: Its operands: a tensor, or a tuple of them. Their sizes are fixed but for `dynamic_axes`.
        devices: Devices of the model.
        weights: Type in which matrices are stored.
        dynamic_axes: Axes whose extents each call chooses, by input, as `{"x0": [0]}`.

    Raises:
        ArgumentError: PyTorch cannot export the module.
        UnsupportedOpError: It has an op that is not supported; the message has its place in the module.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise ArgumentError("from_torch needs PyTorch: pip install torch") from None
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(f"from_torch: module is a {type(module).__name__}; give a torch.nn.Module")
    operands = example if isinstance(example, tuple) else (example,)
    names = [f"x{i}" for i in range(len(operands))]
    axes = {name: {i: f"{name}_{i}" for i in which} for name, which in (dynamic_axes or {}).items()}
    content = io.BytesIO()
    was_training, fused = module.training, torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # ONNX has no op for PyTorch's fused layers
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = module.eval()(*operands)
            is_mapping = isinstance(found, Mapping)
            if is_mapping:
                found = [value for value in found.values() if isinstance(value, torch.Tensor)]
            count = len(found) if isinstance(found, (tuple, list)) else 1
            torch.onnx.export(
                _of_tensors(torch, module) if is_mapping else module, operands, content, input_names=names,
                output_names=[f"y{i}" for i in range(count)],
                dynamic_axes=axes, opset_version=17, dynamo=False,
            )  # fmt: skip
    except torch.onnx.errors.UnsupportedOperatorError as error:
        raise UnsupportedOpError(f"from_torch: {error}", reasons={"torch": str(error)}) from error
    except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"from_torch: PyTorch cannot export {type(module).__name__}: {error}") from error
    finally:
        module.train(was_training)
        torch.backends.mha.set_fastpath_enabled(fused)
    from ggmlb.models.onnx import OnnxModel

    onnx = importlib.import_module("onnx")
    return OnnxModel(onnx.load_model_from_string(content.getvalue()), devices, weights)


def _of_tensors(torch: Any, module: Any) -> Any:
    """Return a module that gives the tensors among another's named results, as PyTorch's exporter wants."""

    class OfTensors(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *operands: Any) -> Any:
            return tuple(v for v in self.module(*operands).values() if isinstance(v, torch.Tensor))

    return OfTensors().eval()
