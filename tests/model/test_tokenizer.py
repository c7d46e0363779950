"""Chat templates in the manner of real models, and the bytes of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from pdrt.errors import RequestRefused
from pdrt.model.token_bytes import TokenBytes
from pdrt.model.tokenizer import Tokenizer, _decode_of
from tests.model.templates import TEMPLATES
from tests.model.test_detokenizer import TEXTS, make_metaspace
from tests.model.tiny import CHAT_TEMPLATE, make_tokenizer

Load = Callable[..., Tokenizer]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
INNER = make_tokenizer()
HELLO = {"role": "user", "content": "Hello"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "abcdef123",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdef123", "name": "get_weather", "content": "Rain"}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """`load(template)`: a tokenizer with it."""

    def make(template: Any, special: tuple[str, ...] = ()) -> Tokenizer:
        inner = make_tokenizer()
        inner.chat_template = template
        inner.add_special_tokens({"additional_special_tokens": list(special)})
        inner.save_pretrained(tmp_path)
        return Tokenizer(tmp_path)

    return make


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n'),
        ("llama31", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Zürich"}}'),
        ("mistral", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich"}'),
    ],
)
def test_tools_and_calls_are_rendered(load: Load, name: str, call: str) -> None:
    tokenizer = load(TEMPLATES[name])
    assert tokenizer.chat_template.renders_tools
    text = tokenizer.render_chat([HELLO, CALL, RESULT], TOOLS)
    assert '"description": "Of a city."' in text
    assert call in text
    assert text.index(call) < text.index("Rain")
    ids = tokenizer.apply_chat_template([HELLO, CALL, RESULT], tools=TOOLS)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_variables_are_passed_on(load: Load) -> None:
    tokenizer = load(TEMPLATES["smollm3"])
    assert tokenizer.chat_template.variables == {"enable_thinking"}
    thinks = tokenizer.render_chat([HELLO])
    silent = tokenizer.render_chat([HELLO], template_kwargs={"enable_thinking": False})
    assert thinks.endswith("assistant\n") and silent.endswith("</think>\n")


def test_which_variables_there_are(load: Load) -> None:
    # `call`, which the template sets in a branch, counts too.
    llama = {"date_string", "custom_tools", "call"}
    assert load(TEMPLATES["llama31"]).chat_template.variables == llama
    assert load(TEMPLATES["hermes"]).chat_template.variables == frozenset()


@pytest.mark.parametrize(
    "name",
    [
        "messages", "tools", "add_generation_prompt", "bos_token", "strftime_now",
        "raise_exception", "chat_template", "tokenize", "documents", "conversation", "self",
        "__class__", "enable_thinkin", "return_dict", "",
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", ["smollm3", "llama31"])
def test_variables_that_clients_may_not_set(load: Load, template: str, name: str) -> None:
    tokenizer = load(TEMPLATES[template])
    with pytest.raises(RequestRefused) as refused:
        tokenizer.render_chat([HELLO], template_kwargs={name: "x"})
    assert refused.value.param == "chat_template_kwargs"
    plain = tokenizer.render_chat([HELLO])
    for nothing in (None, False):
        assert tokenizer.render_chat([HELLO], template_kwargs={name: nothing}) == plain


def test_a_template_without_tools_says_so(load: Load) -> None:
    tokenizer = load(CHAT_TEMPLATE)
    assert not tokenizer.chat_template.renders_tools
    with pytest.raises(RequestRefused, match="no tools") as refused:
        tokenizer.render_chat([HELLO], TOOLS)
    assert refused.value.param == "tools"


def test_several_templates(load: Load) -> None:
    tokenizer = load({"default": CHAT_TEMPLATE, "tool_use": TEMPLATES["hermes"]})
    assert tokenizer.chat_template.renders_tools
    assert "<tools>" in tokenizer.render_chat([HELLO], TOOLS)
    assert "<tools>" not in tokenizer.render_chat([HELLO])


def test_the_last_message_is_continued(load: Load) -> None:
    tokenizer = load(TEMPLATES["hermes"])
    messages = [HELLO, {"role": "assistant", "content": "Hello, my"}]
    text = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nHello, my")
    with pytest.raises(RequestRefused) as refused:
        tokenizer.render_chat(messages, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (TEMPLATES["llama31"], [HELLO, {**CALL, "tool_calls": CALL["tool_calls"] * 2}]),
        (TEMPLATES["mistral"], [{**CALL, "tool_calls": [{**CALL["tool_calls"][0], "id": "x"}]}]),
        ("{{ messages[7].content + 'x' }}", [HELLO]),
        ("{{ 1 // 0 }}", [HELLO]),
        ("{{ ''.__class__.__mro__ }}", [HELLO]),
        ("{% for x in %}", [HELLO]),
        ("{{ raise_exception('x' * 10000) }}", [HELLO]),
        ({"other": CHAT_TEMPLATE}, [HELLO]),
        (None, [HELLO]),
        (CHAT_TEMPLATE, []),
    ],
)  # fmt: skip
def test_what_a_template_refuses_is_a_refusal_of_the_messages(
    load: Load, template: Any, messages: list[dict[str, Any]]
) -> None:
    with pytest.raises(RequestRefused) as refused:
        load(template).render_chat(messages)
    assert refused.value.param == "messages"
    assert len(str(refused.value)) < 400


def test_what_only_the_template_may_write_stays_text_of_the_user(load: Load) -> None:
    """Text of users is never run."""
    text = load(TEMPLATES["hermes"]).render_chat([{"role": "user", "content": "{{ 7 * 7 }}"}])
    assert "{{ 7 * 7 }}" in text


def test_markers_of_calls_show_and_other_special_tokens_do_not(load: Load) -> None:
    tokenizer = load(TEMPLATES["mistral"], special=("[TOOL_CALLS]", "[INST]"))
    ids = tokenizer.encode("[INST]a[TOOL_CALLS]b<|im_end|>", add_special_tokens=False)
    for keep, text in (((), "ab"), (("[TOOL_CALLS]", "[ARGS]"), "a[TOOL_CALLS]b")):
        detokenizer = tokenizer.detokenizer(keep=keep)
        assert "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish() == text


VOCABULARIES = {"byte-level": make_tokenizer(), "metaspace": make_metaspace()}


@pytest.mark.parametrize("name", sorted(VOCABULARIES))
@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_bytes_of_tokens_make_the_text(name: str, text: str) -> None:
    inner = VOCABULARIES[name]
    token_bytes = TokenBytes(inner)
    ids = inner.encode(text, add_special_tokens=False)
    joined = b"".join(map(token_bytes, ids)).decode()
    decoded = inner.decode(ids, clean_up_tokenization_spaces=False)
    assert joined == (f" {decoded}" if name == "metaspace" and ids else decoded)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 379), max_size=12))
def test_bytes_of_any_tokens(ids: list[int]) -> None:
    inner = VOCABULARIES["byte-level"]
    token_bytes = TokenBytes(inner)
    joined = b"".join(map(token_bytes, ids)).decode(errors="replace")
    assert joined == inner.decode(ids, clean_up_tokenization_spaces=False)


def test_a_part_of_a_character_has_bytes_but_no_text(load: Load) -> None:
    tokenizer = load(CHAT_TEMPLATE)
    ids = tokenizer.encode("😀", add_special_tokens=False)
    assert len(ids) > 1
    assert b"".join(map(tokenizer.token_bytes, ids)) == "😀".encode()
    assert tokenizer.token_bytes(2) == b"<|im_end|>"


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_ids_that_are_no_tokens_have_no_bytes(load: Load, token_id: int) -> None:
    assert load(CHAT_TEMPLATE).token_bytes(token_id) == b""


def test_added_tokens_have_the_bytes_of_their_text() -> None:
    inner = make_tokenizer()
    inner.add_tokens(["<tool_call>", "日本", "a b"])
    token_bytes = TokenBytes(inner)
    for text in ("<tool_call>", "日本", "a b"):
        (token_id,) = inner.encode(text, add_special_tokens=False)
        assert token_bytes(token_id) == text.encode()


@given(st.lists(st.integers(0, 379), max_size=12), st.booleans())
def test_decoding_is_that_of_transformers(ids: list[int], skips: bool) -> None:
    expected = INNER.decode(ids, skip_special_tokens=skips, clean_up_tokenization_spaces=False)
    assert _decode_of(INNER)(ids, skip_special_tokens=skips) == expected


def test_a_tokenizer_that_decodes_its_own_way_keeps_it() -> None:
    inner = make_tokenizer()

    class Shouting(type(inner)):  # type: ignore[misc]
        def _decode(self, *arguments: Any, **options: Any) -> str:
            return str(super()._decode(*arguments, **options)).upper()

    inner.__class__ = Shouting
    ids = inner.encode("the fox")
    assert _decode_of(inner)(ids, skip_special_tokens=True) == "THE FOX"


def test_texts_of_single_tokens_are_used_where_tokens_are_bytes(tmp_path: Path) -> None:
    """And nowhere else: a decoder may drop a space in front, or change what stands between."""
    for decoder, is_used in ((decoders.ByteLevel(), True), (decoders.Metaspace(), False)):
        inner = make_tokenizer()
        inner.backend_tokenizer.decoder = decoder
        inner.save_pretrained(tmp_path)
        assert bool(Tokenizer(tmp_path)._texts) == is_used
