"""Names of ggml's ops in NumPy, PyTorch and ONNX, to suggest an op for `matmul` or `layer_norm`."""

from __future__ import annotations

import re
from typing import Final

OPS: Final = {
    "absolute": "abs", "as_strided": "view_4d", "astype": "cast", "attention": "flash_attn_ext",
    "avg_pool": "pool_2d", "avg_pool1d": "pool_1d", "avg_pool2d": "pool_2d", "average_pool": "pool_2d",
    "bmm": "mul_mat", "broadcast_to": "repeat", "clip": "clamp", "clone": "dup", "concatenate": "concat",
    "contiguous": "cont", "conv": "conv_2d", "conv1d": "conv_1d", "conv2d": "conv_2d", "conv3d": "conv_3d",
    "conv_transpose1d": "conv_transpose_1d", "conv_transpose2d": "conv_transpose_2d_p0", "copy": "cpy",
    "cross_entropy": "cross_entropy_loss", "divide": "div", "dot": "mul_mat", "einsum": "mul_mat",
    "embedding": "get_rows", "expand": "repeat", "full": "fill", "full_like": "fill", "gather": "get_rows",
    "gelu_new": "gelu", "gelu_tanh": "gelu", "gemm": "mul_mat", "group_normalization": "group_norm",
    "hard_sigmoid": "hardsigmoid", "hard_swish": "hardswish", "index_copy": "set_rows",
    "index_put": "set_rows", "index_select": "get_rows", "inner": "mul_mat", "layer_norm": "norm",
    "layer_normalization": "norm",
    "linear": "mul_mat", "matmul": "mul_mat", "max_pool": "pool_2d", "max_pool1d": "pool_1d",
    "max_pool2d": "pool_2d", "mm": "mul_mat", "moveaxis": "permute", "multi_head_attention": "flash_attn_ext",
    "multiply": "mul", "narrow": "view_1d", "negative": "neg", "normalize": "l2_norm", "outer": "out_prod",
    "quick_gelu": "gelu_quick", "reduce_mean": "mean", "reduce_sum": "sum_rows", "resize": "interpolate",
    "rms_normalization": "rms_norm", "rotary_embedding": "rope_ext",
    "scaled_dot_product_attention": "flash_attn_ext", "scatter": "set_rows", "sdpa": "flash_attn_ext",
    "sign": "sgn", "slice": "view_1d", "softmax": "soft_max", "square": "sqr", "subtract": "sub",
    "swapaxes": "permute", "swish": "silu", "tile": "repeat", "topk": "top_k", "tril": "tri", "triu": "tri",
    "upsample": "upscale",
}  # fmt: skip
"""The equivalent op, or the ops that compose it, by the other library's name."""

_BY_LETTERS: Final = {name.replace("_", ""): op for name, op in OPS.items()}


def op_for(name: str) -> str | None:
    """Return ggml's name of an op of NumPy, PyTorch or ONNX, given in any spelling; `None` if unknown.

    `"layer_norm"`, `"LayerNorm"` and `"layernorm_"` are the same name.
    """
    return _BY_LETTERS.get(re.sub("[^a-z0-9]", "", name.lower()))
