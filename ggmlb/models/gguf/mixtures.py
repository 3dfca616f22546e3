"""Mixtures: quantisation types by tensor and layer, under llama.cpp's names (Q4_K_M).

Source: llama_tensor_get_type, for models that are not Falcon's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from ggmlb.core.dtypes import DType


class MixtureLayer(NamedTuple):
    """A layer's index and the model's sizes, from which a mixture chooses quantisation types.

    Attributes:
        layer: Index of the layer.
        n_layer: Layers of the model.
        n_expert: Experts of a layer; 0 where there are none.
        n_shared: Attention heads per KV head.
    """

    layer: int
    n_layer: int
    n_expert: int
    n_shared: int


Condition = Callable[[MixtureLayer], bool]


class Rule(NamedTuple):
    """Quantisation type of the matrices with `part` in their names, in the layers that `where` accepts.

    Attributes:
        part: Text within the tensors' names.
        dtype: Type of the tensors.
        where: Whether the rule applies to a layer.
    """

    part: str
    dtype: DType
    where: Condition


class Mixture(NamedTuple):
    """Quantisation types of a model's matrices under one name, such as Q4_K_M.

    Attributes:
        dtype: Type of matrices without a rule.
        file_type: `general.file_type` (enum llama_ftype).
        rules: Rules; the first that matches a tensor counts.
    """

    dtype: DType
    file_type: int
    rules: tuple[Rule, ...] = ()

    @property
    def output_type(self) -> DType:
        """The type of the output matrix (`output.weight`): at least Q6_K."""
        return max(self.dtype, DType.Q6_K, key=lambda dtype: dtype.type_size / dtype.block_size)

    def type_of(self, name: str, place: MixtureLayer) -> DType:
        """Return the type of a matrix: of the first rule for its `name` and layer (`place`), else `dtype`."""
        fitting = (rule.dtype for rule in self.rules if rule.part in name and rule.where(place))
        return next(fitting, self.dtype)


def _all(_: MixtureLayer) -> bool:
    return True


def _first(n: int) -> Condition:
    return lambda place: place.layer < n


def _first_part(n: int) -> Condition:
    return lambda place: place.layer < place.n_layer // n


def _more_bits(place: MixtureLayer) -> bool:
    """The first and the last eighth of the layers, and every third between them."""
    eighth = place.n_layer // 8
    is_between = eighth <= place.layer < 7 * place.n_layer // 8
    return not is_between or (place.layer - eighth) % 3 == 2


def _has_8_experts(place: MixtureLayer) -> bool:
    """Mixtral's sizes: attention is small beside the experts, so that more bits cost little."""
    return place.n_expert == 8


def _is_70b(place: MixtureLayer) -> bool:
    """Llama 2's sizes: eight attention heads share a KV head, whose weights are small."""
    return place.n_layer == 80 and place.n_shared > 1


def _shares_4(place: MixtureLayer) -> bool:
    return place.n_shared >= 4


_KEYS, _VALUES, _MIXED, _ALL_THREE = "attn_k.weight", "attn_v.weight", "attn_output.weight", "attn_qkv.weight"
_DOWN = "ffn_down"

_8_EXPERTS = (Rule(_VALUES, DType.Q8_0, _has_8_experts), Rule(_KEYS, DType.Q8_0, _has_8_experts))
_8_EXPERTS_SMALL = (*_8_EXPERTS, Rule(_MIXED, DType.Q5_K, _has_8_experts))
_70B = Rule(_VALUES, DType.Q5_K, _is_70b)

MIXTURES: Final = {
    "Q2_K_S": Mixture(DType.Q2_K, 21, (
        *_8_EXPERTS, _70B, Rule(_VALUES, DType.Q4_K, _shares_4), Rule(_DOWN, DType.Q4_K, _first_part(8)),
    )),
    "Q3_K_S": Mixture(DType.Q3_K, 11, (*_8_EXPERTS_SMALL, _70B)),
    "Q3_K_M": Mixture(DType.Q3_K, 12, (
        *_8_EXPERTS_SMALL, _70B, Rule(_VALUES, DType.Q5_K, _first(2)), Rule(_VALUES, DType.Q4_K, _all),
        Rule(_DOWN, DType.Q5_K, _first_part(16)), Rule(_DOWN, DType.Q4_K, _all),
        Rule(_MIXED, DType.Q4_K, _all), Rule(_ALL_THREE, DType.Q4_K, _all),
    )),
    "Q3_K_L": Mixture(DType.Q3_K, 13, (
        *_8_EXPERTS, Rule(_VALUES, DType.Q5_K, _all), Rule(_DOWN, DType.Q5_K, _all),
        Rule(_MIXED, DType.Q3_K, _has_8_experts), Rule(_MIXED, DType.Q5_K, _all),
        Rule(_ALL_THREE, DType.Q4_K, _all),
    )),
    "Q4_K_S": Mixture(DType.Q4_K, 14, (
        *_8_EXPERTS_SMALL, _70B, Rule(_VALUES, DType.Q5_K, _first(4)),
        Rule(_DOWN, DType.Q5_K, _first_part(8)),
    )),
    "Q4_K_M": Mixture(DType.Q4_K, 15, (
        *_8_EXPERTS_SMALL, Rule(_VALUES, DType.Q6_K, _more_bits), _70B, Rule(_DOWN, DType.Q6_K, _more_bits),
        Rule(_ALL_THREE, DType.Q5_K, _all),
    )),
    "Q5_K_S": Mixture(DType.Q5_K, 16, _8_EXPERTS),
    "Q5_K_M": Mixture(DType.Q5_K, 17, (
        *_8_EXPERTS, Rule(_VALUES, DType.Q6_K, _more_bits), Rule(_DOWN, DType.Q6_K, _more_bits),
        Rule(_ALL_THREE, DType.Q6_K, _all),
    )),
}  # fmt: skip
"""By name, in capitals."""
