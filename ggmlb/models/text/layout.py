"""ModelLayout: the sizes of a GGUF language model, and the tensors of its file that each layer reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ggmlb.core.errors import ModelError, shown
from ggmlb.models.text.config import TextConfig
from ggmlb.models.weights import Source

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile

IGNORED = frozenset({"attn_rot_embd", "attn_rot_embd.weight"})
"""Tensors of a layer that older files hold and no graph reads."""


class ModelLayout:
    """A model's sizes, and the tensors of the file for each weight, from the file's header alone.

    Args:
        file: The model.

    Attributes:
        file: As given.
        config: The model's sizes.
        embeddings: Weights before the first layer.
        layers: Weights of each layer, by the names that the graph uses.
        output: Weights after the last layer.

    Raises:
        ModelError: The architecture is unknown, metadata is missing or wrong, or the file lacks a tensor, has
            it in another shape, or has one that no graph reads.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.config = c = TextConfig.from_file(file)
        self.embeddings = self._of("", ("token_embd.weight", (c.n_vocab, c.n_embd), "matrix"))
        has_output = "output.weight" in file
        head = "output.weight" if has_output else "token_embd.weight"
        self.output = {
            "output.weight": Source((head,), (c.n_vocab, c.n_embd), True, True),
            **self._of("", ("output_norm.weight", (c.n_embd,), "vector")),
        }
        factors = {name: file[name] for name in file if name.startswith("rope_f")}
        self.factors = {name: Source((name,), (c.rope.n_dims // 2,), is_matrix=False) for name in factors}
        entries = _recurrent(c) if c.state else _attention(file, c)
        self.layers = [self._of(f"blk.{i}.", *entries) for i in range(c.n_layer)]
        self._check_all_used()

    def _of(self, prefix: str, *entries: tuple[str, tuple[int, ...], str]) -> dict[str, Source]:
        """Return the sources that are there; a `?` at the end of the kind marks what a model may lack."""
        found = {}
        for name, shape, kind in entries:
            full = prefix + name
            if full in self.file or not kind.endswith("?"):
                self._check(full, shape)
                what = kind.rstrip("?")
                found[full] = Source((full,), shape, what != "vector", what == "product")
        return found

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.file[name].shape
        if _squeezed(found) != _squeezed(shape):
            raise ModelError(
                f"{self.file.path}: tensor {name!r} has shape {list(found)}; the metadata asks for "
                f"{list(shape)}; convert the file again"
            )

    def _check_all_used(self) -> None:
        """Refuse a file with tensors that the graph would leave out: its results would be wrong."""
        used = {name for part in self._all() for source in part.values() for name in source.names}
        for name in self.file:
            if name not in used and name.rpartition("blk.")[2].partition(".")[2] not in IGNORED:
                raise ModelError(
                    f"{self.file.path}: this architecture does not use the tensor {shown(name)!r}; the "
                    "model is an unsupported variant"
                )

    def names(self) -> Iterator[str]:
        """Yield the names of all weights, as graphs use them."""
        return (name for part in self._all() for name in part)

    def _all(self) -> Iterator[dict[str, Source]]:
        yield self.embeddings
        yield self.output
        yield self.factors
        yield from self.layers


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _attention(file: GgufFile, c: TextConfig) -> list[tuple[str, tuple[int, ...], str]]:
    n, n_q, n_k, n_v = c.n_embd, c.n_key * c.n_head, c.n_key * c.n_head_kv, c.n_value * c.n_head_kv
    n_out = c.n_value * c.n_head
    first = "blk.0."
    entries = [
        ("attn_norm.weight", (n,), "vector"),
        ("attn_output.weight", (n, n_out), "product"),
        ("attn_output.bias", (n,), "vector?"),
        ("attn_q_norm.weight", (c.n_key,), "vector?"),
        ("attn_k_norm.weight", (c.n_key,), "vector?"),
        ("post_attention_norm.weight", (n,), "vector?"),
        ("ffn_norm.weight", (n,), "vector"),
        ("post_ffw_norm.weight", (n,), "vector?"),
    ]
    if first + "attn_qkv.weight" in file:
        entries += [
            ("attn_qkv.weight", (n_q + n_k + n_v, n), "product"),
            ("attn_qkv.bias", (n_q + n_k + n_v,), "vector?"),
        ]
    else:
        for part, size in (("q", n_q), ("k", n_k), ("v", n_v)):
            entries += [
                (f"attn_{part}.weight", (size, n), "product"),
                (f"attn_{part}.bias", (size,), "vector?"),
            ]
    if c.experts is not None:
        n_ff = max(1, *file[first + "ffn_up_exps.weight"].ne[1:2])
        entries += [
            ("ffn_gate_inp.weight", (c.experts.n, n), "product"),
            ("ffn_gate_exps.weight", (c.experts.n, n_ff, n), "product"),
            ("ffn_up_exps.weight", (c.experts.n, n_ff, n), "product"),
            ("ffn_down_exps.weight", (c.experts.n, n, n_ff), "product"),
        ]
        return entries
    is_fused = first + "ffn_gate.weight" not in file
    entries += [
        *([] if is_fused else [("ffn_gate.weight", (c.n_ff, n), "product")]),
        ("ffn_up.weight", (2 * c.n_ff if is_fused else c.n_ff, n), "product"),
        ("ffn_down.weight", (n, c.n_ff), "product"),
        ("ffn_gate.bias", (c.n_ff,), "vector?"),
        ("ffn_up.bias", (2 * c.n_ff if is_fused else c.n_ff,), "vector?"),
        ("ffn_down.bias", (n,), "vector?"),
    ]
    return entries


def _recurrent(c: TextConfig) -> list[tuple[str, tuple[int, ...], str]]:
    assert c.state is not None
    s, n = c.state, c.n_embd
    return [
        ("attn_norm.weight", (n,), "vector"),
        ("ssm_in.weight", (2 * s.n_inner, n), "product"),
        ("ssm_conv1d.weight", (s.n_inner, s.n_conv), "vector"),
        ("ssm_conv1d.bias", (s.n_inner,), "vector"),
        ("ssm_x.weight", (s.n_dt + 2 * s.n_state, s.n_inner), "product"),
        ("ssm_dt.weight", (s.n_inner, s.n_dt), "product"),
        ("ssm_dt.bias", (s.n_inner,), "vector"),
        ("ssm_a", (s.n_inner, s.n_state), "vector"),
        ("ssm_d", (s.n_inner,), "vector"),
        ("ssm_out.weight", (n, s.n_inner), "product"),
    ]
