"""Streaming gives the text of decoding everything at once, however the tokens are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from pdrt.model.detokenizer import HELD_TOKENS_MAX, REPLACEMENT, Detokenizer, TokenTexts
from tests.model.tiny import SENTENCES, make_tokenizer


def make_metaspace() -> PreTrainedTokenizerFast:
    """As Llama 2: words carry their space in front, other characters fall back to bytes."""
    letters = sorted({c for text in SENTENCES for c in text if not c.isspace()})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, *letters, "th", "▁th"])}
    merges = [("t", "h"), ("▁", "th")]
    inner = Inner(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")


class Plain:
    """A tokenizer as the `Detokenizer` wants it."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(
            self.inner.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )


TOKENIZERS = {"byte-level": Plain(make_tokenizer()), "metaspace": Plain(make_metaspace())}
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                "the ",
                " the",
                "  ",
                "日本語",
                "👩‍👩‍👧",
                "🇫🇷",
                "e\u0301",
                "ก็",
                "\n",
                "😀😀",
                "\ufffd",
                "َّ",
            ]
        ),
    ),
    max_size=12,
).map("".join)


TOKEN_IDS = st.lists(
    st.one_of(
        st.integers(0, len(TOKENIZERS["byte-level"].inner) - 1).map(lambda token: [token]),
        TEXTS.map(TOKENIZERS["byte-level"].inner.encode),
    ),
    max_size=8,
).map(lambda parts: [token for part in parts for token in part])


def stream(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    """What pushing `ids`, cut before each of `cuts`, and finishing gives."""
    bounds = [0, *sorted(cut for cut in cuts if cut <= len(ids)), len(ids)]
    parts = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    return [*parts, detokenizer.finish()]


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(0, 120), max_size=40))
def test_any_split_gives_the_same_text(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.inner.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(ids)
    assert "".join(stream(Detokenizer(tokenizer), ids, cuts)) == expected
    assert "".join(stream(Detokenizer(tokenizer), ids, list(range(len(ids))))) == expected


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 399), max_size=80))
def test_any_tokens_of_a_byte_level_vocabulary(ids: list[int]) -> None:
    """Models may emit bytes that are no text at all, and special tokens anywhere."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = [token % len(tokenizer.inner) for token in ids]
    parts = stream(Detokenizer(tokenizer), ids, list(range(len(ids))))
    assert "".join(parts) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(prompt=TOKEN_IDS, ids=TOKEN_IDS, skips=st.booleans())
def test_texts_of_single_tokens_change_nothing(
    prompt: list[int], ids: list[int], skips: bool
) -> None:
    """Not even at which token which text appears."""
    tokenizer = TOKENIZERS["byte-level"]
    slow = Detokenizer(tokenizer, skips, prompt)
    fast = Detokenizer(tokenizer, skips, prompt, TokenTexts(tokenizer, skips))
    cuts = list(range(len(ids)))
    assert stream(fast, ids, cuts) == stream(slow, ids, cuts)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@settings(max_examples=100, deadline=None)
@given(prompt=TEXTS, text=TEXTS)
def test_output_continues_the_prompt(name: str, prompt: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    before = tokenizer.inner.encode(prompt.rstrip(REPLACEMENT) + ".", add_special_tokens=False)
    after = tokenizer.inner.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(before + after)[len(tokenizer.decode(before)) :]
    detokenizer = Detokenizer(tokenizer, prompt_ids=before)
    assert "".join(stream(detokenizer, after, list(range(len(after))))) == expected


def test_never_half_a_character() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.inner.encode("a👩‍👩‍👧b", add_special_tokens=False)
    parts = stream(Detokenizer(tokenizer), ids, list(range(len(ids))))
    assert all(REPLACEMENT not in part for part in parts)
    assert [part for part in parts if part] == ["a", "👩", "\u200d", "👩", "\u200d", "👧", "b"]


def test_an_output_cut_within_a_character_ends_in_a_replacement() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.inner.encode("a😀", add_special_tokens=False)[:-1]
    assert stream(Detokenizer(tokenizer), ids, list(range(len(ids))))[-1] == REPLACEMENT


def test_special_tokens_are_kept_on_request() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    assert Detokenizer(tokenizer).push([2]) == ""
    assert Detokenizer(tokenizer, skip_special_tokens=False).push([2]) == "<|im_end|>"


@pytest.mark.parametrize("kind", ["garbage", "special"])
def test_the_window_stays_short(kind: str) -> None:
    """Cost per token must not grow with the output, whatever the model emits."""
    tokenizer = TOKENIZERS["byte-level"]
    continuation = tokenizer.inner.encode("😀", add_special_tokens=False)[-1]
    token = continuation if kind == "garbage" else 2
    detokenizer = Detokenizer(tokenizer)
    parts = [detokenizer.push([token]) for _ in range(500)]
    assert len(detokenizer._window) <= 3 * HELD_TOKENS_MAX
    text = "".join(parts) + detokenizer.finish()
    assert text == tokenizer.decode([token] * 500)
