"""`python -m tests.chaos.relay PORT`: between one host and all others, for what iptables cannot do.

iptables sends every connection that the host's processes open here. It is passed on to where it was
going; this process's own connections carry a mark that lets them out. Lines on stdin:

    delay SECONDS   whatever passes takes so much longer, in both directions
    forget          connections end at their far side, and nobody tells the near side: half-open
    tell            it is told now
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys

MARK = 1
SO_ORIGINAL_DST = 80
"""Of Linux: where a redirected connection was going."""
ADDRESS_BYTES = 16
READ_BYTES = 1 << 20
CONNECT_SECONDS_MAX = 30.0


class Relay:
    """All connections of one host."""

    def __init__(self) -> None:
        self._delay_seconds = 0.0
        self._far: set[asyncio.StreamWriter] = set()
        self._near: set[asyncio.StreamWriter] = set()
        self._forgotten: set[asyncio.StreamWriter] = set()
        """Near sides whose far side is gone."""

    def command(self, line: str) -> None:
        match line.split():
            case ["delay", seconds]:
                self._delay_seconds = float(seconds)
            case ["forget"]:
                self._forgotten |= self._near
                for writer in self._far:
                    writer.transport.abort()
            case ["tell"]:
                for writer in self._forgotten:
                    writer.transport.abort()
                self._forgotten.clear()
            case _:
                raise ValueError(line)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until both directions have ended."""
        try:
            far_reader, far_writer = await _connect(writer.get_extra_info("socket"))
        except OSError:
            writer.transport.abort()
            return
        self._near.add(writer)
        self._far.add(far_writer)
        try:
            await asyncio.gather(
                self._pump(reader, far_writer, writer), self._pump(far_reader, writer, writer)
            )
        except OSError:
            far_writer.transport.abort()
            if writer not in self._forgotten:
                writer.transport.abort()
        finally:
            self._near.discard(writer)
            self._far.discard(far_writer)

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        near: asyncio.StreamWriter,
    ) -> None:
        """One direction. An end is passed on as an end."""
        while data := await reader.read(READ_BYTES):
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            writer.write(data)
            await writer.drain()
        if near in self._forgotten:
            raise ConnectionAbortedError
        with contextlib.suppress(OSError):
            writer.write_eof()


async def _connect(near: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = near.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, ADDRESS_BYTES)
    port, host = struct.unpack_from("!2xH4s", address)
    far = socket.socket()
    far.setblocking(False)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, MARK)
    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        async with asyncio.timeout(CONNECT_SECONDS_MAX):
            loop = asyncio.get_running_loop()
            await loop.sock_connect(far, (socket.inet_ntoa(host), port))
        return await asyncio.open_connection(sock=far, limit=READ_BYTES)
    except (TimeoutError, OSError):
        far.close()
        raise


async def main(port: int) -> None:
    relay = Relay()
    async with await asyncio.start_server(relay.serve, "0.0.0.0", port, limit=READ_BYTES):
        print("up", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            relay.command(line)
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
