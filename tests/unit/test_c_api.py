"""docs/c-api.md: every function of ggml has a row, or a reason for none, and every Python name resolves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ggmlb
from ggmlb.backends.ggml.abi import FOLLOWED
from tests.support.processes import python

ROOT = Path(__file__).parents[2]
NAMES = (Path(__file__).parent / "c_api_names.txt").read_text().split()
TABLE = dict(re.findall(r"^\| `(\w+)` \| (`[\w.]+`) \|", (ROOT / "docs/c-api.md").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def examples() -> Iterator[dict[str, object]]:
    """An object of each class whose attributes are set when it is made."""
    ctx = ggmlb.Context()
    tensor = ctx.new_tensor(ggmlb.DType.F32, (4,))
    with ggmlb.init_by_name("CPU") as backend, ggmlb.alloc_ctx_tensors(ctx, backend) as buffer:
        meta = ggmlb.meta_device([backend.device], lambda t: ggmlb.SplitState(ggmlb.SplitAxis.MIRRORED))
        with meta.init_backend() as together:
            found = (tensor, backend, buffer, buffer.buft, together)
            kinds = ("Tensor", "Backend", "Buffer", "BufferType", "MetaBackend")
            yield dict(zip(kinds, found, strict=True))


def test_every_function_has_a_row() -> None:
    assert len(NAMES) == len(set(NAMES)) == 142
    assert list(TABLE) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_python_name_resolves(name: str, examples: dict[str, object]) -> None:
    package, first, *rest = TABLE[name].strip("`").split(".")
    assert package == "ggmlb"
    assert first in ggmlb.__all__
    found = getattr(ggmlb, first)
    for member in rest:
        assert not member.startswith("_")
        found = getattr(found, member) if hasattr(found, member) else getattr(examples[first], member)


# -- optional functions ----------------------------------------------------------------------------


def test_the_columns_of_optional_functions_are_current() -> None:
    from scripts.proc_table import PAGE, with_columns

    page = PAGE.read_text()
    assert page == with_columns(page), "run `python scripts/proc_table.py`"


def test_opencl_tells_its_features() -> None:
    reg = next((reg for reg in ggmlb.regs() if reg.name == "OpenCL"), None)
    if reg is None:
        pytest.skip("needs an OpenCL device, such as PoCL's")
    features = dict(reg.get_proc_address("get_features")(reg))
    assert features["PYOPENCL"]
    assert {features[f"{d.name}_FP16"] for d in reg.devices} <= {"0", "1"}


# -- the next version ------------------------------------------------------------------------------

DIFF = str(ROOT / "scripts/diff_ggml_api.py")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads libraries of Linux")
def test_the_installed_ggml_has_no_function_that_is_not_known() -> None:
    pytest.importorskip("xllamacpp", reason="needs a ggml library: pip install 'ggmlb[ggml]'")
    done = python(DIFF)
    assert done.returncode == 0, done.stdout


def test_new_and_vanished_functions_are_told(tmp_path: Path) -> None:
    """A source tree with all known functions, then one more, and one less."""
    for folder in ("include", "src"):
        (tmp_path / folder).mkdir()
    for name in ("include/ggml-backend.h", "include/ggml-alloc.h", "src/ggml-backend-impl.h"):
        (tmp_path / name).write_text("// GGML_API void ggml_old(void);\n")
    ops = (Path(__file__).parent / "ggml_functions.txt").read_text().splitlines()[1:]
    names = sorted({*NAMES, *(f"ggml_{name}" for name in ops), "ggml_nbytes"})
    header = tmp_path / "include/ggml.h"
    header.write_text("".join(f"GGML_API struct x * {name}(\n    int a);\n" for name in names))
    same = python(DIFF, str(tmp_path))
    assert (same.returncode, same.stdout.count("\n")) == (0, 1), same.stdout
    header.write_text(header.read_text().replace("ggml_add(", "ggml_add_up("))
    done = python(DIFF, str(tmp_path))
    assert done.returncode == 1
    assert "new: ggml_add_up\n" in done.stdout and "gone: ggml_add\n" in done.stdout


def test_the_version_that_is_followed_is_named() -> None:
    for page in ("README.md", "docs/c-api.md"):
        assert f"ggml {FOLLOWED}" in (ROOT / page).read_text().split("\n## ")[0]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads libraries of Linux")
def test_no_installed_library_is_newer_than_the_version_that_is_followed() -> None:
    reg = next((reg for reg in ggmlb.regs() if reg.name == "ggml"), None)
    if reg is None:
        pytest.skip("needs a ggml library: pip install 'ggmlb[ggml]'")
    found = {tuple(map(int, device.library.version.split(".")[:2])) for device in reg.devices}
    assert max(found) <= tuple(map(int, FOLLOWED.split(".")))
