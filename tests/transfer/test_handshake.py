"""Who is let in on a channel: the cluster's own, and nobody else; both ends say why not."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from pdrt.config import SecurityConfig
from pdrt.errors import ConfigError
from pdrt.transfer import channel, cluster_key
from pdrt.transfer.channel import DealerChannel, RouterChannel
from pdrt.transfer.cluster_key import ClusterKey, is_open_to_others, read_key, write_new_key
from pdrt.transfer.handshake import WORDS, Failure
from tests.decode.deployment import until

FRAME_BYTES = 1 << 20
Ends = Callable[[ClusterKey | None, ClusterKey | None], tuple["Bound", "Dialled"]]


@pytest.fixture(autouse=True)
def redial_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "REDIAL_SECONDS", 0.02)


def make_key() -> ClusterKey:
    return ClusterKey(*zmq.curve_keypair())


OURS, THEIRS = make_key(), make_key()


class Bound:
    """A router, what it has heard, and whom it has refused."""

    def __init__(self, key: ClusterKey | None, port: int = 0) -> None:
        self.heard: list[bytes] = []
        self.refused: list[Failure] = []
        self.channel = RouterChannel(
            "127.0.0.1", port, lambda _, frame: self.heard.append(frame), FRAME_BYTES, key
        )
        self.channel.on_refused = self.refused.append
        self.endpoint = f"tcp://127.0.0.1:{self.channel.port}"


class Dialled:
    """A dealer, and the same of it."""

    def __init__(self, endpoint: str, key: ClusterKey | None) -> None:
        self.heard: list[bytes] = []
        self.refused: list[Failure] = []
        self.channel = DealerChannel(endpoint, b"wa", self.heard.append, FRAME_BYTES, key)
        self.channel.on_refused = self.refused.append

    async def say(self, frame: bytes) -> None:
        await until(lambda: self.channel.send(frame), "a connection")


@pytest.fixture
def closing() -> Iterator[list[Bound | Dialled]]:
    mine: list[Bound | Dialled] = []
    yield mine
    for each in mine:
        each.channel.close()


@pytest.fixture
async def ends(closing: list[Bound | Dialled]) -> Ends:
    def make(bound: ClusterKey | None, dialled: ClusterKey | None) -> tuple[Bound, Dialled]:
        router = Bound(bound)
        dealer = Dialled(router.endpoint, dialled)
        closing.extend((router, dealer))
        return router, dealer

    return make


async def test_members_talk_both_ways(ends: Ends) -> None:
    router, dealer = ends(OURS, OURS)
    await dealer.say(b"0")
    for number in range(1, 500):
        assert dealer.channel.send(b"%d" % number)
    await until(lambda: len(router.heard) == 500, "all of them")
    assert router.heard == [b"%d" % number for number in range(500)]
    assert router.channel.send(b"wa", b"x" * (FRAME_BYTES - 1))
    await until(lambda: dealer.heard, "the answer")
    assert (router.refused, dealer.refused, dealer.channel.refusal) == ([], [], None)


STRANGERS = [
    ("without a key", OURS, None, {Failure.MECHANISM}, {Failure.MECHANISM}),
    ("with a key, to one without", None, OURS, {Failure.MECHANISM}, {Failure.MECHANISM}),
    ("with another key", OURS, THEIRS, {Failure.KEY}, {Failure.CLOSED}),
    # It has got hold of the public half only.
    (
        "with another secret",
        OURS,
        ClusterKey(OURS.public, THEIRS.secret),
        {Failure.KEY, Failure.PROTOCOL},
        {Failure.CLOSED},
    ),
]


@pytest.mark.parametrize(
    ("bound", "dialled", "at_router", "at_dealer"),
    [x[1:] for x in STRANGERS],
    ids=[x[0] for x in STRANGERS],
)
async def test_a_stranger_is_refused_and_both_ends_say_so(  # noqa: PLR0913, PLR0917 (a table)
    ends: Ends,
    caplog: pytest.LogCaptureFixture,
    bound: ClusterKey | None,
    dialled: ClusterKey | None,
    at_router: set[Failure],
    at_dealer: set[Failure],
) -> None:
    with caplog.at_level(logging.ERROR):
        router, dealer = ends(bound, dialled)
        await until(
            lambda: (
                min(len(router.refused), len(dealer.refused)) >= 3
                and at_router & set(router.refused)
                and dealer.channel.refusal
            ),
            "several attempts",
        )
    assert set(router.refused) <= at_router | {Failure.CLOSED}
    assert set(dealer.refused) <= at_dealer | {Failure.CLOSED}
    assert not dealer.channel.send(b"frame") and not router.heard
    assert not router.channel.send(b"wa", b"frame")
    records = [record for record in caplog.records if record.name == channel.__name__]
    said = {vars(record)["why"] for record in records}
    assert dealer.channel.refusal in said and len(said) == len(records), "each once"
    assert all("the same --cluster-key" in why for why in said)
    for secret in (OURS.secret, THEIRS.secret):
        assert secret.decode() not in caplog.text


async def test_a_member_that_proves_the_pinned_half_only_is_not_let_in(ends: Ends) -> None:
    """It has the cluster's public half and a valid pair of its own: only the authenticator can
    tell."""
    router, member = ends(OURS, OURS)
    await member.say(b"hello")
    await until(lambda: router.heard, "a member")
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.setsockopt(zmq.CURVE_SERVERKEY, OURS.public)
    raw.setsockopt(zmq.CURVE_PUBLICKEY, THEIRS.public)
    raw.setsockopt(zmq.CURVE_SECRETKEY, THEIRS.secret)
    raw.connect(router.endpoint)
    raw.send(b"let me in")
    await until(lambda: Failure.KEY in router.refused, "the refusal")
    await member.say(b"still here")
    await until(lambda: len(router.heard) == 2, "the member")
    assert router.heard == [b"hello", b"still here"]
    raw.close()


async def test_a_key_that_is_put_right_is_found_without_a_restart(
    closing: list[Bound | Dialled],
) -> None:
    """libzmq dials never again after a handshake that it finds wrong."""
    wrong = Bound(None)
    closing.append(wrong)
    dealer = Dialled(wrong.endpoint, OURS)
    closing.append(dealer)
    await until(lambda: dealer.channel.refusal, "the refusal")
    port = wrong.channel.port
    wrong.channel.close()
    right = await bound(OURS, port)
    closing.append(right)
    await dealer.say(b"hello")
    await until(lambda: right.heard, "hello")
    assert right.channel.send(b"wa", b"welcome")
    await until(lambda: dealer.heard, "the answer")
    assert dealer.channel.refusal is None


async def test_what_is_no_zmq_on_the_port_is_left_as_soon_as_it_is_gone(
    closing: list[Bound | Dialled],
) -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A ZMTP 3 greeting of a mechanism that nobody has.
        writer.write(greeting(b"NOTHING"))
        await writer.drain()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    dealer = Dialled(f"tcp://127.0.0.1:{port}", None)
    closing.append(dealer)
    await until(lambda: dealer.refused, "the refusal")
    server.close()
    await server.wait_closed()
    router = await bound(None, port)
    closing.append(router)
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")


async def bound(key: ClusterKey | None, port: int) -> Bound:
    """As soon as the port is free."""
    made: list[Bound] = []

    def bind() -> bool:
        try:
            made.append(Bound(key, port))
        except ConfigError:
            return False
        return True

    await until(bind, "the port")
    return made[0]


def greeting(mechanism: bytes) -> bytes:
    """Of ZMTP 3.0."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    # ZMTP 1.0 and 2.0, which know no keys.
    b"\x01\x00\x06\x00hello",
    b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00\x04name",
    greeting(b"NULL"),
    greeting(b"CURVE") + bytes(300),
    greeting(b"CURVE") + b"\x06" + b"\xff" * 8,
    bytes(range(256)) * 8,
]  # fmt: skip


@pytest.mark.parametrize("key", [None, OURS], ids=["open", "with a key"])
async def test_garbage_on_the_port_harms_nobody(ends: Ends, key: ClusterKey | None) -> None:
    router, dealer = ends(key, key)
    await dealer.say(b"hello")
    await until(lambda: router.heard, "hello")
    for garbage in GARBAGE:
        with socket.create_connection(("127.0.0.1", router.channel.port)) as stranger:
            await asyncio.to_thread(_say, stranger, garbage)
        await dealer.say(b"still here")
    await until(lambda: router.heard.count(b"still here") == len(GARBAGE), "the member")
    if key is not None:
        assert set(router.heard) == {b"hello", b"still here"}, "nobody else was let in"


def _say(stranger: socket.socket, garbage: bytes) -> None:
    """And listen until the other end hangs up, which it does when it has read it all."""
    with contextlib.suppress(OSError):  # it may hang up in the middle
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass


async def test_contexts_end_with_their_channels(closing: list[Bound | Dialled]) -> None:
    router = Bound(OURS)
    context = router.channel._context
    router.channel.close()
    router.channel.close()
    await until(lambda: context.closed, "the end of its context")
    closing.append(Bound(OURS))


def test_nothing_is_said_of_a_peer_that_merely_ended() -> None:
    assert not any(failure is Failure.CLOSED for failure, _ in WORDS)


# Key files


def config(path: Path) -> SecurityConfig:
    return SecurityConfig(cluster_key=str(path))


def test_a_new_key_is_its_owners_alone_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_new_key(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert not is_open_to_others(str(path))
    key = read_key(config(path))
    assert key is not None and key == read_key(config(path))
    assert zmq.curve_public(key.secret) == key.public
    for text in (repr(key), str(key), f"{key!r}", repr([key])):
        assert key.secret.decode() not in text
    path.chmod(0o640)
    assert is_open_to_others(str(path))
    assert read_key(SecurityConfig()) is None


def test_no_key_is_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "key"
    write_new_key(str(path))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="exists, and is not overwritten"):
        write_new_key(str(path))
    assert path.read_bytes() == before
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists"):
        write_new_key(str(link))
    with pytest.raises(ConfigError, match="cannot write"):
        write_new_key(str(tmp_path / "nowhere" / "key"))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is no cluster key"),
        ("secret", "is no cluster key"),
        ("pdrt-cluster-key-2:" + "a" * 40, "is no cluster key"),
        (f"{cluster_key.PREFIX}{'a' * 40}\n{cluster_key.PREFIX}{'b' * 40}\n", "is no cluster key"),
        (cluster_key.PREFIX, "is damaged"),
        (cluster_key.PREFIX + "a" * 39, "is damaged"),
        (cluster_key.PREFIX + "~" * 40, "is damaged"),
        (cluster_key.PREFIX + "é" * 40, "is damaged"),
        (cluster_key.PREFIX + "#" * 40, "is damaged"),
    ],
)
def test_files_that_are_no_key(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--cluster-key {path} {what}"):
        read_key(config(path))


def test_a_key_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--cluster-key .*: No such file"):
        read_key(config(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"--cluster-key .*: Is a directory"):
        read_key(config(tmp_path))
    with pytest.raises(ConfigError, match="embedded null byte"):
        read_key(SecurityConfig(cluster_key="\0"))
    with pytest.raises(ConfigError, match="is no cluster key"):
        read_key(config(Path("/dev/zero")))


def test_a_libzmq_without_curve_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    with pytest.raises(ConfigError, match=r"built without CURVE.*pip install"):
        write_new_key(str(tmp_path / "key"))
    assert not (tmp_path / "key").exists()
