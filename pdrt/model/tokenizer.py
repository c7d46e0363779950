"""The tokenizer and chat template of a model, as the gateway uses them. Reads local files only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdrt.errors import ModelError
from pdrt.model.chat_template import ChatTemplate
from pdrt.model.detokenizer import Detokenizer, TokenTexts
from pdrt.model.token_bytes import TokenBytes
from pdrt.model.tokenizer_class import tokenizer_class


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        vocab_size: token ids are below this, added tokens included.
        chat_template: how conversations are written.
        token_bytes: `token_bytes(token_id)` are the exact bytes of a token, of a part of a
            character, too; empty where there is no such token.
    """

    def __init__(self, directory: Path) -> None:
        """Load the tokenizer in a model's directory.

        Raises:
            ModelError: it is missing or broken.
        """
        import transformers

        reader: Any = getattr(transformers, tokenizer_class(directory) or "AutoTokenizer")
        try:
            self._inner: Any = reader.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        # Broken files make transformers and tokenizers raise anything, plain Exception included.
        except Exception as error:
            raise ModelError(f"cannot load the tokenizer in {directory}: {error}") from error
        # Whoever calls bounds the length; the library's own warning would name another bound.
        self._inner.model_max_length = sys.maxsize
        self.vocab_size: int = len(self._inner)
        self.chat_template = ChatTemplate(self._inner)
        self.token_bytes = TokenBytes(self._inner)
        self._decode = _decode_of(self._inner)
        self._texts: dict[bool, TokenTexts] = {}
        """By whether special tokens are skipped; none where a token's text is not its own."""
        if _joins_bytes(self._inner):
            self._texts = {skips: TokenTexts(self, skips) for skips in (False, True)}
        self._special_ids: dict[str, int] = {
            token.content: token_id
            for token_id, token in self._inner.added_tokens_decoder.items()
            if token.special
        }

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are no text: of the chat template, ends and the like."""
        return frozenset(self._special_ids.values())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokens that begin (or end) every text of the model."""
        ids: list[int] = self._inner.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, without any clean-up of spaces: that would change earlier text."""
        return self._decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(
        self,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        keep: Sequence[str] = (),
    ) -> Detokenizer:
        """A `Detokenizer` of an output that follows `prompt_ids`.

        `keep` are special tokens that show in the text even so: what marks a tool call in some
        vocabularies. Those that this vocabulary does not have are no matter.
        """
        kept = self._special_ids.keys() & set(keep)
        if not skip_special_tokens or not kept:
            texts = self._texts.get(skip_special_tokens)
            return Detokenizer(self, skip_special_tokens, prompt_ids, texts)
        skipped = frozenset(self._special_ids[name] for name in self._special_ids.keys() - kept)
        return Detokenizer(_Keeping(self, skipped), skip_special_tokens, prompt_ids)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation as the model reads it, to be encoded without adding special
        tokens: the template writes them itself. Cost is linear in the text for sane templates;
        a few milliseconds per hundred messages.

        Raises:
            RequestRefused: see `ChatTemplate.render`.
        """
        return self.chat_template.render(
            messages, tools, add_generation_prompt, continue_final_message, template_kwargs
        )

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], **options: Any
    ) -> list[int]:
        """Token ids of `render_chat`, with the same options and errors."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def _decode_of(inner: Any) -> Callable[..., str]:
    """`decode` of a tokenizer of transformers, without clean-up. Where it comes down to that of its
    backend, that one: the way there costs more than the work."""
    if _has_plain_decode(inner):
        decode: Callable[..., str] = inner.backend_tokenizer.decode
        return decode
    return functools.partial(inner.decode, clean_up_tokenization_spaces=False)


def _joins_bytes(inner: Any) -> bool:
    """Decoding is known to join the bytes of the tokens and to do nothing else."""
    from tokenizers.decoders import ByteLevel

    return _has_plain_decode(inner) and isinstance(inner.backend_tokenizer.decoder, ByteLevel)


def _has_plain_decode(inner: Any) -> bool:
    from transformers import PreTrainedTokenizerFast

    kind = type(inner)
    return isinstance(inner, PreTrainedTokenizerFast) and (
        kind.decode is PreTrainedTokenizerFast.decode
        and kind._decode is PreTrainedTokenizerFast._decode
    )


class _Keeping:
    """Decodes all but some special tokens."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [token for token in token_ids if token not in self._skipped]
        return self._tokenizer.decode(shown, skip_special_tokens=False)
