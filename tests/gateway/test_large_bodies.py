"""Bodies within `body_bytes_max` that hold as much work as fits: none may hold up the loop."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
import pytest

from pdrt.config import ApiConfig, GatewayConfig
from pdrt.gateway.errors import ApiError
from pdrt.gateway.preparation import CHARACTERS_PER_TOKEN_MAX, Preparation, Prepared
from pdrt.gateway.schema.bounds import Limits
from pdrt.gateway.schema.parsing import parse_chat, parse_completion
from pdrt.gateway.served_model import INLINE_BYTES_MAX, Parse, ServedModel
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from tests.gateway.conftest import Deployment, own_seconds

BYTES_MAX = GatewayConfig().api.body_bytes_max
CONTEXT = Limits(tokens_max=1 << 20, choices_max=128, logprobs_max=20, grammar_bytes_max=1 << 16)
CPU_SECONDS_MAX = 1.0
"""Of one body; each takes a tenth of it here, and took seconds when it was no refusal."""


def filled(head: bytes, item: bytes, tail: bytes) -> bytes:
    """As many items as a body may hold."""
    count = (BYTES_MAX - len(head) - len(tail)) // (len(item) + 1)
    return head + b",".join([item] * count) + tail


CHAT = b'{"model":"tiny","messages":['
CONTENT = CHAT + b'{"role":"user","content":['
LARGE: list[tuple[Parse, bytes, str]] = [
    (parse_chat, filled(CHAT, b'{"role":"user","content":""}', b"]}"), "messages"),
    (parse_chat, filled(CONTENT, b'{"type":"text","text":""}', b"]}]}"), "messages"),
    (parse_chat, filled(CONTENT, b"[]", b"]}]}"), "messages[0].content[0]"),
    (parse_chat, filled(CHAT[:-1] + b'[],"tools":[', b"[]", b"]}"), "messages"),
    (parse_completion, filled(b'{"model":"tiny","prompt":[', b"1", b"]}"), "prompt"),
    (parse_completion, filled(b'{"model":"tiny","prompt":[', b"[]", b"]}"), "prompt"),
    (parse_completion, filled(b'{"model":"tiny","prompt":[[', b"[]", b"]]}"), "prompt"),
    (
        parse_completion,
        filled(b'{"model":"tiny","prompt":"","stop_token_ids":[', b"1", b"]}"),
        "stop_token_ids",
    ),
    (parse_completion, filled(b'{"model":"tiny","prompt":"","stop":[', b'"a"', b"]}"), "stop"),
]


@pytest.mark.parametrize("parse, body, param", LARGE, ids=range(len(LARGE)))
def test_what_fits_into_a_body_is_refused_at_once(parse: Parse, body: bytes, param: str) -> None:
    with own_seconds() as spent, pytest.raises(ApiError) as caught:
        parse(body, CONTEXT)
    assert spent() < CPU_SECONDS_MAX
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.body) < 1000


def test_more_items_than_the_context_has_tokens_are_refused() -> None:
    chat = msgspec.json.encode({"model": "tiny", "messages": [{"role": "user", "content": ""}] * 9})
    completion = msgspec.json.encode({"model": "tiny", "prompt": [1] * 9})
    for parse, body in ((parse_chat, chat), (parse_completion, completion)):
        with pytest.raises(ApiError) as caught:
            parse(body, msgspec.structs.replace(CONTEXT, tokens_max=8))
        assert caught.value.code == "context_length_exceeded"
        parse(body, msgspec.structs.replace(CONTEXT, tokens_max=9))


class _Recorder:
    """A tokenizer that notes the thread it is used in."""

    def __init__(self) -> None:
        self.threads: list[int] = []

    class chat_template:
        text = ""
        renders_tools = False

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.threads.append(threading.get_ident())
        return [1]

    def render_chat(self, messages: Sequence[Mapping[str, str]], *options: object) -> str:
        return ""


async def test_a_large_body_is_worked_on_beside_the_loop() -> None:
    recorder = _Recorder()
    identity = ModelIdentity("tiny", "d1", 512, 100, (), "LlamaForCausalLM")
    model = ServedModel(identity, "tiny", cast(Tokenizer, recorder))
    here = threading.get_ident()

    def parse(body: bytes, limits: Limits) -> Any:
        recorder.threads.append(threading.get_ident())
        return parse_chat(body, limits)

    message = {"role": "user", "content": ""}
    small = msgspec.json.encode({"model": "tiny", "messages": [message]})
    await model.prepare(small, parse, CONTEXT)
    assert recorder.threads == [here, here]
    recorder.threads.clear()
    large = msgspec.json.encode({"model": "tiny", "messages": [message] * 200})
    assert len(large) > INLINE_BYTES_MAX
    await model.prepare(large, parse, CONTEXT)
    assert len(recorder.threads) == 2 and here not in recorder.threads
    model.close()


async def test_names_and_the_template_count_like_text(deployment: Deployment) -> None:
    named = {"role": "user", "content": "", "name": "n" * 150_000}
    body = {"model": "tiny", "messages": [named]}
    response = await deployment.http.post("/v1/chat/completions", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "150016 characters" in error["message"]


class _Counter(_Recorder):
    """A tokenizer with a token per `width` characters that notes how much it was given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.sizes: list[int] = []

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.sizes.append(len(text))
        return [1] * (len(text) // self.width)


@pytest.mark.parametrize("width", [1, 8, 200])
def test_a_text_that_is_far_too_long_is_refused_by_a_part_of_it(width: int) -> None:
    limits = msgspec.structs.replace(CONTEXT, tokens_max=4096)
    counter = _Counter(width)
    identity = ModelIdentity("tiny", "d1", 4096, 100, (), "LlamaForCausalLM")
    preparation = Preparation(identity, cast(Tokenizer, counter), ApiConfig())

    def prepare(size: int, **fields: Any) -> Prepared:
        counter.sizes.clear()
        body = msgspec.json.encode({"model": "tiny", "prompt": "x" * size, **fields})
        return preparation.prepare(parse_completion(body, limits), limits)

    assert len(prepare(4096 * width).prompts[0].token_ids) == 4096
    assert sum(counter.sizes) <= 3 * 4096 * width
    size = 4096 * CHARACTERS_PER_TOKEN_MAX
    if width < 200:
        with pytest.raises(ApiError, match=r"asks for over \d+") as caught:
            prepare(size)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        assert sum(counter.sizes) < size / 5
    kept = prepare(size, truncate_prompt_tokens=8).prompts[0].token_ids
    assert len(kept) == 8 and counter.sizes == [size]
