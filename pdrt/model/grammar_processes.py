"""Sockets to the processes in which grammars are compiled and followed (`grammar_server`)."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import weakref
from collections.abc import Sequence

import msgspec

from pdrt.errors import RequestRefused
from pdrt.model.grammar_messages import (
    MESSAGE_BYTES_MAX,
    TOKENS_PER_MESSAGE,
    Advance,
    Fill,
    FromProcess,
    Mask,
    Refused,
    ServerOptions,
    ToProcess,
)
from pdrt.sampling import Grammar

START_SECONDS_MAX = 120.0
"""Import of xgrammar and transformers on a busy machine."""
ANSWER_SECONDS_MAX = 60.0
"""A process ends by itself when it has computed for too long; this is for one that is stopped."""
TOO_MUCH = "it takes too much time or memory to compile; make it smaller, or less nested"


class ProcessLost(Exception):
    """The process at the other end is gone, or has been silent for too long."""


class Link:
    """One end of a socket to a process; used by one thread at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._decoder = msgspec.msgpack.Decoder(FromProcess)
        # Whoever drops the last reference closes it, and so ends the process.
        self.close = weakref.finalize(self, end.close)

    def send(self, message: ToProcess) -> None:
        """Raises ProcessLost."""
        try:
            self._end.send(msgspec.msgpack.encode(message))
        except OSError as error:
            raise ProcessLost(str(error)) from error

    def receive(self, seconds_max: float) -> FromProcess:
        """Raises ProcessLost."""
        self._end.settimeout(seconds_max)
        try:
            data = self._end.recv(MESSAGE_BYTES_MAX)
        except OSError as error:
            raise ProcessLost(str(error)) from error
        if not data:
            raise ProcessLost("it has ended")
        return self._decoder.decode(data)

    @property
    def is_open(self) -> bool:
        """Whether the other end is; asked of those who send nothing by themselves."""
        poll = select.poll()
        poll.register(self._end, select.POLLIN)
        return not poll.poll(0)

    def send_grammar(self, grammar: Grammar, end: socket.socket) -> None:
        """Ask a server for a process that compiles `grammar` and talks over `end`.

        Raises:
            ProcessLost: the server is gone.
        """
        try:
            socket.send_fds(self._end, [msgspec.msgpack.encode(grammar)], [end.fileno()])
        except OSError as error:
            raise ProcessLost(str(error)) from error


class GrammarProcess:
    """A compiled grammar, and the outputs that follow it. Used by the compute thread only."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.is_lost = False
        self._made = 0
        self._dropped: list[int] = []
        """Matchers that are no more, until that has been told."""

    def name(self, matcher: object) -> int:
        """A name for a new matcher, until it is garbage."""
        self._made += 1
        weakref.finalize(matcher, self._dropped.append, self._made).atexit = False
        return self._made

    def advance(self, name: int, tokens: Sequence[int]) -> None:
        """Raises ProcessLost."""
        for first in range(0, max(1, len(tokens)), TOKENS_PER_MESSAGE):
            part = [int(token) for token in tokens[first : first + TOKENS_PER_MESSAGE]]
            dropped = self._dropped[:]
            self.link.send(Advance(name, part, dropped))
            del self._dropped[: len(dropped)]

    def mask(self, name: int) -> bytes:
        """Empty where the grammar has no answer in time. Raises ProcessLost."""
        self.link.send(Fill(name))
        answer = self.link.receive(ANSWER_SECONDS_MAX)
        assert isinstance(answer, Mask), answer
        return answer.words


class Server:
    """The process that those of the grammars are forked from."""

    def __init__(self, options: ServerOptions) -> None:
        """Start it and wait until it can take grammars; some seconds.

        Raises:
            RequestRefused: it cannot serve any grammar; says why.
            ProcessLost: it did not start; the next one may.
        """
        try:
            self._start(options)
        except OSError as error:
            raise ProcessLost(str(error)) from error
        try:
            answer = self.link.receive(START_SECONDS_MAX)
        except ProcessLost:
            self.close()
            raise
        if isinstance(answer, Refused):
            self.close()
            raise RequestRefused(answer.text)

    def _start(self, options: ServerOptions) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link = Link(ours)
        with theirs:
            arguments = [msgspec.json.encode(options).decode(), str(theirs.fileno())]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdrt.model.grammar_server", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def close(self) -> None:
        """End it, in whatever it is at; what was forked from it goes on."""
        self.link.close()
        self._process.kill()
        self._process.wait()

    def compile(self, grammar: Grammar) -> Compiled:
        """Waits for it; may be called by several threads."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            return ProcessLost(str(error))
        link = Link(ours)
        try:
            with theirs:
                self.link.send_grammar(grammar, theirs)
            answer = link.receive(ANSWER_SECONDS_MAX)
        except ProcessLost as lost:
            # A server closes its own socket before those that are on their way to it.
            return RequestRefused(TOO_MUCH) if self.link.is_open else lost
        if isinstance(answer, Refused):
            return RequestRefused(answer.text)
        return GrammarProcess(link)


Compiled = GrammarProcess | RequestRefused | ProcessLost
"""The last one where the server was lost, or could not be asked: that says nothing about the
grammar."""
