"""Whatever a client sends, it is answered, in OpenAI's shape, and never with a failure of ours."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import uvloop
from starlette.types import Message

from pdrt.config import GatewayConfig, ProtocolConfig
from pdrt.gateway.app import build_app
from pdrt.gateway.hub import Hub
from pdrt.gateway.served_model import ServedModel
from pdrt.ids import routing_id
from pdrt.model.identity import ModelIdentity
from pdrt.model.tokenizer import Tokenizer
from pdrt.protocol.codec import Decoder, encode
from pdrt.protocol.gateway_messages import (
    Cancel,
    Finished,
    FinishReason,
    GatewayToWorker,
    Inspect,
    PromptLogprobs,
    Report,
    Submit,
    Tokens,
    Usage,
)
from tests.fuzz.effort import Fuzz, efforts
from tests.fuzz.hostile import BEYOND, SURROGATE, TEXTS, mutated, scrambled, value
from tests.gateway.stand_in import asked, scored
from tests.gateway.workers import GATEWAY, decode, prefill
from tests.model.templates import TEMPLATES
from tests.model.tiny import EOS_ID, make_tokenizer

MAX_MODEL_LEN = 1024
OUTPUT = (5, 6, 7)
HANG_SECONDS = 60.0
Answer = tuple[int, dict[str, str], bytes]


class Gateway:
    """The whole application, asked without sockets; its workers answer at once."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self.config = GatewayConfig(protocol=ProtocolConfig(silence_seconds=1e8))
        tokenizer = Tokenizer(directory)
        identity = ModelIdentity(
            "tiny", "d1", MAX_MODEL_LEN, tokenizer.vocab_size, (EOS_ID,), "LlamaForCausalLM"
        )
        self.model = ServedModel(identity, "tiny", tokenizer, self.config.api)
        self.hub = Hub(self.config, ("d1",), GATEWAY, self._send)
        self.app = build_app(self.hub, self.model, self.config)
        self._decoder: Decoder[GatewayToWorker] = Decoder(GatewayToWorker, 1 << 24)
        for register in (prefill(1), decode(2, pairs=(1,))):
            self.hub.on_frame(routing_id(register.worker), encode(register))

    def _send(self, peer: bytes, frame: bytes) -> bool:
        self._loop.call_soon(self._work, peer, self._decoder.decode(frame))
        return True

    def _work(self, peer: bytes, message: GatewayToWorker) -> None:
        match message:
            case Submit():
                for answer in answers(message):
                    self.hub.on_frame(peer, encode(answer))
            case Inspect(worker, serial):
                self.hub.on_frame(peer, encode(Report(worker, serial, b"", b"{}")))
            case Cancel(request, worker):
                end = Finished(request, worker, FinishReason.CANCELLED)
                self.hub.on_frame(peer, encode(end))

    async def ask(
        self, method: str, path: str, body: bytes, headers: list[tuple[bytes, bytes]]
    ) -> Answer:
        given = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent: list[Message] = []

        async def receive() -> Message:
            if (first := next(given, None)) is not None:
                return first
            await asyncio.Event().wait()  # the client waits for its answer
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode("utf-8", "replace"),
            "query_string": b"", "root_path": "", "headers": headers,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        async with asyncio.timeout(HANG_SECONDS):
            await self.app(scope, receive, send)
        start, *rest = sent
        names = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], names, b"".join(message.get("body", b"") for message in rest)


def answers(submit: Submit) -> Iterator[PromptLogprobs | Tokens | Finished]:
    """What a worker makes of any request."""
    request, worker, sampling = submit.request, submit.worker, submit.sampling
    top = sampling.prompt_logprobs
    if top is not None:
        scores = tuple(scored(token, top) for token in submit.token_ids[1:])
        yield PromptLogprobs(request, worker, scores)
    output = OUTPUT[: sampling.max_tokens]
    if output:
        yield Tokens(request, worker, 0, output, 0, **asked(submit, output))
    usage = Usage(len(submit.token_ids), len(output))
    reason = FinishReason.STOP if len(output) == len(OUTPUT) else FinishReason.LENGTH
    yield Finished(request, worker, reason, usage)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        yield runner


@pytest.fixture(scope="module")
def gateway(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("tokenizer")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = TEMPLATES["hermes"]
    tokenizer.save_pretrained(directory)

    async def make() -> Gateway:
        return Gateway(directory)

    made = runner.run(make())
    yield made
    made.model.close()


TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
}
COMMON: dict[str, Any] = {
    "model": "tiny", "n": 2, "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 4,
    "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0}, "seed": 1, "stop": ["x"], "stop_token_ids": [9], "ignore_eos": True,
    "min_tokens": 1, "skip_special_tokens": True, "cache_salt": "s", "user": "u",
    "metadata": {"a": "b"}, "return_token_ids": True, "truncate_prompt_tokens": 8,
}  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "content": "r", "tool_call_id": "1"},
    {"role": "user", "content": "more"},
]  # fmt: skip
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/completions": [
        {"prompt": "hello", **COMMON},
        {"prompt": [[1, 2, 3], "two"], "echo": True, "logprobs": 2, "prompt_logprobs": 1},
        {"prompt": [1, 2], "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "a", "guided_json": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"prompt": "a", "structured_outputs": {"choice": ["a", "b"]}, "suffix": "", "best_of": 1},
        {"prompt": "a", "guided_regex": "[a-z]+", "max_tokens": 0, "echo": True},
    ],
    "/v1/chat/completions": [
        {"messages": MESSAGES, **COMMON},
        {"messages": MESSAGES[-1:], "logprobs": True, "top_logprobs": 3, "stream": True},
        {"messages": MESSAGES[:2], "tools": [TOOL], "tool_choice": "required"},
        {
            "messages": MESSAGES[-1:],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
            },
            "chat_template_kwargs": {"enable_thinking": False},
            "max_completion_tokens": 3,
        },
        {
            "messages": [{"role": "assistant", "content": "go on"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ],
    "/tokenize": [{"prompt": "hello", "return_token_strs": True}, {"messages": MESSAGES}],
    "/detokenize": [{"tokens": [1, 2, 3], "model": "tiny"}],
}
REQUESTS = [(path, body) for path, bodies in BODIES.items() for body in bodies]


def assert_answered(answer: Answer) -> None:
    status, headers, body = answer
    assert status < 500, (status, body)
    assert headers["x-request-id"]
    media = headers["content-type"].partition(";")[0]
    if media == "text/event-stream":
        assert body.endswith(b"data: [DONE]\n\n")
        for event in body.split(b"\n\n")[:-2]:
            assert "error" not in json.loads(event.removeprefix(b"data: ")), event
        return
    assert media in ("application/json", "text/plain"), media
    if status >= 400:
        error = json.loads(body)["error"]
        assert error["message"] and isinstance(error["message"], str)
        assert error["type"] in ("invalid_request_error", "authentication_error")
        assert error["param"] is None or isinstance(error["param"], str)
        assert error.keys() == {"message", "type", "param", "code"}
        assert len(body) < 10_000, "an error does not send back what it is about"


def assert_quiet(gateway: Gateway) -> None:
    """Nothing is left of the request, and every invariant holds."""
    assert gateway.hub.broken_invariants() == []
    assert gateway.hub.is_quiet


def post(gateway: Gateway, runner: asyncio.Runner, path: str, body: bytes, *more: Any) -> Answer:
    headers = [(b"content-type", b"application/json"), (b"host", b"h"), *more]
    answer = runner.run(gateway.ask("POST", path, body, headers))
    runner.run(asyncio.sleep(0))
    return answer


def as_json(tree: Any) -> bytes:
    """As Python writes it: NaN, infinities and lone surrogates included."""
    return json.dumps(tree, ensure_ascii=False).encode(errors="surrogatepass")


@pytest.mark.parametrize(("path", "body"), [(p, b) for p, bs in BODIES.items() for b in bs])
def test_what_is_mutated_below_is_valid(
    gateway: Gateway, runner: asyncio.Runner, path: str, body: dict[str, Any]
) -> None:
    answer = post(gateway, runner, path, as_json(body))
    assert_answered(answer)
    assert answer[0] == 200, answer[2]
    assert_quiet(gateway)


def with_others(random: Random) -> Any:
    """What JSON can say, and what it should not."""
    return random.choice([*BEYOND, SURROGATE]) if random.randrange(6) == 0 else value(random)


@efforts(150)
def test_bodies_with_other_values(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        path, valid = random.choice(REQUESTS)
        body = as_json(mutated(random, valid, with_others))
        assert_answered(post(gateway, runner, path, body))
        assert_quiet(gateway)

    fuzz(answered)


@efforts(80)
def test_bodies_that_are_no_json(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        path, valid = random.choice(REQUESTS)
        assert_answered(post(gateway, runner, path, scrambled(random, as_json(valid))))
        assert_quiet(gateway)

    fuzz(answered)


DEEP = 100_000


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "value",
    [
        b"[" * DEEP,
        b"[" * DEEP + b"]" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b"1" + b"0" * DEEP,
        b"1e" + b"9" * DEEP,
        b"-" * DEEP,
        b"[" + b"0," * DEEP + b"0]",
        b"[" + b"{}," * DEEP + b"{}]",
        b"{" + b'"":0,' * DEEP + b'"":0}',
        b'"' + b"\\u0000" * DEEP + b'"',
        b'"\\ud800"',
        b'"\xff\xfe"',
    ],
    ids=["open", "deep list", "deep object", "digits", "exponent", "minus", "zeros", "objects",
         "keys", "NULs", "surrogate", "bytes"],
)  # fmt: skip
def test_large_deep_and_strange_values_anywhere(
    gateway: Gateway, runner: asyncio.Runner, path: str, value: bytes
) -> None:
    """As the whole body, and as the value of each field."""
    assert_answered(post(gateway, runner, path, value))
    valid = BODIES[path][0]
    names = [*valid, "response_format", "tools", "guided_json", "chat_template_kwargs", "logprobs"]
    for name in dict.fromkeys(names):
        others = {key: v for key, v in valid.items() if key != name}
        text = as_json(others)[:-1] + (b"," if others else b"") + b'"' + name.encode() + b'":'
        answer = post(gateway, runner, path, text + value + b"}")
        assert_answered(answer)
        # A list of token ids that is too long, or a text of NULs, may well be a field's value.
        assert answer[0] in (200, 400, 404 if name == "model" else 400), answer[2]
    assert_quiet(gateway)


HEADERS = [
    b"content-type", b"content-length", b"content-encoding", b"accept-encoding", b"origin",
    b"authorization", b"x-request-id", b"x-request-timeout", b"traceparent", b"host", b"accept",
]  # fmt: skip
VALUES = [
    b"", b"gzip", b"nan", b"inf", b"-1", b"1e400", b"0", b"9" * 30, b"gzip;q=x", b"*", b"\xff",
    b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01", b"a" * 10_000, b"br, deflate",
]  # fmt: skip


@efforts(80)
def test_headers(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        path, valid = random.choice(REQUESTS)
        body, headers = as_json(valid), []
        if random.randrange(4) == 0:
            body, headers = gzip.compress(body), [(b"content-encoding", b"gzip")]
        for _ in range(random.randrange(5)):
            noise = random.choice([*VALUES, random.randbytes(random.randrange(40))])
            headers.append((random.choice(HEADERS), noise))
        status, _, text = post(gateway, runner, path, body, *headers)
        # A patience of none is a request that is out of time.
        assert status < 500 or (status == 504 and b"took too long" in text), (status, text)
        assert_quiet(gateway)

    fuzz(answered)


PATHS = ["/v1/models/{}", "/workers/{}/drain", "/workers/{}/gone", "/{}", "/v1/{}", "/static/{}"]
METHODS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X"]


@efforts(80)
def test_paths_and_methods(gateway: Gateway, runner: asyncio.Runner, fuzz: Fuzz) -> None:
    def answered(random: Random) -> None:
        noise = random.randbytes(random.randrange(20)).decode("latin-1")
        where = random.choice(PATHS).format(random.choice([*TEXTS, noise]))
        method = random.choice(METHODS)
        status, headers, body = runner.run(gateway.ask(method, where, b"", [(b"host", b"h")]))
        assert status < 500, (status, body)
        if status >= 400 and method != "HEAD":
            assert json.loads(body)["error"]["message"]
        assert headers["x-request-id"]

    fuzz(answered)
