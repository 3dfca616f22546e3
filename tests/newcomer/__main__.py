"""A newcomer's hour: a clean environment, the README line by line, then all that the pages show.

    python -m tests.newcomer [--only readme,pages,gallery,notebooks,bad]

Everything typed and shown is in build/newcomer/transcript.txt. The status is 1 if something is not as told.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import nbformat

from tests.newcomer import bad_input
from tests.newcomer.session import Session

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/index.md", "docs/getting-started.md", "docs/debugging.md", "docs/conformance.md")


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a language on a page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def shell_lines(page: str) -> list[str]:
    """The lines for a shell on a page, without comments."""
    return [line.split(" #")[0].strip() for block in blocks(page, "sh") for line in block.splitlines()]


def install(session: Session) -> None:
    """The lines that install, of the README and of Getting started."""
    told = [line for page in PAGES[:3] for line in shell_lines(page) if line.startswith("pip ")]
    told += re.findall(r"`(pip install --no-deps \S+)`", (ROOT / PAGES[2]).read_text())
    for line in dict.fromkeys(told):
        done = session.run(line, at=session.checkout)
        session.judge(line, [done.stderr] if done.returncode else [])
    model = "from ggmlb.models import default_text_model; print(default_text_model())"
    path = session.run("python", "-c", model).stdout.strip()
    (session.home / "model.gguf").symlink_to(path)
    session.run("ggmlb quantize model.gguf in.gguf --type f16 --requantize")


def readme(session: Session) -> None:
    """The commands of the README, and its programs typed in line by line."""
    for line in shell_lines("README.md"):
        if line.startswith("ggmlb "):
            done = session.run(line)
            session.judge(line, [f"status {done.returncode}", done.stderr] if done.returncode else [])
        elif line.startswith("make "):
            print(f"{'not typed':10}{line}: it sets up .venv of the checkout")
    shown = blocks("README.md", "text")
    for i, program in enumerate(blocks("README.md", "python")):
        done = session.run("python", "-q", "-i", stdin=program + "\n")
        wrong = [done.stderr] if "Error" in done.stderr else []
        if i < len(shown) and done.stdout != shown[i]:
            wrong.append(f"shown:\n{shown[i]}printed:\n{done.stdout}")
        wrong += unsaid(program, done.stdout)
        session.judge(f"README's program {i + 1}, line by line", wrong)


def unsaid(program: str, printed: str) -> list[str]:
    """What a program's comments say that it prints, and it did not."""
    said = re.findall(r"print\(.*\)\s+# (.*)", program)
    return [f"not printed: {text}" for text in said if text not in printed]


def pages(session: Session) -> None:
    """The programs of the pages."""
    for page in PAGES[1:]:
        for i, program in enumerate(blocks(page, "python")):
            done = session.run("python", "-W", "error", "-c", program)
            wrong = unsaid(program, done.stdout)
            session.judge(f"{page}, program {i + 1}", [done.stderr] if done.returncode else wrong)


def gallery(session: Session) -> None:
    """The programs of the gallery; PyTorch is not installed."""
    for path in sorted((session.checkout / "docs/gallery").glob("*.py")):
        done = session.run("python", str(path))
        shown = path.with_suffix(".txt").read_text()
        wrong = [] if done.stdout == shown else [f"shown:\n{shown}printed:\n{done.stdout}{done.stderr}"]
        if path.stem == "torch_in_out":
            wrong = [] if "pip install torch" in done.stderr else ["it does not say what is missing"]
        session.judge(f"docs/gallery/{path.name}", wrong)


def notebooks(session: Session) -> None:
    """The notebooks; their outputs are compared but for numbers, and what machines differ in."""
    done = session.run("pip install '.[notebook]'", at=session.checkout)
    session.judge("pip install '.[notebook]'", [done.stderr] if done.returncode else [])
    done = session.run("python scripts/run_notebooks.py notebooks --save", at=session.checkout)
    session.judge("the notebooks run", [done.stderr[-2000:]] if done.returncode else [])
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        stored, now = (nbformat.read(p, 4).cells for p in (path, session.checkout / "notebooks" / path.name))
        wrong = []
        for i, (before, after) in enumerate(zip(stored, now, strict=True)):
            a, b = (seen(cell) for cell in (before, after))
            if a != b:
                wrong.append(f"cell {i}: shown {a}\n        now   {b}")
        session.judge(f"notebooks/{path.name}", wrong)


def seen(cell: nbformat.NotebookNode) -> list[str]:
    """A cell's outputs: text without numbers, spaces and names of processors; the kinds of the others."""
    printed, found = "", []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            printed += output.text
        else:
            found.append(f"{sorted(output.data)} {output.data.get('text/plain', '')}")
    anywhere = [re.sub(r"(<Device \w+ \w+): [^>]*>", r"\1>", text) for text in (printed, *found)]
    return [re.sub(r"[-+.e\d]*\d[.\d]*|\s+", "", text) for text in anywhere]


def bad(session: Session) -> None:
    """Each command with bad input."""
    bad_input.try_all(session)


PARTS: dict[str, Callable[[Session], None]] = {
    part.__name__: part for part in (readme, pages, gallery, notebooks, bad)
}


def main() -> int:
    """Read the arguments, and play the hour."""
    parser = argparse.ArgumentParser(description=ast.get_docstring(ast.parse(Path(__file__).read_text())))
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by names with commas")
    chosen = [PARTS[name] for name in parser.parse_args().only.split(",")]
    where = ROOT / "build/newcomer"
    where.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, (where / "transcript.txt").open("w") as transcript:
        session = Session(Path(folder), ROOT, transcript)
        for part in (install, *chosen):
            print(f"\n{str(part.__doc__).splitlines()[0]}")
            part(session)
    minutes = (time.perf_counter() - start) / 60
    print(f"\n{minutes:.0f} minutes; otherwise than told: {len(session.failed)}", *session.failed, sep="\n  ")
    return int(bool(session.failed))


if __name__ == "__main__":
    sys.exit(main())
