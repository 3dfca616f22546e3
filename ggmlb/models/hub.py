"""Model files by name, `org/repo:Q4_K_M`, from Hugging Face's hub or its cache on this machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Final

from ggmlb.core.errors import MissingModelError, ModelError, one_line

_NAME: Final = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?::([\w.-]+))?")
_PART: Final = re.compile(r"-\d{5}-of-(\d{5})(?=\.gguf$)")

DEFAULT_TAGS: Final = ("Q4_K_M", "Q8_0")
"""Types that are taken, in this order, if the name has none."""

MAX_TOLD: Final = 12
"""Most files that a message names."""


def model_path(name: str | PathLike[str]) -> Path:
    """Return the file of a model: a path as it is, or a name's file, downloaded into the hub's cache if new.

    A name is `org/repo`, with a tag such as `:Q4_K_M` that the file's name contains. What exists on this
    machine, and what ends with `.gguf`, is a path. `HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT` and `HF_HUB_OFFLINE`
    apply.

    Raises:
        ModelError: `huggingface_hub` is not installed, the hub does not give a file that is not cached, or no
            file or several fit the name.
    """
    path, found = Path(name), _NAME.fullmatch(fspath(name).replace("\\", "/"))
    if found is None or path.suffix == ".gguf" or path.exists():
        return path
    repo, tag = found[1], found[2] or ""
    try:
        from huggingface_hub import HfApi, hf_hub_download, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise MissingModelError(
            f"there is no file {name}; to open models of Hugging Face by name: pip install 'ggmlb[hub]'"
        ) from None
    try:
        names, is_offline = HfApi().list_repo_files(repo), False
    except Exception as error:  # no network, told to be offline, or refused: what is cached is as good
        is_offline = True
        try:
            folder = Path(snapshot_download(repo, local_files_only=True))
        except LocalEntryNotFoundError:
            why = "refuses" if isinstance(error, HfHubHTTPError) else "cannot be reached"
            raise MissingModelError(
                f"{name}: there is no such file here, the hub {why}, and its cache has {_cached()}; give one "
                f"of these, or a path ({one_line(error)})"
            ) from error
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*.gguf")]
    parts = chosen(repo, names, tag)
    try:
        files = [hf_hub_download(repo, file, local_files_only=is_offline) for file in parts]
    except Exception as error:
        raise ModelError(f"{name} cannot be downloaded: {one_line(error)}; try again") from error
    return Path(files[0])


def chosen(repo: str, names: Sequence[str], tag: str) -> list[str]:
    """Return the file of a repository that has a tag in its name, with its further parts.

    Raises:
        ModelError: There is none, or there are several.
    """
    known = sorted(n for n in names if n.endswith(".gguf") and "mmproj" not in n.lower())
    for wanted in [tag] if tag else [*DEFAULT_TAGS, ""]:
        pattern = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-._/])", re.IGNORECASE)
        fits = [n for n in known if not wanted or pattern.search(n)]
        groups = sorted({_PART.sub("", n) for n in fits})
        if len(groups) == 1:
            return [n for n in fits if _PART.sub("", n) == groups[0]]
        if groups:
            known = fits
            break
    told = ", ".join(known[:MAX_TOLD]) + (
        f" and {len(known) - MAX_TOLD} others" if len(known) > MAX_TOLD else ""
    )
    raise MissingModelError(
        f"{repo}{':' * bool(tag)}{tag}: give a quantisation that exactly one file has; "
        f"its files: {told or 'none'}"
    )


def _cached() -> str:
    """Return the names of cached models, for a message."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return ", ".join(sorted(repo.repo_id for repo in scan_cache_dir().repos)[:MAX_TOLD]) or "no model"
    except CacheNotFound:
        return "no model"
