"""The table of rules that the modules beside fill, each for its ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ggmlb.backends.common.fusion import Group, Name
from ggmlb.backends.common.rules import Rules
from ggmlb.core.tensor import Tensor

if TYPE_CHECKING:
    from ggmlb.backends.gpu.launch import Launch, Target

RULES: Final[Rules[Callable[[Tensor, Target], list[Launch]]]] = Rules()


GROUP_RULES: Final[
    dict[Name, tuple[Callable[[Group, Target], bool], Callable[[Group, Target], list[Launch]]]]
] = {}
"""Whether a group of nodes, none of them declined, can be done at once; and the launches that do it."""
