"""The tables are the whole truth: an event that is not listed raises and changes nothing."""

from __future__ import annotations

import itertools
from copy import deepcopy
from enum import Enum
from typing import Any

import pytest

from pdrt.ids import RoomId
from pdrt.protocol import leases, room_writer, rooms
from pdrt.protocol.leases import LeaseEvent, LeaseState
from pdrt.protocol.messages import Reason
from pdrt.protocol.room_writer import RoomWriter, WriteOutcome, WriterEvent, WriterState
from pdrt.protocol.rooms import RoomEvent, RoomState
from tests.protocol.traces import DECODE, Decode, Prefill

Pair = tuple[Enum, Enum]
FINAL: dict[type[Enum], set[Enum]] = {
    LeaseState: {LeaseState.READY, LeaseState.FREED},
    RoomState: {RoomState.GONE},
    WriterState: {WriterState.GONE},
}


def lease_machine(state: LeaseState) -> tuple[Any, Any]:
    decode = Decode()
    decode.pair()
    lease = decode.table.leases[decode.grant([1, 2])]
    lease.state = state
    return lease, lambda event: decode.table._enter(lease, event)


def room_machine(state: RoomState) -> tuple[Any, Any]:
    prefill = Prefill()
    prefill.pair()
    record = prefill.table.rooms[prefill.grant()]
    record.state = state
    return record, lambda event: prefill.table._enter(record, event)


def writer_machine(state: WriterState) -> tuple[Any, Any]:
    writer = RoomWriter(RoomId(DECODE, 1), {0: 4}, (1, 2), 0)
    writer.state = state
    return writer, writer._enter


MACHINES = [
    (leases.TRANSITIONS, LeaseState, LeaseEvent, lease_machine),
    (rooms.TRANSITIONS, RoomState, RoomEvent, room_machine),
    (room_writer.TRANSITIONS, WriterState, WriterEvent, writer_machine),
]
PAIRS = [
    pytest.param(table, machine, state, event, id=f"{state}-{event}")
    for table, states, events, machine in MACHINES
    for state, event in itertools.product(states, events)
]


@pytest.mark.parametrize(("table", "machine", "state", "event"), PAIRS)
def test_listed_events_move_and_unlisted_ones_raise_and_change_nothing(
    table: dict[Pair, Enum], machine: Any, state: Enum, event: Enum
) -> None:
    record, enter = machine(state)
    before = deepcopy(vars(record))
    if (state, event) in table:
        enter(event)
        before["state"] = table[state, event]
    else:
        with pytest.raises(AssertionError):
            enter(event)
    assert vars(record) == before


@pytest.mark.parametrize(("table", "states", "events", "machine"), MACHINES)
def test_what_is_gone_stays_gone_and_everything_else_is_reachable(
    table: dict[Pair, Enum], states: type[Enum], events: type[Enum], machine: Any
) -> None:
    final = FINAL[states]
    assert {state for state, _ in table} == set(states) - final
    assert final <= set(table.values())
    assert {event for _, event in table} == set(events)


def gone_writer() -> RoomWriter:
    writer = RoomWriter(RoomId(DECODE, 1), {0: 4}, (1, 2), 0)
    writer.close(Reason.CLIENT_GONE)
    assert writer.state is WriterState.GONE
    return writer


@pytest.mark.parametrize(
    "event",
    [
        lambda writer: writer.forward_started(),
        lambda writer: writer.forward_ended(),
        lambda writer: writer.pages_finished([1, 2], 2),
        lambda writer: writer.finished(),
        lambda writer: writer.settled(1, WriteOutcome.COMPLETED),
        lambda writer: writer.close(Reason.DEADLINE),
    ],
)
def test_every_event_after_the_report_raises_and_changes_nothing(event: Any) -> None:
    writer = gone_writer()
    before = deepcopy(vars(writer))
    with pytest.raises(AssertionError):
        event(writer)
    assert vars(writer) == before
