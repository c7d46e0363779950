"""The tokenizer and chat template of a model, as the gateway uses them. Reads local files only."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from pdrt.errors import ModelError, RequestRefused
from pdrt.model.detokenizer import Detokenizer


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: token ids are below this, added tokens included.
        has_chat_template: whether `apply_chat_template` can be used.
    """

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer in a model's directory.

        Raises:
            ModelError: it is missing or broken.
        """
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        # Broken files make transformers and tokenizers raise anything, plain Exception included.
        except Exception as error:
            raise ModelError(f"cannot load the tokenizer in {directory}: {error}") from error
        # Whoever calls bounds the length; the library's own warning would name another bound.
        self._inner.model_max_length = sys.maxsize
        self.vocab_size: int = len(self._inner)
        self.has_chat_template = self._inner.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that begin (or end) every text of the model."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without any clean-up of spaces: that would change earlier text."""
        text: str = self._inner.decode(
            token_ids,
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def detokenizer(
        self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> Detokenizer:
        """A `Detokenizer` of an output that follows `prompt_ids`."""
        return Detokenizer(self, skip_special_tokens, prompt_ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            RequestRefused: the model has no chat template, or the template refuses the messages.
        """
        if not self.has_chat_template:
            raise RequestRefused("this model has no chat template; use /v1/completions", "messages")
        try:
            text: str = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=False,
            )
        # What templates raise on content of an unexpected type, or transformers on its structure.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestRefused(f"the chat template refuses this: {error}", "messages") from error
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False)
