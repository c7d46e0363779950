"""What was sent where: prefixes, bounds, trust."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdrt.gateway.prefix_index import KEYS_PER_PROMPT_MAX, PrefixIndex, Prompt
from pdrt.ids import Incarnation
from pdrt.kv.prefix import page_keys

A, B = Incarnation(1), Incarnation(2)
PAGE = 4
POOL = 1000


def keys(*pages: int) -> list:
    """Of a prompt whose pages are filled with these numbers."""
    return page_keys([number for number in pages for _ in range(PAGE)], PAGE)


def test_the_longest_prefix_that_was_sent_there() -> None:
    index = PrefixIndex()
    index.record(A, keys(1, 2, 3), POOL)
    assert index.pages(A, keys(1, 2, 3, 4)) == 3
    assert index.pages(A, keys(1, 2, 9)) == 2
    assert index.pages(A, keys(2, 3)) == index.pages(A, []) == 0
    assert index.pages(B, keys(1, 2, 3)) == 0


def test_the_least_recently_used_is_forgotten_first_and_of_a_prefix_the_end() -> None:
    index = PrefixIndex()
    index.record(A, keys(1, 2, 3), 4)
    index.record(A, keys(7, 8), 4)
    assert (index.pages(A, keys(1, 2, 3)), index.pages(A, keys(7, 8))) == (2, 2)
    index.record(A, keys(1, 2), 4)
    index.record(A, keys(9), 4)
    assert (index.pages(A, keys(1, 2, 3)), index.pages(A, keys(7, 8))) == (2, 1)
    index.record(A, keys(1, 2, 3, 4, 5, 6), 4)
    assert index.pages(A, keys(1, 2, 3, 4, 5, 6)) == 4
    index.check_invariants()


def test_a_worker_that_is_forgotten_knows_nothing() -> None:
    index = PrefixIndex()
    index.record(A, keys(1), POOL)
    index.found(A, 4, 0)
    index.forget(A)
    index.forget(A)
    assert index.pages(A, keys(1)) == len(index) == 0 and index.trust(A) == 1.0


def test_workers_share_the_bound() -> None:
    index = PrefixIndex(keys_max=10)
    index.record(A, keys(*range(20)), POOL)
    assert index.pages(A, keys(*range(20))) == 10
    index.record(B, keys(*range(20)), POOL)
    assert index.pages(A, keys(*range(20))) == index.pages(B, keys(*range(20))) == 5
    for worker in range(3, 30):  # more workers than keys
        index.record(Incarnation(worker), keys(1, 2), POOL)
        index.check_invariants()


def test_trust_follows_what_is_found() -> None:
    index = PrefixIndex()
    index.found(A, 4, 0)  # nothing was ever sent there
    index.record(A, keys(1), POOL)
    index.found(A, 0, 0)  # nothing was expected
    assert index.trust(A) == 1.0
    index.found(A, 4, 9)
    assert index.trust(A) == 1.0
    for _ in range(100):
        index.found(A, 4, 1)
    assert index.trust(A) == pytest.approx(0.25, abs=0.01)
    index.found(A, 4, 4)
    assert index.trust(A) > 0.3


def test_a_prompts_keys_are_those_of_its_pages_but_for_the_last_token() -> None:
    prompt = Prompt(range(2 * PAGE), "salt")
    assert prompt.keys(PAGE) == tuple(page_keys(range(PAGE), PAGE, "salt"))
    assert prompt.keys(PAGE) is prompt.keys(PAGE)
    assert Prompt(range(2 * PAGE + 1), "salt").keys(PAGE)[:1] == prompt.keys(PAGE)
    assert Prompt(range(2 * PAGE), "other").keys(PAGE) != prompt.keys(PAGE)
    assert len(prompt.keys(1)) == 2 * PAGE - 1
    assert Prompt(range(2 * PAGE), "", may_reuse=False).keys(PAGE) == ()


def test_of_an_endless_prompt_a_bounded_part_is_looked_at() -> None:
    assert len(Prompt([7] * (KEYS_PER_PROMPT_MAX + 100), "").keys(1)) == KEYS_PER_PROMPT_MAX


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("record", "forget", "found")),
        st.integers(1, 4),
        st.lists(st.integers(0, 2), max_size=12),
        st.integers(0, 12),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 20))
def test_bounds_hold_and_nothing_is_made_up(steps: list, keys_max: int) -> None:
    """Against a model that never forgets a prefix but with its worker."""
    index = PrefixIndex(keys_max)
    sent: dict[Incarnation, set] = {}
    for kind, number, pages, pool in steps:
        worker = Incarnation(number)
        match kind:
            case "record":
                index.record(worker, keys(*pages), pool)
                sent.setdefault(worker, set()).update(keys(*pages))
            case "forget":
                index.forget(worker)
                sent.pop(worker, None)
            case "found":
                index.found(worker, len(pages), pool)
        index.check_invariants()
        known = index.pages(worker, keys(*pages))
        assert set(keys(*pages)[:known]) <= sent.get(worker, set())
