"""Each command with bad input, an option at a time: what must come back is one message that helps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer

from ggmlb.cli.app import application
from scripts.pages import commands
from tests.newcomer.session import Session

GOOD = {
    "devices": [],
    "ops": ["-d", "CPU"],
    "test": ["-d", "OpenCL0", "-o", "mul_mat", "--limit", "1"],
    "bench": ["-d", "CPU"],
    "compare": ["model.gguf", "in.gguf", "-n", "8"],
    "diff": ["model.gguf", "-d", "CPU,OpenCL0", "-n", "2"],
    "generate": ["-m", "model.gguf", "-p", "Hi", "-n", "1"],
    "fit": ["model.gguf"],
    "chat": ["-m", "model.gguf"],
    "perplexity": ["-m", "model.gguf", "-f", "text.txt", "-c", "16", "--chunks", "1"],
    "show": ["model.gguf"],
    "quantize": ["in.gguf", "out.gguf", "-t", "q4_0"],
    "embed": ["--input", "texts.json", "--output", "vectors.npy"],
    "demo": [],
}
"""Arguments with which each command works."""

BAD = {
    "HOST:PORT": ["nowhere:1"],
    "NAME,NAME,...": ["Nope0"],
    "A,B": ["CPU,Nope0", "CPU"],
    "NAME": ["Nope0"],
    "OP,OP,...": ["mul_mta"],
    "REGEX": ["("],
    "REGEX=DEVICE": ["blk", "blk=Nope0", "(=CPU"],
    "REGEX=TYPE": ["blk", "blk=q9_9", "(=q4_0"],
    "NAME=RANGE": ["OpenCL0", "Nope0=1", "OpenCL0=x", "OpenCL0=3-1"],
    "NAME=SIZE": ["OpenCL0", "OpenCL0=much", "Nope0=1GiB"],
    "SIZE": ["much"],
    "FILE": ["missing.x", "folder", "empty.x", "text.txt", "cut.gguf"],
    "FILE[=SCALE]": ["missing.x", "text.txt", "model.gguf=loud"],
    "DIR": ["missing.x", "empty.x"],
    "1,2,3": ["1,two", "1,99999999"],
    "TYPE": ["q9_9"],
    "int": ["x", "-7"],
    "float": ["x"],
    "--xfail": ["missing.x", "folder", "text.txt", "cut.gguf"],
    "--file": ["missing.x", "folder", "empty.x"],
    "--kv-type": ["q9_9"],
    "--split-mode": ["nope"],
    "what": ["nope"],
}
"""Bad values by the form of an option, or by its name where any text has the form."""
FILES = {"empty.x": "", "text.txt": "Once upon a time there was a fox. " * 9, "texts.json": '["a", "b"]'}
OUTPUTS = ("--output", "--html", "--markdown", "OUT")
SAID_BY_NOBODY = ("Traceback (most recent call last)", "this should not happen", "Warning:")


def try_all(session: Session) -> None:
    """Type each command with each bad value."""
    (session.home / "folder").mkdir()
    for name, content in FILES.items():
        (session.home / name).write_text(content)
    (session.home / "cut.gguf").write_bytes((session.home / "model.gguf").read_bytes()[:5000])
    pages = {page.title: str(page.content) for page in commands.pages()}
    for name, command in typer.main.get_command(application([])).commands.items():
        codes = re.findall(r"^\| `([\d, ]+)` \|", pages[name], re.MULTILINE)
        told = {int(code) for row in codes for code in row.split(",")}
        for option, value, words in lines(name, command):
            before = {path.name for path in session.home.iterdir()}
            done = session.run("ggmlb", name, *words, timeout=300)
            left = {path.name for path in session.home.iterdir()} - before
            wrong = [f"it says: {said}" for said in SAID_BY_NOBODY if said in done.stderr + done.stdout]
            if done.returncode not in (told or {1, 2}) - {0}:
                wrong.append(f"status {done.returncode}, of which the page does not tell")
            if not any(word in done.stderr for word in (option, "pip install", *re.split("[=,]", value))):
                wrong.append(f"neither {option} nor {value} is named: {done.stderr.strip()[-300:]}")
            if done.returncode == 1 and done.stderr.strip().count("\n") > 4:
                wrong.append(f"{done.stderr.count(chr(10))} lines of errors")
            wrong += [f"it left {path}" for path in left]
            session.judge(f"ggmlb {name} {' '.join(words)}", wrong)
            for path in left:
                (session.home / path).unlink()


def lines(name: str, command: Any) -> Iterator[tuple[str, str, list[str]]]:
    """An option, its bad value, and the arguments with it in the place of the good one."""
    yield "--nope", "--nope", [*GOOD[name], "--nope"]
    required = [p for p in command.params if p.param_type_name == "argument"]
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        form = parameter.metavar or parameter.type_descriptor.annotation.__name__
        option = parameter.opts[0] if is_option else parameter.name
        if form.endswith(".gguf") or form in ("IN", "MODEL|PROGRAM", "Path"):
            form = "FILE"
        values = BAD.get(option) or BAD.get(form, [])
        if option in OUTPUTS or form == "OUT":
            values = ["no/such/folder/file"]
        for value in values:
            words = list(GOOD[name])
            if not is_option:
                at = required.index(parameter)
                words[at : at + 1] = [value]
            else:
                found = [i for i, word in enumerate(words) if word in parameter.opts]
                for i in reversed(found):
                    del words[i : i + 2]
                words += [option, value]
            yield option, value, words
