"""The programs of the gallery print what their pages show."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.pages import gallery
from tests.support.processes import python

PROGRAMS = sorted((Path(__file__).parents[2] / "docs/gallery").glob("*.py"))
NEEDS = {"torch_in_out": "torch"}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_prints_what_its_page_shows(path: Path, tmp_path: Path) -> None:
    package = NEEDS.get(path.stem, "ggmlb")
    done = python("-W", "error", str(path), cwd=tmp_path)
    if find_spec(package) is None:
        assert (done.returncode, done.stdout) == (1, "")
        assert f"pip install {package}" in done.stderr
        pytest.skip(f"{package} is not installed, and the program says so")
    assert done.returncode == 0, done.stderr
    assert done.stdout == path.with_suffix(".txt").read_text()
    assert not list(tmp_path.iterdir())


def test_each_program_has_a_page_that_shows_it_whole() -> None:
    pages = {page.path: str(page.content) for page in gallery.pages()}
    assert len(PROGRAMS) == 10
    for path in PROGRAMS:
        code = path.read_text().split('"""\n', 1)[1].strip()
        assert f"```python\n{code}\n```" in pages[f"gallery/{path.stem}.md"]
        assert f"({path.stem}.md)" in pages["gallery/index.md"]
