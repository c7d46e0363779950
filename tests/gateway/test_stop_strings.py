"""Stop strings: however a text is cut, what is let through is what a search of it all finds."""

from __future__ import annotations

from typing import Any, SupportsIndex

from hypothesis import given
from hypothesis import strategies as st

from pdrt.gateway.stop import StopMatcher

TEXT = st.text(alphabet="ab🙂", max_size=30)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, bool]:
    """Character by character: the first end of any stop string, the longest one there."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(TEXT, max_size=10), STOPS)
def test_agrees_with_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.stopped:
            break
    else:
        shown += matcher.finish()
    assert (shown, matcher.stopped) == naive("".join(pieces), stops)


@given(st.lists(TEXT, max_size=10), STOPS)
def test_shows_at_once_all_that_cannot_become_a_stop_string(
    pieces: list[str], stops: list[str]
) -> None:
    matcher = StopMatcher(stops)
    seen = shown = ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.stopped:
            return
        held = seen[len(shown) :]
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    matcher = StopMatcher(["abcdef", "cd"])
    assert matcher.push("abc") == ""
    assert matcher.push("de") == "ab"
    assert matcher.stopped


def test_held_text_comes_at_the_end() -> None:
    matcher = StopMatcher(["<end>"])
    assert matcher.push("x<en") == "x"
    assert matcher.finish() == "<en"
    assert matcher.finish() == ""


class Counted(str):
    """Counts how often it is looked into."""

    looks = 0

    def __getitem__(self, key: SupportsIndex | slice[Any, Any, Any]) -> str:
        Counted.looks += 1
        return super().__getitem__(key)


def test_a_character_costs_a_few_steps_whatever_is_held() -> None:
    nearly = [Counted("a" * 20 + "b" + "a" * (900 + i)) for i in range(8)]
    matcher = StopMatcher([*nearly, "a" * 1000 + "z"])
    Counted.looks = 0
    for _ in range(900):
        assert matcher.push("a") == ""
    assert Counted.looks < 8 * 900 * 5
