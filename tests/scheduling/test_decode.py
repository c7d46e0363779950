"""Requests on a decode worker: admission, growth, preemption, pauses, ends."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdrt.protocol.gateway_messages import FinishReason
from pdrt.scheduling.decode_request import DecodeRequest, End, RequestState
from pdrt.scheduling.step_plan import PagesWanted
from tests.scheduling.driver import EOS, LIMIT, Decode, preempted
from tests.scheduling.grants import room, submit

# Admission


def test_first_come_first_served() -> None:
    decode = Decode(seqs=2)
    requests = [decode.submit(serial) for serial in (1, 2, 3)]
    assert decode.admit() is requests[0]
    assert decode.admit() is requests[1]
    assert decode.scheduler.head() is None, "two places are taken"
    decode.scheduler.requeue(requests[0], 0.0)
    assert decode.scheduler.head() is requests[0], "it goes on before all others"


@pytest.mark.parametrize(
    ("length", "max_tokens", "wanted"),
    [
        (5, 0, (0, 0)),
        (5, 1, (0, 0)),
        (3, 2, (1, 1)),
        (4, 2, (1, 2)),
        (5, 2, (2, 2)),
        (7, 9, (2, 2)),
        (8, 9, (2, 3)),
    ],
)
def test_pages_for_the_prompt_and_one_token(
    length: int, max_tokens: int, wanted: tuple[int, int]
) -> None:
    decode = Decode()
    request = decode.submit(1, length, max_tokens=max_tokens)
    assert decode.scheduler.pages_wanted(request) == PagesWanted(*wanted)


def test_output_so_far_is_part_of_the_prompt() -> None:
    decode = Decode()
    request = decode.submit(1, 5, output=[7, 8, 9], max_tokens=5)
    assert request.output_tokens == 3
    assert decode.scheduler.pages_wanted(request) == PagesWanted(2, 3)
    last = decode.submit(2, 5, output=[7, 8, 9, 9], max_tokens=5)
    assert decode.scheduler.pages_wanted(last) == PagesWanted(0, 0), "prefill samples it"


def test_twice_is_our_bug() -> None:
    decode = Decode()
    decode.submit(1)
    with pytest.raises(AssertionError):
        decode.submit(1)


def test_out_of_turn_is_our_bug() -> None:
    decode = Decode()
    first, second = decode.submit(1), decode.submit(2)
    with pytest.raises(AssertionError):
        decode.scheduler.admitted(second, room(1), 0.0)
    decode.admit()
    with pytest.raises(AssertionError):
        decode.scheduler.ready(first, (), 4, 0.0)  # fewer pages than tokens
    with pytest.raises(AssertionError):
        decode.scheduler.ready(first, (1, 2), 3, 0.0)  # a token without KV
    with pytest.raises(AssertionError):
        decode.scheduler.ready(second, (1, 2), 4, 0.0)
    decode.check()


# Growth and preemption


def test_a_sequence_grows_page_by_page() -> None:
    decode = Decode()
    request = decode.run(1, length=5)
    sizes = []
    for _ in range(8):
        assert decode.plan() == [1]
        sizes.append(len(request.pages))
        decode.finish_step()
    # Positions 5 … 12: the third page comes with position 8, the fourth with position 12.
    assert sizes == [2, 2, 2, 3, 3, 3, 3, 4]


def test_the_youngest_gives_way() -> None:
    decode = Decode(pages=6)
    decode.run(1, length=7)
    decode.run(2, length=7)
    third = decode.run(3, length=6)
    assert decode.plan() == [1, 2, 3]
    decode.finish_step()
    assert decode.plan() == [1, 2]
    assert preempted(decode) == [3]
    assert third.state is RequestState.QUEUED
    assert (third.pages, third.computed) == ((), 0)
    assert len(third.tokens) == 8, "what it has said, it has said"
    assert decode.scheduler.head() is third


def test_the_youngest_gives_way_to_itself() -> None:
    decode = Decode(pages=2)
    decode.run(1, length=7)
    decode.plan()
    decode.finish_step()
    assert decode.plan() == []
    assert preempted(decode) == [1]
    assert decode.kv.available == 2


def test_several_give_way_and_come_back_oldest_first() -> None:
    decode = Decode(pages=6)
    for serial in (1, 2, 3):
        decode.run(serial, length=7)
    decode.plan()
    decode.finish_step()
    # 1 needs a page and takes 3's; 2 takes the other.
    assert decode.plan() == [1, 2]
    assert preempted(decode) == [3]
    for _ in range(4):
        decode.finish_step()
        decode.plan()
    assert decode.scheduler.running == 1
    assert [r.serial for r in decode.scheduler._queue] == [2, 3]


def test_age_is_that_of_arrival_not_of_joining() -> None:
    """One that was preempted and came back is as old as it was."""
    decode = Decode(pages=9, seqs=3)
    first, second = decode.submit(1, 7), decode.submit(2, 7)
    for request in (first, second):
        assert decode.admit() is request
    for request in (second, first):
        decode.first_token(request)
        decode.ready(request)
    decode.run(3, 7)
    assert decode.plan() == [1, 2, 3]
    decode.finish_step()
    decode.occupy(decode.kv.available)
    decode.plan()
    assert preempted(decode) == [3]


# Credit


def test_pause_and_resume() -> None:
    decode = Decode(unread=3)
    request = decode.run(1)
    for _ in range(2):
        decode.plan()
        decode.finish_step()
    assert request.output_tokens == 3
    assert decode.plan() == []
    request.tokens_taken = 1
    assert decode.plan() == [1]
    decode.finish_step()
    assert decode.plan() == []


def test_an_attempt_begins_with_its_credit() -> None:
    decode = Decode(unread=2)
    request = decode.submit(1, 5, output=[7] * 9)
    decode.admit()
    decode.first_token(request)
    decode.ready(request)
    assert decode.plan() == [1], "what earlier attempts streamed has been taken"


def test_one_that_pauses_can_be_preempted() -> None:
    decode = Decode(pages=4, unread=2)
    first = decode.run(1, length=7)
    first.tokens_taken = 100
    second = decode.run(2, length=7)
    for _ in range(2):
        decode.plan()
        decode.finish_step()
    assert second.output_tokens == 2 or second.state is RequestState.QUEUED
    decode.plan()
    assert second.state is RequestState.QUEUED
    assert decode.step is not None
    assert decode.step.sequences == (first,)


# Ends


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens(max_tokens: int) -> None:
    decode = Decode()
    request = decode.submit(1, max_tokens=max_tokens)
    decode.admit()
    ends = [decode.first_token(request)]
    while ends[-1] is None:
        ends.append(decode.take_token(request))
    assert ends == [None] * (max_tokens - 1) + [FinishReason.LENGTH]


def test_nothing_is_wanted_after_the_last_token() -> None:
    decode = Decode()
    assert not decode.scheduler.wants_token(decode.submit(1, max_tokens=0))
    assert decode.scheduler.wants_token(decode.submit(2, max_tokens=1))
    assert not decode.scheduler.wants_token(decode.submit(3, output=[5, 6], max_tokens=2))


@pytest.mark.parametrize(
    ("sampling", "token", "reason"),
    [
        ({}, EOS, FinishReason.STOP),
        ({"ignore_eos": True}, EOS, None),
        ({"stop_token_ids": (9,)}, 9, FinishReason.STOP),
        ({"stop_token_ids": (9,), "ignore_eos": True}, 9, FinishReason.STOP),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, FinishReason.STOP),
        ({"min_tokens": 1}, EOS, None),
        ({"min_tokens": 1, "stop_token_ids": (9,)}, 9, None),
        ({}, 9, None),
        # The last one, and a stop: it stopped.
        ({"max_tokens": 1}, EOS, FinishReason.STOP),
        ({"max_tokens": 1, "ignore_eos": True}, EOS, FinishReason.LENGTH),
        ({"max_tokens": 1, "min_tokens": 1}, EOS, FinishReason.LENGTH),
    ],
)
def test_how_a_token_ends_it(
    sampling: dict[str, object], token: int, reason: FinishReason | None
) -> None:
    decode = Decode()
    request = decode.submit(1, **sampling)
    decode.admit()
    assert decode.take_token(request, token) is reason


def test_min_tokens_is_over_after_so_many() -> None:
    decode = Decode()
    request = decode.submit(1, min_tokens=2)
    decode.admit()
    assert decode.take_token(request, EOS) is None
    assert decode.take_token(request, EOS) is None
    assert decode.take_token(request, EOS) is FinishReason.STOP


def test_min_tokens_counts_earlier_attempts() -> None:
    decode = Decode()
    request = decode.submit(1, output=[5, 6], min_tokens=2)
    decode.admit()
    assert decode.take_token(request, EOS) is FinishReason.STOP


def test_the_models_limit() -> None:
    decode = Decode()
    request = decode.submit(1, LIMIT - 2)
    decode.admit()
    assert decode.take_token(request) is None
    assert decode.take_token(request) is FinishReason.LENGTH


def test_what_waits_for_this_worker_and_what_for_others() -> None:
    """Its liveness is judged by the former only."""
    decode = Decode(unread=2)

    def waiting() -> tuple[int, int]:
        scheduler = decode.scheduler
        return scheduler.waiting(may_admit=True), scheduler.waiting(may_admit=False)

    assert waiting() == (0, 0)
    first, _ = decode.submit(1), decode.submit(2)
    assert waiting() == (2, 0), "a queue that nobody may be admitted from waits for others"
    decode.admit()
    assert waiting() == (0, 0), "a room waits for its writer, and the queue perhaps for its pages"
    decode.first_token(first)
    decode.ready(first)
    assert waiting() == (2, 1), "the next step takes it along"
    decode.take_token(first)
    assert waiting() == (1, 0), "its client does not read"
    first.tokens_taken = 2
    assert waiting() == (2, 1)


def test_overdue() -> None:
    decode = Decode()
    late = decode.scheduler.submit(submit(1, seconds_max=5.0), 10.0)
    decode.scheduler.submit(submit(2, seconds_max=6.0), 10.0)
    assert decode.scheduler.overdue(14.9) == []
    assert decode.scheduler.overdue(15.0) == [late]


def test_phases_add_up() -> None:
    decode = Decode()
    request = decode.submit(1)
    for now, event in [
        (1.0, decode.admit),
        (3.0, lambda: decode.first_token(request)),
        (6.0, lambda: decode.ready(request)),
    ]:
        decode.now = now
        event()
    assert request.timings == {"queued": 1.0, "prefill": 2.0, "transfer": 3.0}
    decode.now = 10.0
    decode.kv.give_back(request)
    decode.scheduler.requeue(request, decode.now)
    assert request.timings["decode"] == 4.0
    decode.now = 15.0
    decode.admit()
    assert request.timings["queued"] == 6.0
    assert sum(request.timings.values()) == 15.0


def test_removed_in_a_step_is_our_bug() -> None:
    decode = Decode()
    request = decode.run(1)
    decode.plan()
    with pytest.raises(AssertionError):
        decode.scheduler.remove(request)
    decode.check()


class DecodeMachine(RuleBasedStateMachine):
    """Any order of what can happen to requests; pages are whole after each event."""

    @initialize(
        pages=st.integers(16, 30),
        seqs=st.integers(1, 5),
        unread=st.integers(1, 8),
        is_caching=st.booleans(),
    )
    def start(self, pages: int, seqs: int, unread: int, is_caching: bool) -> None:
        self.decode = Decode(pages, seqs, unread, is_caching)
        self.during: dict[DecodeRequest, tuple[int, ...]] = {}
        """Pages of each sequence of the step that runs, as it began."""
        self.serial = 0
        self.draining: list[int] = []
        """Leases whose request has gone on or ended."""
        self.told: set[int] = set()
        """Rooms that have given their first token."""

    def some(self, data: st.DataObject, state: RequestState) -> DecodeRequest | None:
        found = [r for r in self.decode.scheduler.requests.values() if r.state is state]
        return data.draw(st.sampled_from(found)) if found else None

    @rule(
        length=st.integers(1, LIMIT - 20),
        output=st.integers(0, 10),
        max_tokens=st.integers(0, 40),
        like=st.integers(1, 3),
    )
    def submit(self, length: int, output: int, max_tokens: int, like: int) -> None:
        self.serial += 1
        self.decode.like = like
        self.decode.submit(self.serial, length, [7] * output, max_tokens=max_tokens)

    @rule()
    def admit(self) -> None:
        self.decode.admit()

    @rule()
    def begin_here(self) -> None:
        self.decode.begin_here()

    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        request = self.some(data, RequestState.PREFILLING)
        if request is None or not self.decode.scheduler.wants_token(request):
            return
        assert request.room is not None
        if request.room.serial not in self.told:
            self.told.add(request.room.serial)
            if self.decode.first_token(request) is not None:
                self.end(request)

    @rule(data=st.data())
    def ready(self, data: st.DataObject) -> None:
        request = self.some(data, RequestState.PREFILLING)
        if request is None:
            return
        assert request.room is not None
        if request.room.serial in self.told:
            self.decode.ready(request)
        elif not self.decode.scheduler.wants_token(request):
            self.end(request)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        request = self.some(data, RequestState.PREFILLING)
        if request is not None and request.room is not None:
            self.draining.append(request.room.serial)
            self.decode.fail(request)

    @precondition(lambda self: self.draining)
    @rule()
    def drain(self) -> None:
        self.decode.end_lease(self.draining.pop(0))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """Plan, grow ahead while it runs, and end it, well or badly."""
        decode = self.decode
        if decode.step is None:
            decode.plan()
            assert decode.step is not None
            self.during = {r: r.pages for r in decode.step.sequences}
            return
        match data.draw(st.sampled_from(["ahead", "end", "end", "end", "failure"])):
            case "ahead":
                decode.grow_ahead()
            case "end":
                decode.finish_step()
            case "failure":
                decode.fail_step()

    @invariant()
    def pages_of_a_step_stay(self) -> None:
        if hasattr(self, "decode") and self.decode.step is not None:
            for request, pages in self.during.items():
                assert request.is_in_step
                assert request.pages[: len(pages)] == pages

    @rule(data=st.data(), taken=st.integers(0, 40))
    def credit(self, data: st.DataObject, taken: int) -> None:
        request = self.some(data, RequestState.RUNNING)
        if request is not None:
            request.tokens_taken = max(request.tokens_taken, taken)

    @rule(data=st.data(), state=st.sampled_from(RequestState))
    def cancel(self, data: st.DataObject, state: RequestState) -> None:
        request = self.some(data, state)
        if request is None:
            return
        if request.is_in_step:
            request.ended = End(FinishReason.CANCELLED)
        else:
            self.end(request)

    def end(self, request: DecodeRequest) -> None:
        if request.room is not None:
            self.draining.append(request.room.serial)
        self.decode.remove(request)

    @invariant()
    def whole(self) -> None:
        if hasattr(self, "decode"):
            self.decode.check()
            scheduler = self.decode.scheduler
            assert scheduler.running <= scheduler._limits.sequences
            rooms = {r.room.serial for r in scheduler.requests.values() if r.room}
            assert rooms | set(self.draining) == self.decode.leases.keys()

    def teardown(self) -> None:
        if not hasattr(self, "decode"):
            return
        if self.decode.step is not None:
            self.decode.finish_step()
        for request in list(self.decode.scheduler.requests.values()):
            self.end(request)
        while self.draining:
            self.drain()
        self.decode.check()
        assert self.decode.kv.available == self.decode.pages.total


TestDecodeMachine = DecodeMachine.TestCase
TestDecodeMachine.settings = settings(max_examples=80, stateful_step_count=50)
