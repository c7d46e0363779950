"""A party as the trial sees it: asked, stopped, let go on and killed, through its nurse."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from pdrt.cli.torture import nurse
from pdrt.cli.torture.messages import NURSE_MARK, Answer, Command, Refused, answer_of, line_of
from pdrt.errors import PdrtError

ANSWER_SECONDS_MAX = 120.0
"""A party that says nothing for so long hangs; importing torch takes most of the first answer."""
LINE_BYTES_MAX = 1 << 20

Expected = TypeVar("Expected", bound=Answer)


class Party:
    """Made by `start`; to be closed by the caller."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process
        self._lines: deque[bytes] = deque()
        """Read while another kind was wanted: a party and its nurse speak whenever they like."""

    @classmethod
    async def start(cls, name: str, role: str, pdrt: Sequence[str]) -> Party:
        """`pdrt`: the command that runs pdrt where this party shall be.

        Raises:
            PdrtError: it cannot be run.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(*pdrt, "torture", "--nurse", role),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_BYTES_MAX,
            )
        except OSError as error:
            raise PdrtError(f"{name}: {' '.join(pdrt)}: {error.strerror}") from error
        return cls(name, process)

    async def ask(self, command: Command, expected: type[Expected]) -> Expected:
        """Raises PdrtError where it refuses, hangs or dies."""
        self.tell(command)
        return await self.answer(expected)

    def tell(self, command: Command) -> None:
        """Its answer is still to be read. One that is stopped reads this when it goes on."""
        assert self._process.stdin is not None
        self._process.stdin.write(line_of(command))

    async def answer(self, expected: type[Expected]) -> Expected:
        """To the oldest command that was told. Raises PdrtError as `ask` does."""
        found = _parsed(await self._line(is_nurses=False), self.name)
        if isinstance(found, Refused):
            raise PdrtError(f"{self.name}: {found.text}")
        assert isinstance(found, expected), (self.name, found)
        return found

    async def stop(self) -> None:
        """Returns once none of its threads runs."""
        await self._act(nurse.STOP)

    async def go_on(self) -> None:
        await self._act(nurse.GO_ON)

    async def kill(self) -> None:
        """Returns once it is gone."""
        await self._act(nurse.KILL)

    async def _act(self, action: bytes) -> None:
        assert self._process.stdin is not None
        line = NURSE_MARK + action + b"\n"
        self._process.stdin.write(line)
        found = await self._line(is_nurses=True)
        assert found == line, (self.name, found)

    async def _line(self, is_nurses: bool) -> bytes:
        """The oldest of that kind. At most as many wait as commands were told."""
        for line in self._lines:
            if line.startswith(NURSE_MARK) is is_nurses:
                self._lines.remove(line)
                return line
        while (line := await self._read()).startswith(NURSE_MARK) is not is_nurses:
            self._lines.append(line)
        return line

    async def _read(self) -> bytes:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_SECONDS_MAX):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PdrtError(
                f"{self.name} hangs: no answer for {ANSWER_SECONDS_MAX:.0f} s"
            ) from None
        if not line:
            raise PdrtError(f"{self.name} has ended; what it said is above")
        return line

    async def close(self) -> None:
        """Its nurse kills it and ends."""
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_SECONDS_MAX):
                    await self._process.wait()


def _parsed(line: bytes, name: str) -> Answer:
    try:
        return answer_of(line)
    except msgspec.MsgspecError as error:
        raise PdrtError(f"{name} said {line[:200]!r}, which is no answer: {error}") from error
