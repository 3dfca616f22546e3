"""What the real driver calls is in CuPy, and takes what it is given. Needs CuPy, not a card."""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install cupy-cuda13x")

from ggmlb.backends.cuda import CudaReg, cupy_driver  # noqa: E402
from ggmlb.errors import BackendUnavailable  # noqa: E402

NAMES = {"rt": cupy_driver.rt, "cu": cupy_driver.cu, "cupy": cupy}


def found(node: ast.AST) -> Any:
    """Return what an expression such as `cupy.cuda.Stream` names; None where it begins otherwise."""
    if isinstance(node, ast.Name):
        return NAMES.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = found(node.value)
        return None if owner is None else getattr(owner, node.attr)
    return None


def test_calls_fit_their_signatures() -> None:
    n_checked = 0
    for node in ast.walk(ast.parse(inspect.getsource(cupy_driver))):
        found(node)  # raises where there is no such name
        if not isinstance(node, ast.Call):
            continue
        signature = re.match(
            r"\w+\((.*?)\)( ->.*)?$", (getattr(found(node.func), "__doc__", "") or "").split("\n")[0]
        )
        if signature is None:
            continue
        parameters = [p for p in signature[1].split(", ") if p]
        required = sum("=" not in p for p in parameters)
        n_given = len(node.args) + len(node.keywords)
        assert required <= n_given <= len(parameters), ast.unparse(node)
        n_checked += 1
    assert n_checked > 30


def test_without_a_card_it_is_unavailable_with_the_reason() -> None:
    if cupy.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(BackendUnavailable, match="driver"):
        _ = CudaReg().devices
