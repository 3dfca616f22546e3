"""Version 6 of ggml's backend interface, which no package has yet: ggml is built with its structs.

They are those of 3 with a function more in `ggml_backend_buffer_type_i`, and a pointer more in
`ggml_backend_buffer` (llama.cpp's ggml-backend-impl.h of 2026-11).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ggmlb.backends.ggml.find import at
from ggmlb.backends.ggml.library import probe
from scripts import build_ggml_tests
from tests.support.ggml_bridge import suite
from tests.support.outcomes import OK

if not (suite.FOLDER / "libtest-backend-ops.so").exists():
    pytest.skip("ggml's test is not built: python scripts/build_ggml_tests.py", allow_module_level=True)

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(1800)]

CHANGES = (
    (r"(GGML_BACKEND_API_VERSION) 3", r"\1 6"),
    (r"(bool +\(\*is_host\)[^;]*;)", r"\1 const void * (*get_alloc_interface)(ggml_backend_buffer_type_t);"),
    (r"(enum ggml_backend_buffer_usage usage;)", r"\1 const void * binding;"),
)
"""Of the header: a pattern, and what it becomes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of libraries with the changed structs, and of ggml's test, which uses public functions."""
    built = suite.FOLDER.parent / "lib-api-6"
    if not built.exists():
        made = tmp_path_factory.mktemp("api-6")
        shutil.copytree(build_ggml_tests.SOURCE / "ggml", made / "ggml")
        header = made / "ggml/src/ggml-backend-impl.h"
        text = header.read_text()
        for pattern, replacement in CHANGES:
            text, n = re.subn(pattern, replacement, text)
            assert n == 1, pattern
        header.write_text(text)
        for arguments in (
            ("-S", made / "ggml", "-B", made / "cmake", *build_ggml_tests.OPTIONS),
            ("--build", made / "cmake", "--parallel", build_ggml_tests.JOBS),
        ):
            subprocess.run(("cmake", *arguments), check=True, stdout=subprocess.DEVNULL)
        part = made / "lib"
        part.mkdir()
        for library in (made / "cmake/src").glob("libggml*.so*"):
            shutil.copy(library, part, follow_symlinks=False)
        shutil.copy(suite.FOLDER / "libtest-backend-ops.so", part)
        shutil.move(part, built)
    return built


def test_its_structs_are_found_and_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = at(folder)
    assert found is not None
    tables = probe(found, "--tables")["tables"]
    assert tables["api_version"] == 6
    assert tables["buffer_type"]["device"] == 9
    monkeypatch.setattr(suite, "FOLDER", folder)
    cases = [c for c in suite.Worker("CPU").names() if re.match(r"(ADD|MUL_MAT|SET_ROWS|SOFT_MAX)\(", c)][
        ::40
    ]
    for device in ("CPU", "LLVM"):
        outcomes = suite.run(device, cases, n_workers=1)
        unexplained, _ = suite.judge(outcomes, suite.load_faults())
        assert not unexplained
        assert sum(outcome.status == OK for outcome in outcomes) > 10
