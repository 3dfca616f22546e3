"""Copy the default model with halves for its weights, to take it along where nothing can be downloaded.

    python scripts/pack_model.py .carry

With `.carry` on PYTHONPATH, it is found as if it was installed; it takes half the room.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from ggmlb.models import default_model_dir


def main(target: str) -> int:
    """Write the folder of a package."""
    source = default_model_dir()
    folder = Path(target) / source.parent.name / source.name
    shutil.copytree(
        source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.bin")
    )
    weights = load_file(source / "model.safetensors")
    halves = {name: w.astype(np.float16) if w.dtype == np.float32 else w for name, w in weights.items()}
    save_file(halves, folder / "model.safetensors", {"format": "pt"})
    print(f"{folder}: {sum(f.stat().st_size for f in folder.rglob('*')) / 2**20:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ".carry"))
