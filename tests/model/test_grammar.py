"""Grammars of outputs: real ones, compiled and followed by xgrammar in its own processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdrt.errors import RequestRefused, Unavailable
from pdrt.model.batch import Row
from pdrt.model.executor import Executor
from pdrt.model.grammar import CACHED_MAX, Grammars, OutputMatcher
from pdrt.model.grammar_processes import Server
from pdrt.model.grammar_server import Compiler
from pdrt.model.tokenizer import Tokenizer
from pdrt.sampling import Grammar, GrammarKind, Sampling
from tests.descriptors import no_more_fds
from tests.model.conftest import LoadExecutor, TinyModel
from tests.model.tiny import EOS_ID

pytest.importorskip("xgrammar", reason="the extra `grammar` is not installed")

PADDED_VOCABULARY = 411
"""Of the logits: the tiny tokenizer has fewer tokens."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
HOSTILE = {
    "endless matching": Grammar(GrammarKind.REGEX, "((a*)*)*"),
    "nested repeats": Grammar(GrammarKind.REGEX, "(a{1,1000}){1,1000}"),
    "ambiguous": Grammar(GrammarKind.EBNF, 'root ::= root root | "a" | ""'),
}
TOO_LARGE = Grammar(GrammarKind.REGEX, "." * 65_000)


def schema(value: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value))


@pytest.fixture(scope="module")
def directory(tiny_model: TinyModel) -> Path:
    return tiny_model("llama", vocab_size=PADDED_VOCABULARY)


@pytest.fixture(scope="module")
def grammars(directory: Path) -> Iterator[Grammars]:
    made = Grammars(directory, PADDED_VOCABULARY, (EOS_ID,))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def permitted(matcher: OutputMatcher, output: Sequence[int]) -> list[int]:
    """Tokens that may follow `output`, as the sampler asks for them."""
    matcher.advance(output)
    bitmask = np.zeros((2, -(-PADDED_VOCABULARY // 32)), dtype=np.int32)
    matcher.fill(bitmask, 1)
    assert not bitmask[0].any(), "the other row is somebody else's"
    bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little", count=PADDED_VOCABULARY)
    ids = bits.nonzero()[0]
    assert len(ids), "never none"
    return [int(token) for token in ids]


def walk(matcher: OutputMatcher, seed: int, length_max: int = 400) -> list[int]:
    """A random output that follows its grammar, up to the end token, which it leaves out."""
    rng = random.Random(seed)
    output: list[int] = []
    while len(output) < length_max:
        token = rng.choice(permitted(matcher, output))
        if token == EOS_ID:
            return output
        output.append(token)
    return output


def check_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 199
    assert len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"a", "b", None}


async def test_whatever_follows_a_schema_is_of_it(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for seed in range(12):
        output = walk(await grammars.matcher(schema(SCHEMA)), seed)
        check_person(tokenizer.decode(output))


async def test_a_json_object_is_any_object_and_nothing_else(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    matcher = await grammars.matcher(Grammar(GrammarKind.JSON_OBJECT, ""))
    output = tokenizer.encode('{"any": [1, {"b": null}], "c": "d"}', add_special_tokens=False)
    for index, token in enumerate(output):
        allowed = permitted(matcher, output[:index])
        assert token in allowed
        assert EOS_ID not in allowed
    assert EOS_ID in permitted(matcher, output)
    fresh = await grammars.matcher(Grammar(GrammarKind.JSON_OBJECT, ""))
    starts = {tokenizer.decode([token]).strip()[:1] for token in permitted(fresh, [])}
    assert starts <= {"{", ""}


@pytest.mark.parametrize(
    ("grammar", "texts"),
    [
        (Grammar(GrammarKind.REGEX, "[0-3]{2}(x|é)"), {"x", "é"}),
        (Grammar(GrammarKind.EBNF, 'root ::= "ab" item\nitem ::= "x" | "é"'), {"x", "é"}),
    ],
)
async def test_regex_and_ebnf(
    grammars: Grammars, tokenizer: Tokenizer, grammar: Grammar, texts: set[str]
) -> None:
    outputs = [tokenizer.decode(walk(await grammars.matcher(grammar), seed)) for seed in range(20)]
    assert {output[2:] for output in outputs} == texts


async def test_a_structural_tag_constrains_only_what_is_in_it(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    content = {"type": "json_schema", "json_schema": {"enum": [1, 2]}}
    tag = {"begin": "<f>", "content": content, "end": "</f>"}
    form = {"type": "triggered_tags", "triggers": ["<f>"], "tags": [tag]}
    text = json.dumps({"type": "structural_tag", "format": form})
    matcher = await grammars.matcher(Grammar(GrammarKind.STRUCTURAL_TAG, text))
    free = tokenizer.encode("The quick <f", add_special_tokens=False)
    assert len(permitted(matcher, free)) > 300
    inside = free + tokenizer.encode(">", add_special_tokens=False)
    assert {tokenizer.decode([token]) for token in permitted(matcher, inside)} == {"1", "2"}


async def test_special_and_padding_tokens_are_no_text(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    anything = permitted(await grammars.matcher(Grammar(GrammarKind.REGEX, "(.|\n)*")), [])
    assert tokenizer.special_ids & set(anything) == {EOS_ID}
    assert max(anything) < tokenizer.vocab_size < PADDED_VOCABULARY


async def test_after_the_end_only_the_end_may_come(grammars: Grammars) -> None:
    """So that `ignore_eos` gets end tokens up to `max_tokens`, and no text behind its grammar."""
    matcher = await grammars.matcher(Grammar(GrammarKind.REGEX, "[0-9]{1,5}"))
    (digit, *_) = permitted(matcher, [])
    assert EOS_ID in permitted(matcher, [digit])
    assert permitted(matcher, [digit, EOS_ID]) == [EOS_ID]
    assert permitted(matcher, [digit, EOS_ID, EOS_ID]) == [EOS_ID]


async def test_a_stop_token_that_nobody_stopped_at_ends_the_grammar(grammars: Grammars) -> None:
    matcher = await grammars.matcher(Grammar(GrammarKind.REGEX, "[0-9]"))
    (digit, *_) = permitted(matcher, [])
    assert permitted(matcher, [digit, 0]) == [EOS_ID]


async def test_a_resumed_request_has_the_same_masks(grammars: Grammars) -> None:
    whole = await grammars.matcher(schema(SCHEMA))
    output = walk(whole, seed=5)
    again = await grammars.matcher(schema(SCHEMA))
    for length in range(len(output) + 1):
        resumed = await grammars.matcher(schema(SCHEMA))
        assert permitted(resumed, output[:length]) == permitted(again, output[:length])


async def test_outputs_of_one_grammar_do_not_meet(grammars: Grammars) -> None:
    grammar = Grammar(GrammarKind.EBNF, 'root ::= "a" "b" | "c" "d"')
    first, second = [await grammars.matcher(grammar) for _ in range(2)]
    a, c = permitted(first, [])[0], permitted(second, [])[-1]
    first.advance([a])
    second.advance([c])
    after_a = permitted(first, [a])
    assert after_a != permitted(second, [c])
    assert permitted(first, [a]) == after_a


async def test_those_who_ask_at_once_share_one_compile(grammars: Grammars) -> None:
    grammar = Grammar(GrammarKind.REGEX, "shared|compile")
    waiting = [asyncio.ensure_future(grammars.matcher(grammar)) for _ in range(5)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    matchers = await asyncio.gather(*waiting[1:])
    assert len({id(matcher._process) for matcher in matchers}) == 1
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]


async def test_what_nobody_waits_for_any_more_is_not_compiled(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []
    compile_it = Server.compile

    def compile_and_note(server: Server, grammar: Grammar) -> Any:
        compiled.append(grammar.text)
        return compile_it(server, grammar)

    monkeypatch.setattr(Server, "compile", compile_and_note)
    gone = [Grammar(GrammarKind.REGEX, f"gone{index}") for index in range(20)]
    leaving = [asyncio.ensure_future(grammars.matcher(g, lambda: False)) for g in gone]
    shared = [asyncio.ensure_future(grammars.matcher(gone[-1])), *leaving]
    *refused, _ = await asyncio.gather(*reversed(shared), return_exceptions=True)
    assert {str(error) for error in refused if isinstance(error, RequestRefused)} == {
        "the request is over"
    }
    assert compiled == [gone[-1].text]
    await grammars.matcher(gone[0])
    assert compiled == [gone[-1].text, gone[0].text]


async def test_what_is_kept_is_bounded_and_running_outputs_keep_theirs(grammars: Grammars) -> None:
    first = await grammars.matcher(Grammar(GrammarKind.REGEX, "first[0-9]"))
    for index in range(CACHED_MAX + 1):
        await grammars.matcher(Grammar(GrammarKind.REGEX, f"x{index}"))
    assert len(grammars._compiled) == CACHED_MAX
    assert Grammar(GrammarKind.REGEX, "first[0-9]") not in grammars._compiled
    walk(first, seed=1)
    assert first.failure is None


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(GrammarKind.REGEX, "(a"), "parenthesis is not closed"),
        (Grammar(GrammarKind.EBNF, 'x ::= "a"'), "root"),
        (Grammar(GrammarKind.EBNF, "root ::= root"), "no output can satisfy it"),
        (Grammar(GrammarKind.STRUCTURAL_TAG, "{}"), "tag"),
        (schema({"$ref": "#/$defs/absent"}), "defs"),
        (schema({"type": "string", "minLength": 9, "maxLength": 2}), "minLength"),
        (schema({"type": 5}), "Type should be"),
    ],
)
async def test_broken_grammars_are_refused_in_words(
    grammars: Grammars, grammar: Grammar, reason: str
) -> None:
    for _ in range(2):  # the second time from memory
        with pytest.raises(RequestRefused, match=reason) as caught:
            await grammars.matcher(grammar)
        assert "/project/" not in str(caught.value), "a path of somebody's build machine"


async def test_what_takes_too_much_to_compile_is_refused(grammars: Grammars) -> None:
    with pytest.raises(RequestRefused, match="too much time or memory"):
        await grammars.matcher(TOO_LARGE)
    walk(await grammars.matcher(schema(SCHEMA)), seed=1)


@pytest.mark.parametrize("name", HOSTILE)
async def test_a_grammar_that_cannot_be_matched_ends_its_output_and_no_other(
    grammars: Grammars, name: str
) -> None:
    other = await grammars.matcher(schema(SCHEMA))
    hostile = await grammars.matcher(HOSTILE[name])
    output: list[int] = []
    while hostile.failure is None:
        output.append(next(token for token in permitted(hostile, output) if token != EOS_ID))
        assert len(output) < 5000, "it can be matched after all: find another"
        if hostile.failure is None and permitted(hostile, output) == [EOS_ID]:
            break
    assert hostile.failure is not None
    assert permitted(hostile, output) == [EOS_ID]
    walk(other, seed=2)
    assert other.failure is None
    await grammars.matcher(HOSTILE[name])  # and the next one begins afresh


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def oom_score_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def test_processes_that_are_killed(directory: Path) -> None:
    """Matchers permit only the end; the next request has all anew."""
    grammars = Grammars(directory, PADDED_VOCABULARY, (EOS_ID,))
    try:
        matcher = await grammars.matcher(Grammar(GrammarKind.REGEX, "ab*"))
        assert grammars._server is not None
        server = grammars._server.result()
        (child,) = children(server._process.pid)
        assert oom_score_of(child) == 1000
        os.kill(child, signal.SIGKILL)
        os.kill(server._process.pid, signal.SIGKILL)
        assert permitted(matcher, []) == [EOS_ID]
        assert matcher.failure is not None
        again = await grammars.matcher(Grammar(GrammarKind.REGEX, "ab*"))
        assert permitted(again, []) != [EOS_ID]
        last = grammars._server.result()._process
    finally:
        grammars.close()
    assert last.returncode is not None
    assert permitted(again, []) == [EOS_ID]


async def test_too_few_descriptors_say_nothing_about_a_grammar(directory: Path) -> None:
    """Neither for the server nor for a grammar's socket: told so, and had as soon as there are."""
    grammars = Grammars(directory, PADDED_VOCABULARY, (EOS_ID,))
    wanted = [Grammar(GrammarKind.REGEX, text) for text in ("ab*", "ba*")]
    try:
        for grammar in wanted:
            with no_more_fds(), pytest.raises(Unavailable, match="Too many open files"):
                await grammars.matcher(grammar)
            assert permitted(await grammars.matcher(grammar), []) != [EOS_ID]
    finally:
        grammars.close()


async def test_a_server_that_dies_while_it_starts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next grammar starts another."""
    grammars = Grammars(directory, PADDED_VOCABULARY, (EOS_ID,))
    start = Server._start

    def start_and_kill(server: Server, options: Any) -> None:
        start(server, options)
        server._process.kill()

    try:
        monkeypatch.setattr(Server, "_start", start_and_kill)
        with pytest.raises(Unavailable):
            await grammars.matcher(Grammar(GrammarKind.REGEX, "ab*"))
        monkeypatch.undo()
        assert permitted(await grammars.matcher(Grammar(GrammarKind.REGEX, "ab*")), []) != [EOS_ID]
    finally:
        grammars.close()


def test_without_xgrammar(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(RequestRefused, match=r"pip install 'pdrt\[grammar\]'.*--no-deps"):
        Compiler(directory, PADDED_VOCABULARY, (EOS_ID,))


async def test_a_model_without_an_end_has_no_grammars(directory: Path) -> None:
    grammars = Grammars(directory, PADDED_VOCABULARY, ())
    try:
        with pytest.raises(RequestRefused, match="names no end token"):
            await grammars.matcher(Grammar(GrammarKind.JSON_OBJECT, ""))
    finally:
        grammars.close()


# Through the executor


def generate(executor: Executor, matchers: Sequence[OutputMatcher], grammar: Grammar,
             samplings: Sequence[Sampling]) -> list[list[int]]:  # fmt: skip
    """Outputs up to their end tokens, all in one batch."""
    prompt = [7, 8, 9]
    outputs: list[list[int]] = [[] for _ in samplings]
    running = set(range(len(samplings)))
    while running:
        order = sorted(running)
        rows = []
        for index in order:
            tokens = prompt + outputs[index]
            start = len(tokens) - 1 if outputs[index] else 0
            rows.append(
                Row(token_ids=tokens[start:], start=start,
                    pages=range(index * 32, index * 32 + 32),
                    sampling=samplings[index], output_tokens=len(outputs[index]),
                    history=tokens, matcher=matchers[index])
            )  # fmt: skip
        for index, token in zip(order, executor.step_blocking(rows).tokens, strict=True):
            assert token is not None
            if token == EOS_ID:
                running.remove(index)
            else:
                outputs[index].append(token)
    return outputs


async def test_a_random_model_gives_valid_json(
    directory: Path, grammars: Grammars, load_executor: LoadExecutor, tokenizer: Tokenizer
) -> None:
    executor = load_executor(directory)
    # As the executor's own, whose server would only have to be started.
    assert executor.grammars._options == grammars._options
    grammar = schema(SCHEMA)
    samplings = [
        Sampling(max_tokens=400, temperature=float(seed % 3), seed=seed, grammar=grammar,
                 frequency_penalty=0.5 * (seed % 2))
        for seed in range(5)
    ]  # fmt: skip
    matchers = [await grammars.matcher(grammar) for _ in samplings]
    together = generate(executor, matchers, grammar, samplings)
    for output in together:
        check_person(tokenizer.decode(output))
    alone = generate(executor, [await grammars.matcher(grammar)], grammar, samplings[4:])
    assert alone == together[4:]
