"""A way to the real API server that refuses requests, and loses and delays watch events."""

import asyncio
import random
import ssl
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import ClientError, ClientSession, ClientTimeout, StreamReader, web

from devcluster.certs import kubeconfig
from devcluster.settings import API_URL, CONTEXT, NODE_IP, Settings

START_S = 10.0
LATE_S = 3.0
TLS_CLOSE_S = 2.0
# of one connection: they are the proxy's own
_HOP = frozenset({"connection", "host", "transfer-encoding", "content-length", "content-encoding"})


class FaultyWay:
    """A proxy on the node's own address, with the API server's own certificate."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self._pki = settings.pki
        self._dice = random.Random(seed)
        self.refuses = 0.0
        """The share of requests that end in 409, 429 or 500."""
        self.loses = 0.0
        """The share of watch events that are lost or late."""
        self.done: Counter[str] = Counter()
        """What was done to how many requests and events."""
        self.port = 0

    def kubeconfig(self, token: str) -> dict[str, object]:
        """How a client that has this token comes here."""
        ca = (self._pki / "ca.crt").read_bytes()
        made = kubeconfig(ca=ca, user={"token": token}, context=CONTEXT)
        made["clusters"][0]["cluster"]["server"] = f"https://{NODE_IP}:{self.port}"
        return made

    @contextmanager
    def open(self) -> Iterator[None]:
        """Serve, in a thread of its own."""
        up, stop = threading.Event(), threading.Event()

        async def serve() -> None:
            async with self._served():
                up.set()
                await asyncio.to_thread(stop.wait)

        # asyncio.run also ends the handshakes that are under way
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        try:
            assert up.wait(START_S), "the way does not open"
            yield
        finally:
            stop.set()
            thread.join(START_S)
            assert not thread.is_alive(), "the way does not close"

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[None]:
        mine = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        mine.load_cert_chain(self._pki / "server.crt", self._pki / "server.key")
        self._theirs = ssl.create_default_context(cafile=self._pki / "ca.crt")
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=True)
        await runner.setup()
        async with ClientSession(auto_decompress=False) as self._session:
            site = web.TCPSite(runner, NODE_IP, 0, ssl_context=mine)
            await site.start()
            self.port = runner.addresses[0][1]
            try:
                yield
            finally:
                await site.stop()
                assert runner.server is not None
                for connection in runner.server.connections:
                    # a TLS connection that is closed waits for the other side to say so too, and
                    # these clients may be dead: the loop would end before
                    if connection.transport is not None:
                        connection.transport.abort()
                await runner.cleanup()
                # the API server does say so; aiohttp does not wait for it
                await asyncio.sleep(TLS_CLOSE_S)

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        if self._dice.random() < self.refuses:
            return self._refuse(request.method)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        watches = request.query.get("watch", "") in ("1", "true")
        if watches:
            headers["Accept-Encoding"] = "identity"
        try:
            async with self._session.request(
                request.method,
                f"{API_URL}{request.rel_url}",
                headers=headers,
                data=await request.read() or None,
                ssl=self._theirs,
                timeout=ClientTimeout(total=None, sock_connect=5),
            ) as answer:
                kept = {k: v for k, v in answer.headers.items() if k.lower() not in _HOP}
                if encoding := answer.headers.get("Content-Encoding"):
                    kept["Content-Encoding"] = encoding
                response = web.StreamResponse(status=answer.status, headers=kept)
                await response.prepare(request)
                if watches:
                    await self._events(answer.content, response)
                else:
                    async for piece in answer.content.iter_any():
                        await response.write(piece)
                await response.write_eof()
                return response
        except (ClientError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=502)

    async def _events(self, lines: StreamReader, response: web.StreamResponse) -> None:
        line = b""
        async for piece in lines.iter_any():
            line += piece
            *whole, line = line.split(b"\n")
            for event in whole:
                if self._dice.random() < self.loses:
                    fate = self._dice.choice(("lost", "late"))
                    self.done[fate] += 1
                    if fate == "lost":
                        continue
                    await asyncio.sleep(self._dice.uniform(0.2, LATE_S))
                await response.write(event + b"\n")

    def _refuse(self, method: str) -> web.Response:
        code = self._dice.choice((429, 500, *((409,) * (method != "GET"))))
        self.done[str(code)] += 1
        reason = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError"}[code]
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code}
        headers = {"Retry-After": "1"} if code == 429 else {}
        body = {**status, "reason": reason, "message": "made to fail"}
        return web.json_response(body, status=code, headers=headers)
