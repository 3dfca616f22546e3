"""Hook of MkDocs: adds the pages that are made from the program, the notebooks and the gallery.

In the navigation of mkdocs.yml, a folder stands for the pages that are made in it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

from ggmlb import __version__
from scripts.pages import commands, gallery, notebooks, ops, project
from scripts.pages.page import Page

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

MADE: list[Page] = []


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the pages, and put them into the navigation."""
    MADE[:] = [page for kind in (commands, gallery, notebooks, ops, project) for page in kind.pages()]
    config.nav = [filled(item) for item in config.nav or []]
    config.copyright = f"Documentation of ggmlb {__version__}; of another version: its checkout, make docs"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that were made."""
    for page in MADE:
        files.append(File.generated(config, page.path, content=page.content))
    return files


def filled(item: Any) -> Any:
    """An item of the navigation, with the made pages of a folder in the folder's place."""
    if not isinstance(item, dict):
        return item
    ((title, value),) = item.items()
    if isinstance(value, list):
        return {title: [filled(x) for x in value]}
    if not value.endswith("/"):
        return item
    return {title: [{p.title: p.path} for p in MADE if p.title and p.path.startswith(value)]}


def on_post_build(config: MkDocsConfig) -> None:
    """Let the search find a name of the reference before longer ones that begin with it, as `mul_mat_id`.

    A rarer word counts for more, so they would all come before it. Ops and classes come before other names.
    """
    path = Path(config.site_dir, "search/search_index.json")
    index = json.loads(path.read_text())
    named = [x for x in index["docs"] if re.match("reference/.*#ggmlb", x["location"])]
    titles = [entry["title"].partition(" <")[0].strip() for entry in named]
    for entry, title in zip(named, titles, strict=True):
        n_longer = sum(other.lower().startswith(title.lower()) for other in titles)
        is_first = "/ops/" in entry["location"] or title[:1].isupper()
        entry["boost"] = n_longer * (3 if is_first else 1)
    path.write_text(json.dumps(index))
