"""The same model in three libraries: `LIBRARIES[name](threads, devices, weights)` gives `embed`.

Each function imports its library itself: they run in processes of their own.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ggmlb.models import default_model_dir

Embed = Callable[[list[str], int], Any]

N_HEADS, N_EMBD, MAX_TOKENS = 12, 384, 256
"""Of all-MiniLM-L6-v2; longer texts are cut, as sentence-transformers does."""


def ggmlb_embed(threads: int, devices: str, weights: str) -> Embed:
    from ggmlb.models import BertEmbedder

    embedder = BertEmbedder(devices=devices.split(","), weight_type=weights or None)
    for backend in embedder.backends:
        set_n_threads = backend.device.reg.get_proc_address("set_n_threads")
        if set_n_threads is not None:
            set_n_threads(backend, threads)
    return embedder.embed


def torch_embed(threads: int, devices: str, weights: str) -> Embed:
    """PyTorch, in float32 whatever the weights are to be."""
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(threads)
    model = SentenceTransformer(str(default_model_dir()), device="cpu")
    return lambda texts, batch: model.encode(texts, batch_size=batch, show_progress_bar=False)


def onnx_embed(threads: int, devices: str, weights: str) -> Embed:
    """ONNX Runtime with its fused attention; where ggmlb's weights are quantised, in int8 (its way)."""
    import onnxruntime
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(default_model_dir() / "tokenizer.json"))
    tokenizer.enable_truncation(MAX_TOKENS)
    tokenizer.enable_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as folder:
        path = _export(Path(folder), quantise=bool(weights))
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def embed(texts: list[str], batch: int) -> Any:
        order = np.argsort([-len(text) for text in texts], kind="stable")  # alike lengths pad little
        out = np.empty((len(texts), N_EMBD), np.float32)
        for start in range(0, len(texts), batch):
            these = order[start : start + batch]
            found = tokenizer.encode_batch([texts[i] for i in these])
            ids, mask = (np.array([getattr(f, k) for f in found]) for k in ("ids", "attention_mask"))
            hidden = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
            mean = np.einsum("bsd,bs->bd", hidden, mask.astype(np.float32))
            out[these] = mean / np.linalg.norm(mean, axis=1, keepdims=True)
        return out

    return embed


def _export(folder: Path, *, quantise: bool) -> str:
    """Write the model for ONNX Runtime, by the steps that its documentation gives; return the file."""
    import onnx
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = AutoModel.from_pretrained(str(default_model_dir()), attn_implementation="eager")

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    names = ["input_ids", "attention_mask"]
    ids = torch.ones(2, 8, dtype=torch.long)
    plain, fused, small = (str(folder / f"{name}.onnx") for name in ("plain", "fused", "small"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden().eval(),
            (ids, ids),
            plain,
            input_names=names,
            output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
            opset_version=17,
            dynamo=False,  # of the new exporter's graph the optimizer recognises no attention
        )
    model = optimize_model(plain, model_type="bert", num_heads=N_HEADS, hidden_size=N_EMBD)
    model.save_model_to_file(fused)
    if not quantise:
        return fused
    # The shapes behind the fused attention, an op of its own, cannot be inferred.
    types = {"DefaultTensorType": onnx.TensorProto.FLOAT}
    quantize_dynamic(fused, small, per_channel=True, weight_type=QuantType.QInt8, extra_options=types)
    return small


LIBRARIES = {"ggmlb": ggmlb_embed, "PyTorch": torch_embed, "ONNX Runtime": onnx_embed}
