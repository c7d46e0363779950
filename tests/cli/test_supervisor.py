"""Traces of the supervisor: what happened and when, what it did about it. No process runs."""

from __future__ import annotations

import signal

import pytest

from pdrt.cli.supervisor import (
    ASLEEP_SECONDS,
    LAST_CHANCE_SECONDS,
    PAUSE_SECONDS_MAX,
    STEADY_SECONDS,
    ChildState,
    Finish,
    Phase,
    Say,
    Send,
    ShowStacks,
    Start,
    Supervisor,
)

NAMES = ("gateway", "prefill-0", "decode-0")
STOP_SECONDS = 30.0
HANG_SECONDS = 10.0


def supervisor_up(now: float = 0.0) -> Supervisor:
    """All three children run and have announced themselves."""
    supervisor = Supervisor(NAMES, STOP_SECONDS, HANG_SECONDS)
    assert supervisor.start(now) == [Start(name) for name in NAMES]
    for name in NAMES:
        supervisor.announced(name)
    return supervisor


def die_and_restart(supervisor: Supervisor, now: float) -> float:
    """decode-0 dies at `now`; returns the pause until its restart, which is carried out."""
    (said,) = supervisor.exited("decode-0", -9, now)
    assert isinstance(said, Say) and "restarting" in said.text
    deadline = supervisor.deadline()
    assert deadline is not None
    assert supervisor.timer(deadline - 0.01) == []
    assert supervisor.timer(deadline) == [Start("decode-0")]
    supervisor.announced("decode-0")
    return deadline - now


def test_all_start_side_by_side() -> None:
    supervisor = Supervisor(NAMES, STOP_SECONDS, HANG_SECONDS)
    assert supervisor.start(0.0) == [Start("gateway"), Start("prefill-0"), Start("decode-0")]
    assert supervisor.state_of("decode-0") is ChildState.STARTING
    supervisor.announced("decode-0")
    assert supervisor.state_of("decode-0") is ChildState.UP
    assert supervisor.deadline() is None


def test_a_child_that_dies_is_restarted_alone_and_said() -> None:
    supervisor = supervisor_up()
    effects = supervisor.exited("decode-0", -9, 10.0)
    assert effects == [Say("decode-0 died (SIGKILL); restarting in 1 s")]
    assert supervisor.state_of("prefill-0") is ChildState.UP
    assert supervisor.deadline() == 11.0
    assert supervisor.timer(11.0) == [Start("decode-0")]
    assert supervisor.deadline() is None


def test_a_child_that_left_when_asked_starts_anew_at_once_and_has_not_failed() -> None:
    supervisor = supervisor_up()
    for now in (1.0, 2.0, 3.0, 4.0):
        effects = supervisor.exited("decode-0", 0, now)
        assert effects == [Say("decode-0 left when asked; starting it anew"), Start("decode-0")]
        assert supervisor.state_of("decode-0") is ChildState.STARTING
        supervisor.announced("decode-0")
    assert die_and_restart(supervisor, 5.0) == 1.0


def test_a_child_that_ends_before_it_was_up_has_failed_whatever_its_exit_code() -> None:
    supervisor = supervisor_up()
    supervisor.exited("decode-0", 0, 1.0)
    assert supervisor.exited("decode-0", 0, 1.0) == [
        Say("decode-0 ended (exit code 0); restarting in 1 s")
    ]


def test_a_restarted_gateway_does_not_start_the_workers_again() -> None:
    supervisor = supervisor_up()
    supervisor.exited("gateway", 1, 5.0)
    assert supervisor.timer(6.0) == [Start("gateway")]
    supervisor.announced("gateway")
    assert supervisor.deadline() is None


def test_pauses_double_up_to_the_maximum() -> None:
    supervisor, now, pauses = supervisor_up(), 0.0, []
    for _ in range(8):
        now += 1.0
        pause = die_and_restart(supervisor, now)
        now += pause
        pauses.append(pause)
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_steady_life_forgets_earlier_failures() -> None:
    supervisor = supervisor_up()
    assert die_and_restart(supervisor, 1.0) == 1.0
    assert die_and_restart(supervisor, 3.0) == 2.0
    assert die_and_restart(supervisor, 5.0 + STEADY_SECONDS) == 1.0


def test_a_thousand_failures_do_not_overflow_the_pause() -> None:
    supervisor, now = supervisor_up(), 0.0
    for _ in range(1000):
        now += die_and_restart(supervisor, now)
    assert die_and_restart(supervisor, now) == PAUSE_SECONDS_MAX


def test_a_refused_configuration_at_start_stops_all() -> None:
    supervisor = Supervisor(NAMES, STOP_SECONDS, HANG_SECONDS)
    supervisor.start(0.0)
    supervisor.announced("gateway")
    effects = supervisor.exited("prefill-0", 2, 2.0)
    assert effects == [
        Say("prefill-0 cannot start; its message is above; stopping all"),
        Send("gateway", signal.SIGTERM),
        Send("decode-0", signal.SIGTERM),
    ]
    assert supervisor.exited("gateway", 0, 3.0) == []
    assert supervisor.exited("decode-0", 0, 3.0) == [Finish(2)]
    assert supervisor.phase is Phase.DONE


def test_the_same_exit_code_in_a_later_life_is_a_death_like_any_other() -> None:
    supervisor = supervisor_up()
    supervisor.exited("gateway", -9, 1.0)
    supervisor.timer(2.0)
    (said,) = supervisor.exited("gateway", 2, 3.0)  # its port is still held, say
    assert said == Say("gateway ended (exit code 2); restarting in 2 s")


def test_a_child_that_never_comes_up_is_given_up() -> None:
    supervisor = Supervisor(NAMES, STOP_SECONDS, HANG_SECONDS)
    supervisor.start(0.0)
    supervisor.exited("gateway", 1, 0.0)
    supervisor.timer(1.0)
    supervisor.exited("gateway", 1, 1.0)
    supervisor.timer(3.0)
    effects = supervisor.exited("gateway", 1, 3.0)
    assert effects == [
        Say("gateway ended (exit code 1) in each of 3 starts; stopping all"),
        Send("prefill-0", signal.SIGTERM),
        Send("decode-0", signal.SIGTERM),
    ]


def test_stop_asks_all_waits_and_finishes() -> None:
    supervisor = supervisor_up()
    assert supervisor.stop(5.0) == [Send(name, signal.SIGTERM) for name in NAMES]
    assert supervisor.deadline() == 5.0 + STOP_SECONDS
    assert supervisor.exited("gateway", 0, 6.0) == []
    assert supervisor.exited("decode-0", -15, 6.0) == []
    assert supervisor.exited("prefill-0", 0, 7.0) == [Finish(0)]
    assert supervisor.deadline() is None


def test_stop_while_a_child_waits_for_its_restart() -> None:
    supervisor = supervisor_up()
    supervisor.exited("decode-0", 1, 1.0)
    assert supervisor.stop(1.5) == [
        Send("gateway", signal.SIGTERM),
        Send("prefill-0", signal.SIGTERM),
    ]
    assert supervisor.timer(2.0) == []


def test_a_child_that_does_not_end_is_killed() -> None:
    supervisor = supervisor_up()
    supervisor.stop(0.0)
    supervisor.exited("gateway", 0, 1.0)
    assert supervisor.timer(STOP_SECONDS - 0.1) == []
    effects = supervisor.timer(STOP_SECONDS)
    assert effects == [
        Say("prefill-0, decode-0 did not end within 30 s; killing"),
        Send("prefill-0", signal.SIGKILL),
        Send("decode-0", signal.SIGKILL),
    ]
    supervisor.exited("prefill-0", -9, STOP_SECONDS)
    assert supervisor.exited("decode-0", -9, STOP_SECONDS) == [Finish(0)]


def test_a_second_stop_kills_at_once_and_a_third_changes_nothing() -> None:
    supervisor = supervisor_up()
    supervisor.stop(0.0)
    assert supervisor.stop(0.1) == [Send(name, signal.SIGKILL) for name in NAMES]
    assert supervisor.stop(0.2) == []


def test_an_announcement_while_stopping_changes_nothing_else() -> None:
    supervisor = Supervisor(NAMES, STOP_SECONDS, HANG_SECONDS)
    supervisor.start(0.0)
    supervisor.stop(0.1)
    supervisor.announced("gateway")
    assert supervisor.phase is Phase.STOPPING
    for name in NAMES[1:]:
        assert supervisor.exited(name, -15, 0.2) == []
    assert supervisor.exited("gateway", 0, 0.3) == [Finish(0)]


def test_giving_up_from_outside_keeps_the_code_through_the_stop() -> None:
    supervisor = supervisor_up()
    said, *sent = supervisor.give_up("not ready after 300 s", 1, 300.0)
    assert said == Say("not ready after 300 s; stopping all")
    assert len(sent) == 3
    assert supervisor.give_up("again", 2, 301.0) == []
    for name in NAMES[:2]:
        supervisor.exited(name, 0, 302.0)
    assert supervisor.exited("decode-0", 0, 302.0) == [Finish(1)]


@pytest.mark.parametrize("name", NAMES)
def test_an_exit_of_what_does_not_run_is_our_bug(name: str) -> None:
    supervisor = Supervisor(NAMES, STOP_SECONDS, HANG_SECONDS)
    with pytest.raises(AssertionError):
        supervisor.exited(name, 0, 0.0)
    assert supervisor.state_of(name) is ChildState.NEW


def beating(now: float = 0.0) -> Supervisor:
    """All three children are up, and have beaten at `now`."""
    supervisor = supervisor_up(now)
    for name in NAMES:
        supervisor.beaten(name, now)
    return supervisor


def test_a_child_that_falls_silent_is_shown_and_killed_and_starts_anew() -> None:
    supervisor = beating()
    for name in ("gateway", "prefill-0"):
        supervisor.beaten(name, 5.0)
    assert supervisor.deadline() == HANG_SECONDS
    assert supervisor.timer(HANG_SECONDS - 0.1) == []
    said, shown = supervisor.timer(HANG_SECONDS)
    assert isinstance(said, Say) and "decode-0 has been silent for 10 s" in said.text
    assert shown == ShowStacks("decode-0")
    end = HANG_SECONDS + LAST_CHANCE_SECONDS
    assert supervisor.deadline() == end
    assert supervisor.timer(end) == [
        Say("decode-0 stays silent; killing it"),
        Send("decode-0", signal.SIGKILL),
    ]
    assert supervisor.deadline() == 5.0 + HANG_SECONDS, "it is killed once"
    assert supervisor.exited("decode-0", -9, end) == [
        Say("decode-0 died (SIGKILL); restarting in 1 s")
    ]
    assert supervisor.timer(end + 1.0) == [Start("decode-0")]


def test_a_child_that_beats_again_is_left_alone() -> None:
    supervisor = beating()
    assert len(supervisor.timer(HANG_SECONDS)) == 6, "all three are shown"
    for name in NAMES:
        supervisor.beaten(name, HANG_SECONDS + 1.0)
    assert supervisor.timer(HANG_SECONDS + LAST_CHANCE_SECONDS) == []
    assert supervisor.deadline() == 2 * HANG_SECONDS + 1.0


def test_whoever_was_asleep_accuses_nobody() -> None:
    """Stopped and continued, before and after a child was shown: beats have piled up unread."""
    supervisor = beating()
    assert supervisor.timer(HANG_SECONDS + ASLEEP_SECONDS + 100.0) == []
    later = 2 * HANG_SECONDS + ASLEEP_SECONDS + 100.0
    assert supervisor.deadline() == later
    assert len(supervisor.timer(later)) == 6
    assert supervisor.timer(later + LAST_CHANCE_SECONDS + ASLEEP_SECONDS + 1.0) == []


def test_a_child_that_has_never_beaten_is_not_expected_to() -> None:
    supervisor = supervisor_up()
    assert supervisor.deadline() is None
    supervisor.beaten("decode-0", 1.0)
    assert supervisor.deadline() == 1.0 + HANG_SECONDS
    # Nor is one that starts: it loads its model.
    supervisor.exited("decode-0", -9, 2.0)
    supervisor.beaten("decode-0", 2.5)
    assert supervisor.timer(3.0) == [Start("decode-0")]
    assert supervisor.deadline() is None


def test_children_that_stop_may_be_silent() -> None:
    supervisor = beating()
    supervisor.stop(1.0)
    assert supervisor.deadline() == 1.0 + STOP_SECONDS
    assert supervisor.timer(1.0 + HANG_SECONDS) == []
