"""The bytes of single tokens: a token may be a part of a character, which text cannot say."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

Step = Callable[[bytes | str], bytes | str]
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes as (GPT-2's): printable Latin-1
    stands for itself, the others for 256 and on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


class TokenBytes:
    """Bytes by token id. Those of an output's tokens, joined, are its text in UTF-8 (but for a
    space that some vocabularies drop at the very beginning of a text)."""

    def __init__(self, inner: Any) -> None:
        """`inner` is the tokenizer of transformers."""
        self._inner = inner
        self._size = len(inner)
        self._steps = _steps(inner)

    def __call__(self, token_id: int) -> bytes:
        """Empty where the vocabulary has no such token (models may have more rows)."""
        if not 0 <= token_id < self._size:
            return b""
        if self._steps is None:
            text: str = self._inner.decode([token_id], clean_up_tokenization_spaces=False)
            return text.encode("utf-8", errors="replace")
        token: bytes | str | None = self._inner.convert_ids_to_tokens(token_id)
        for step in self._steps if token is not None else ():
            assert token is not None
            token = step(token)
        return token.encode("utf-8", errors="replace") if isinstance(token, str) else token or b""


def _steps(inner: Any) -> list[Step] | None:
    """What the vocabulary's decoder does to one token; None where that is not a token's affair."""
    backend = getattr(inner, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    if decoder is None:
        return None
    description = msgspec.json.decode(decoder.__getstate__())
    steps: list[Step] = []
    for part in description.get("decoders", [description]):
        match part:
            case {"type": "ByteLevel"}:
                steps.append(_from_alphabet)
            case {"type": "ByteFallback"}:
                steps.append(_from_hexadecimal)
            case {"type": "Metaspace", "replacement": str(mark)}:
                steps.append(_replace(mark, " "))
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(content)}:
                steps.append(_replace(mark, content))
            case {"type": "Fuse" | "Strip"}:
                pass  # they are about neighbours and the beginning
            case _:
                return None
    return steps


def _from_alphabet(token: bytes | str) -> bytes | str:
    if isinstance(token, str) and all(character in BYTE_ALPHABET for character in token):
        return bytes(BYTE_ALPHABET[character] for character in token)
    return token


def _from_hexadecimal(token: bytes | str) -> bytes | str:
    if isinstance(token, str) and (match := _BYTE.fullmatch(token)):
        return bytes([int(match.group(1), 16)])
    return token


def _replace(mark: str, content: str) -> Step:
    def replace(token: bytes | str) -> bytes | str:
        return token.replace(mark, content) if isinstance(token, str) else token

    return replace
