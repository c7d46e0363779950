"""Events whose surroundings are encoded once are those that are encoded whole, to the byte."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from pdrt.gateway.chat_format import ChatEvents
from pdrt.gateway.logprobs import TokenNames
from pdrt.gateway.responses import ChunkUsage, Head, Piece, PromptShown, Usage, event
from pdrt.gateway.schema.answers import ChatChunk, ChatChunkChoice, ChatDelta
from pdrt.gateway.schema.generation import Shown

# JSON knows no half of a surrogate pair; no tokenizer yields one.
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
NAMES = st.one_of(TEXTS, st.sampled_from(['"content":""', '\\"content":""', "\\"]))
USAGES = st.one_of(
    st.just(UNSET),
    st.none(),
    st.builds(Usage, st.integers(0, 9), st.integers(0, 9), st.just(0)).map(Usage.body),
)


@settings(max_examples=200, deadline=None)
@given(model=NAMES, pieces=st.lists(st.tuples(TEXTS, USAGES), max_size=5))
def test_they_are_the_same_to_the_byte(model: str, pieces: list[tuple[str, ChunkUsage]]) -> None:
    head = Head("chatcmpl-1", 1_790_000_000, model, is_chat=True)
    events = ChatEvents(head, 3, Shown(), TokenNames(lambda token: b""), None)
    events.begin(PromptShown())
    events.push(Piece("first"), UNSET)
    for text, usage in pieces:
        choice = ChatChunkChoice(3, ChatDelta(content=text))
        whole = ChatChunk(
            "chatcmpl-1", "chat.completion.chunk", 1_790_000_000, model, [choice], usage
        )
        pushed = events.push(Piece(text), usage)
        assert pushed == event(whole)
        assert msgspec.json.decode(pushed[6:])["choices"][0]["delta"] == {"content": text}
