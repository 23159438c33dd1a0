"""A TCP relay: the network between a client and a pod, which a test may cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Relay:
    """``url`` stays; what is behind it may change."""

    def __init__(self) -> None:
        self.url = ""
        self.target: int | None = None
        """A port of this machine; None: connections are taken and dropped."""
        self.taken = 0
        self._open: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Reset every connection."""
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        if self.target is None:
            writer.transport.abort()
            return
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, forth}
        try:
            await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))
        finally:
            for end in (writer, forth):
                end.transport.abort()
            self._open -= {writer, forth}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, RuntimeError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@asynccontextmanager
async def relay() -> AsyncIterator[Relay]:
    made = Relay()
    server = await asyncio.start_server(made._serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        made.cut()
        await server.wait_closed()
