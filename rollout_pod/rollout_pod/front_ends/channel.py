"""Messages between two processes of one pod: notes, and calls with an answer. In order, msgpack."""

import asyncio
import itertools
import socket
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

_LENGTH: Final = struct.Struct("<I")

Handler = Callable[..., Any]


class ChannelClosed(Exception):
    """The other side is gone; what it was asked for, nobody knows."""


class CallFailed(Exception):
    """The other side's handler raised; the message is ``<type>: <text>``."""


class Channel:
    """One end. All methods run on the event loop's thread.

    Notes and calls arrive in the order in which they were sent. A note's handler has run when the
    next frame is looked at, while that of a call begins in a later turn: a call sees all notes
    that were sent before it, and may see some that were sent after it.

    Args:
        send: hands a frame to the transport; must not block.
        notes: what the other side may tell. Plain functions.
        calls: what the other side may ask for. Coroutine functions; values are msgpack's own types.
    """

    def __init__(
        self, send: Callable[[bytes], None], notes: Mapping[str, Handler],
        calls: Mapping[str, Handler],
    ) -> None:  # fmt: skip
        self._send = send
        self._notes = notes
        self._calls = calls
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_closed = False
        self.heard_at = time.monotonic()
        """When the last frame came."""

    def tell(self, name: str, *args: Any) -> None:
        """Send a note. Nothing happens where the channel is closed."""
        self._put(0, name, list(args))

    async def call(self, name: str, *args: Any) -> Any:
        """Ask and wait for the answer; the other side has the deadline.

        Raises:
            ChannelClosed: the other side is gone, or went meanwhile.
            CallFailed: its handler raised.
        """
        if self.is_closed:
            raise ChannelClosed(name)
        number = next(self._ids)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            self._put(number, name, list(args))
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def receive(self, frame: bytes) -> None:
        """Take what the other side sent."""
        self.heard_at = time.monotonic()
        number, name, body = msgspec.msgpack.decode(frame)
        if number < 0:
            waiting = self._waiting.get(-number)
            if waiting is None or waiting.done():
                return  # nobody waits for it any more
            if name:
                waiting.set_exception(CallFailed(name))
            else:
                waiting.set_result(body)
        elif number == 0:
            self._notes[name](*body)
        else:
            task = asyncio.get_running_loop().create_task(
                self._answer(number, name, body), name=f"call {name}"
            )
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """The other side is gone: whoever waits for it is told."""
        self.is_closed = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ChannelClosed("the other process is gone"))

    async def join(self) -> None:
        """End what was begun for the other side. After ``close``."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _answer(self, number: int, name: str, args: list[Any]) -> None:
        try:
            value = await self._calls[name](*args)
        except Exception as error:
            self._put(-number, f"{type(error).__name__}: {error}", None)
        else:
            self._put(-number, "", value)

    def _put(self, number: int, name: str, body: Any) -> None:
        if not self.is_closed:
            self._send(msgspec.msgpack.encode((number, name, body)))


class Link:
    """A channel over a connected Unix socket. ``open`` makes one; then ``run`` reads it."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
        notes: Mapping[str, Handler], calls: Mapping[str, Handler],
    ) -> None:  # fmt: skip
        self._reader = reader
        self._writer = writer
        self.channel = Channel(self._write, notes, calls)

    @classmethod
    async def open(
        cls, end: socket.socket, notes: Mapping[str, Handler], calls: Mapping[str, Handler]
    ) -> "Link":
        """Take over ``end``, one of a pair."""
        return cls(*await asyncio.open_unix_connection(sock=end), notes, calls)

    async def run(self) -> None:
        """Read until the other side is gone; the channel is closed when this returns."""
        try:
            while True:
                (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
                self.channel.receive(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.channel.close()
            await self.channel.join()
            self._writer.close()
            with suppress(OSError):
                await self._writer.wait_closed()

    def _write(self, frame: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(_LENGTH.pack(len(frame)) + frame)
