"""ModelLayout: the configuration of a GGUF language model, and the tensors that each layer reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ggmlb.core.errors import ModelError, shown
from ggmlb.models.text.architectures import read_config
from ggmlb.models.text.blocks import Weight, norm_weights
from ggmlb.models.weights import Source

if TYPE_CHECKING:
    from ggmlb.models.gguf import GgufFile

IGNORED = frozenset({
    "attn_rot_embd", "attn_rot_embd.weight",  # of older files
    *(f"time_mix_v{i}.weight" for i in range(3)),  # of RWKV's first layer, which has no values to mix in
})  # fmt: skip
"""Tensors of a layer that files hold and no graph reads."""


class ModelLayout:
    """A model's configuration, and the tensors of the file for each weight, from the file's header alone.

    Args:
        file: The model.

    Attributes:
        file: As given.
        config: The model's configuration.
        embeddings: Weights before the first layer.
        layers: Weights of each layer, by the names that the graph uses.
        output: Weights after the last layer.

    Raises:
        ModelError: The architecture is unknown, metadata is missing or wrong, or the file lacks a tensor, has
            it in another shape, or has one that no graph reads.
    """

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.config = c = read_config(file)
        table = (c.n_vocab, c.n_embd)
        norm = norm_weights("token_embd_norm", c.n_embd) if c.has_embedding_norm else []
        self.embeddings = self._of("", [Weight("token_embd.weight", table, "matrix"), *norm])
        head = "output.weight" if "output.weight" in file else "token_embd.weight"
        self.output = {
            "output.weight": Source((head,), table, is_matrix=True, is_multiplied=True),
            **{
                name.replace(c.output_norm, "output_norm"): source
                for name, source in self._of("", norm_weights(c.output_norm, c.n_embd)).items()
            },
        }
        ropes = (a.rope for a in c.attentions if a and a.rope and a.rope.has_factors)
        n = next((rope.n_dims // 2 for rope in ropes), 0)
        factors = [name for name in file if n and name.startswith("rope_f")]
        self.factors = {name: Source((name,), (n,), is_matrix=False) for name in factors}
        self.layers = [self._of(f"blk.{i}.", layer.weights(c.n_embd)) for i, layer in enumerate(c.layers)]
        if n := c.n_layer_input:
            own = Weight("per_layer_token_embd.weight", (c.n_vocab, n * c.n_layer), "matrix")
            product = Weight("per_layer_model_proj.weight", (n * c.n_layer, c.n_embd), "product")
            self.embeddings |= self._of("", [own])
            self.layers[0] |= self._of("", [product, Weight("per_layer_proj_norm.weight", (n,))])
        self._check_all_used()

    def _of(self, prefix: str, weights: Iterable[Weight]) -> dict[str, Source]:
        """Return the sources of weights, without the optional ones that the file lacks."""
        found = {}
        for weight in weights:
            full = name = prefix + weight.name
            if full not in self.file and full.removesuffix(".weight") in self.file:
                name = full.removesuffix(".weight")  # as some norms are written
            if name in self.file or not weight.is_optional:
                self._check(name, weight.shape)
                kind = weight.kind
                found[full] = Source((name,), weight.shape, kind != "vector", kind == "product")
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
        n = self.config.n_layer
        skipped = tuple(f"blk.{i}." for i in range(n, n + self.config.n_predictors))
        used = {name for part in self._all() for source in part.values() for name in source.names}
        for name in self.file:
            if name.startswith(skipped):
                continue
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
