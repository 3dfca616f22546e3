"""Pages of the notebooks, with the outputs that are stored in them."""

from __future__ import annotations

from collections.abc import Iterator

from nbconvert import MarkdownExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

from scripts.pages.page import ROOT, Page

TEMPLATE = """
{%- extends "markdown/index.md.j2" -%}
{%- block stream -%}
``` { .text .output }
{{ output.text | strip_ansi | trim }}
```
{% endblock stream -%}
{%- block data_text -%}
``` { .text .output }
{{ output.data["text/plain"] }}
```
{% endblock data_text -%}
{%- block data_html -%}
<div class="output">{{ output.data["text/html"] }}</div>
{% endblock data_html -%}
"""


def pages() -> Iterator[Page]:
    """A page for each notebook, its pictures, and the notebook itself."""
    exporter = MarkdownExporter(raw_template=TEMPLATE)
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    paths = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in sorted(paths, key=lambda path: path.stem != "quickstart"):  # the others by name
        text, resources = exporter.from_filename(str(path), {"unique_key": path.stem})
        title = text.strip().partition("\n")[0].lstrip("# ")
        download = f"\n\n[Download this notebook]({path.name})\n"
        yield Page(f"notebooks/{path.stem}.md", title, text + download)
        yield Page(f"notebooks/{path.name}", "", path.read_bytes())
        for name, content in resources["outputs"].items():
            yield Page(f"notebooks/{name}", "", content)
