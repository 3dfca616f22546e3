"""Processor time of text with and without drafts, of models that agree to different degrees.

The draft is SmolLM2 as it is (Q4_1). Targets: SmolLM2 in f16 and f32; and SmolLM2 with layers added that
change nothing, three and six times as many as it has, which agrees with the draft always but costs as much
as a larger model. With `lookup`, prompts ask for a copy of a text. Both run with one thread in one process,
by turns; the time is the processor's, without that of the prompt.

    python benchmarks/draft.py [--rounds 3] [--save]
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from report import Table, save

from ggmlb.models import PromptLookup, TextModel, default_text_model
from ggmlb.models.gguf import GgufFile, save_gguf

N_TOKENS = 128
COPY = "Repeat this text word by word: The quick brown fox jumps over the lazy dog while the old farmer " * 2
STORY = "Write a short story about a fox and a crow."


def deeper(path: Path, times: int) -> Path:
    """Write SmolLM2 with `times` as many layers, of which the added ones change nothing."""
    file = GgufFile(default_text_model())
    n_layer = int(file.metadata["llama.block_count"])
    tensors: dict[str, Any] = {}
    for i in range(times):
        for name in file:
            layer = int(name.split(".")[1]) if name.startswith("blk.") else None
            if layer is None and i:
                continue
            blocks = file.blocks(name).reshape(-1)
            if i and name.endswith(("attn_output.weight", "ffn_down.weight")):
                blocks = np.zeros_like(blocks)
            to = name if layer is None else name.replace(f"blk.{layer}.", f"blk.{layer + i * n_layer}.", 1)
            tensors[to] = blocks, file[name].dtype, file[name].shape[::-1]
    save_gguf(path, file.metadata | {"llama.block_count": np.uint32(times * n_layer)}, tensors)
    return path


def converted(path: Path, dtype: str) -> Path:
    """Write SmolLM2 with matrices of another type."""
    from ggmlb.cli import main

    main(["--quiet", "quantize", str(default_text_model()), str(path), "--type", dtype, "--requantize"])
    return path


def seconds(model: TextModel, prompt: str, temperature: float) -> tuple[Any, float]:
    """Return a generation, and the processor time of its tokens after the prompt."""
    ends: list[float] = []
    result = model.generate(
        [{"role": "user", "content": prompt}], on_token=lambda _: ends.append(process_time()),
        max_tokens=N_TOKENS, temperature=temperature, seed=1, ignore_eos=True,
    )  # fmt: skip
    return result, (ends[-1] - ends[0]) / (N_TOKENS - 1)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    table = Table("target", "draft", "temperature", "same", "right", "ms/token without", "ms/token", "ratio")
    folder = tempfile.TemporaryDirectory()
    smol = Path(default_text_model())
    targets: dict[str, Callable[[Path], Path]] = {
        "f16": lambda path: converted(path, "f16"), "f32": lambda path: converted(path, "f32"),
        "3 times as deep": lambda path: deeper(path, 3), "6 times as deep": lambda path: deeper(path, 6),
        "Q4_1": lambda path: smol,
    }  # fmt: skip
    for number, (name, write) in enumerate(targets.items()):
        path = write(Path(folder.name) / f"{number}.gguf")
        draft: Any = PromptLookup() if path == smol else smol
        options: dict[str, Any] = {"n_ctx": 512, "threads": 1}
        with TextModel(path, **options) as plain, TextModel(path, draft=draft, **options) as drafting:
            for temperature in (0.0, 0.8):
                prompt = COPY if path == smol else STORY
                found = [
                    (seconds(plain, prompt, temperature), seconds(drafting, prompt, temperature))
                    for _ in range(args.rounds + 1)
                ][1:]
                (ours, _), (theirs, _) = found[0]
                without, with_draft = (median(pair[i][1] for pair in found) for i in (0, 1))
                table.row(
                    name, "lookup" if path == smol else "Q4_1", temperature, ours.tokens == theirs.tokens,
                    f"{theirs.n_accepted} of {theirs.n_drafted}", round(1e3 * without, 2),
                    round(1e3 * with_draft, 2), round(without / with_draft, 2),
                )  # fmt: skip
    if args.save:
        about = " ".join(str(__doc__).split("\n\n")[1].split())
        save("draft", f"Drafts\n\n{about}", table, packages=("numpy", "llvmlite"))


if __name__ == "__main__":
    main()
