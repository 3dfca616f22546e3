"""Pages of the command line: one for each command, from what `--help` is made from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from inspect import cleandoc
from typing import Any

import typer

from ggmlb.cli.app import application
from scripts.pages.page import Page

SECTION = re.compile(r"^([A-Z][\w ]+):\n((?: +.*(?:\n|$))+)", re.MULTILINE)
"""A part of a command's help with a title, as `Examples:`, and its indented lines."""
STATUS = re.compile(r"^(\d+(?:, \d+)*) +(.*)$")


def pages() -> Iterator[Page]:
    """The page of `ggmlb`, then those of its commands in their order."""
    group: Any = typer.main.get_command(application([]))
    root = group.context_class(group, info_name="ggmlb", **group.context_settings)
    table = ["| command | |", "|---|---|"]
    for name, command in group.commands.items():
        first = cleandoc(command.help).partition("\n")[0]
        table.append(f"| [`ggmlb {name}`]({name}.md) | {escaped(first)} |")
    listed = "\n\n## Commands\n\n" + "\n".join(table) + "\n"
    yield Page("cli/index.md", "ggmlb", described(group, root) + listed)
    for name, command in group.commands.items():
        context = command.context_class(command, info_name=name, parent=root)
        yield Page(f"cli/{name}.md", name, described(command, context))


def described(command: Any, context: Any) -> str:
    """A command's usage, help and options."""
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    told = cleandoc(command.help)
    text = f"# {context.command_path}\n\n```text\n{usage}\n```\n\n{escaped(SECTION.sub('', told)).strip()}\n"
    options = [record for p in command.get_params(context) if (record := p.get_help_record(context))]
    text += "\n## Options\n" + "".join(f"\n`{names}`\n:   {escaped(does)}\n" for names, does in options)
    for title, lines in SECTION.findall(told + spread(command.epilog or "")):
        text += f"\n## {title}\n\n{section(cleandoc(lines))}\n"
    return text


def spread(epilog: str) -> str:
    """The line below a command's help, `Title: one; two.`, as a section of it."""
    title, _, items = epilog.rstrip(".").partition(": ")
    return f"\n\n{title}:\n  " + items.replace("; ", "\n  ") if items else ""


def section(lines: str) -> str:
    """The lines of a section of the help: a table of exit statuses, or as they are."""
    found = [STATUS.match(line) for line in lines.splitlines()]
    if not all(found):
        return f"```sh\n{lines}\n```"
    return "\n".join(["| status | |", "|---|---|"] + [f"| `{m[1]}` | {escaped(m[2])} |" for m in found if m])


def escaped(text: str) -> str:
    """The text without what Markdown would read as its own."""
    return re.sub(r"([\\`*_\[\]<|])", r"\\\1", text)
