"""ChatTemplate: a conversation as one text, by the Jinja template of a model file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ggmlb.core.errors import ModelError, shown

MAX_SOURCE: Final = 1 << 16
"""Longest template [characters]; the longest known has 17,000."""


class ChatTemplate:
    """A chat template, as model files and Hugging Face's `tokenizer_config.json` have them.

    It is run in a sandbox, with bounds on time and memory (`template_sandbox`).

    Args:
        source: The template in Jinja.
        bos: Text of the token that begins a text.
        eos: Text of the token that ends a text.

    Attributes:
        source: The template.

    Raises:
        ModelError: The template is too long, or no template, or `jinja2` is not installed.
    """

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        if len(source) > MAX_SOURCE:
            raise ModelError(
                f"the chat template has {len(source):,} characters; at most {MAX_SOURCE:,} are allowed"
            )
        try:
            from ggmlb.models.gguf.template_sandbox import Program, Refusal
        except ImportError:
            raise ModelError("chat templates need jinja2: pip install 'ggmlb[models]'") from None
        self.source = source
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._refusal = Refusal
        try:
            self._program = Program(source)
        except (Exception, RecursionError) as error:
            raise _failure("the chat template is no Jinja template", error) from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Return a conversation as the text that the model continues.

        Args:
            messages: Each with `role` (`"system"`, `"user"`, `"assistant"`) and `content`.
            add_generation_prompt: Whether the text ends with the beginning of the assistant's answer.
            **variables: What else the template asks for, such as `enable_thinking`.

        Raises:
            ModelError: The template refuses the messages, fails, or takes too much time or memory.
        """
        known = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **variables,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._program.run(known)
        except self._refusal as error:
            raise ModelError(f"the chat template refuses the messages: {shown(str(error))[:500]}") from None
        except (Exception, RecursionError) as error:
            raise _failure("the chat template fails", error) from None


def _failure(what: str, error: Exception) -> ModelError:
    line = getattr(error, "lineno", None)
    where = f" in line {line}" if line else ""
    why = shown(str(error))[:500] or type(error).__name__
    if isinstance(error, RecursionError | MemoryError):
        why = "it is nested too deeply, or too large"
    return ModelError(f"{what}{where}: {why}")
