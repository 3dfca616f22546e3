"""Compare the functions of a ggml with those that ggmlb has or leaves out; exit with 1 if any is new.

    python scripts/diff_ggml_api.py                      # the newest installed library: its exported symbols
    python scripts/diff_ggml_api.py LIBRARY.so
    python scripts/diff_ggml_api.py SOURCE/ggml          # headers of a source tree

Known are the rows of docs/c-api.md, the functions in `tests/unit/ggml_functions.txt`, and the patterns in
`scripts/ggml_api_known.txt` with the reasons why they have no row.
"""

from __future__ import annotations

import re
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADERS = ("include/ggml.h", "include/ggml-backend.h", "include/ggml-alloc.h", "src/ggml-backend-impl.h")
FUNCTION = re.compile(r"ggml_\w+")


def declared(source: Path) -> set[str]:
    """Return the functions that the headers of a source tree declare as `GGML_API`."""
    found = set()
    for name in HEADERS:
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", (source / name).read_text(), flags=re.DOTALL)
        for line in text.split("GGML_API")[1:]:
            if match := re.search(r"\b(ggml_\w+)\s*\(", line.partition(";")[0]):
                found.add(match[1])
    return found


def exported(library: Path) -> set[str]:
    """Return the functions that a shared library (ELF, 64 bits, little endian) exports.

    Raises:
        ValueError: It is no such library.
    """
    data = library.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"{library} is no ELF library of 64 bits; give the folder of ggml's source")
    start, size, n = (*struct.unpack_from("<Q", data, 40), *struct.unpack_from("<2H", data, 58))
    sections = [struct.unpack_from("<2I4Q2I2Q", data, start + i * size) for i in range(n)]
    found = set()
    for _, kind, _, _, offset, nbytes, link, _, _, entry in sections:
        if kind != 11:  # SHT_DYNSYM
            continue
        names = sections[link][4]
        for place in range(offset, offset + nbytes, entry):
            name, info, _, section = struct.unpack_from("<I2BH", data, place)
            if info & 15 == 2 and section:  # STT_FUNC, defined here
                text = data[names + name : data.index(b"\0", names + name)].decode()
                found |= {text} if FUNCTION.fullmatch(text) else set()
    return found


def installed() -> Path:
    """Return the newest installed ggml library: that with the most functions."""
    sys.path.insert(0, str(ROOT))
    from ggmlb.backends.ggml.find import libraries

    found = [Path(part) for library in libraries() for part in library.parts[:1]]
    if not found:
        sys.exit("no ggml library is installed: pip install '.[ggml]', or give a library or a source tree")
    return max(found, key=lambda path: len(exported(path)))


def table() -> set[str]:
    """Return the C functions of docs/c-api.md and of `Context`."""
    rows = re.findall(r"^\| `(ggml_\w+)` \|", (ROOT / "docs/c-api.md").read_text(), re.MULTILINE)
    ops = (ROOT / "tests/unit/ggml_functions.txt").read_text().splitlines()[1:]
    return {*rows, *(f"ggml_{name}" for name in ops)}


def left_out() -> dict[str, str]:
    """Return the patterns of functions without a row, with the reasons."""
    reasons, reason = {}, ""
    for line in (ROOT / "scripts/ggml_api_known.txt").read_text().splitlines():
        if line.startswith("#"):
            reason = line.strip("# ")
        for pattern in [] if line.startswith("#") else line.split():
            reasons[pattern] = reason
    return reasons


def main(args: list[str]) -> int:
    """Print new and vanished functions; return 1 if there are any."""
    where = Path(args[0]) if args else installed()
    is_source = where.is_dir()
    theirs, ours, patterns = declared(where) if is_source else exported(where), table(), left_out()
    new = {name for name in theirs - ours if not any(re.fullmatch(p, name) for p in patterns)}
    gone = {name for name in ours - theirs if name not in patterns}
    print(f"{where}: {len(theirs)} functions; ggmlb has {len(theirs & ours)} of them")
    for what, names in (("new", new), ("gone", gone)):
        for name in sorted(names):
            print(f"{what}: {name}")
    if new:
        print("add each to ggmlb and to docs/c-api.md, or to scripts/ggml_api_known.txt with the reason")
    return int(bool(new or gone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
