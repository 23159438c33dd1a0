"""The way of the chaos tests leaves nothing open behind, whatever hangs on it."""

import asyncio
import gc
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from devcluster.certs import ensure_certificates
from devcluster.settings import Settings
from tests.support import faulty_way
from tests.support.faulty_way import FaultyWay

LOCAL = "127.0.0.1"
ANSWER = {
    "lists": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    "watches": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n{}\n\n\r\n",
    "waits": b"",
}
OPEN_S = 10.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    made = Settings(
        root=tmp_path, cache=tmp_path, repo=tmp_path, prefix=tmp_path, base_prefix=tmp_path
    )
    ensure_certificates(made)
    return made


@pytest.fixture
def asked(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set when a request has come to the API server; its path says what becomes of it."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings.pki / "server.crt", settings.pki / "server.key")
    up, stop, came = threading.Event(), threading.Event(), threading.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            asked = await reader.readuntil(b"\r\n\r\n")
            writer.write(ANSWER[asked.split(b" ")[1].decode().strip("/").split("?")[0]])
            came.set()
            await reader.read()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def serve() -> None:
        async with await asyncio.start_server(answer, LOCAL, 0, ssl=context) as server:
            port = server.sockets[0].getsockname()[1]
            monkeypatch.setattr(faulty_way, "API_URL", f"https://{LOCAL}:{port}")
            up.set()
            await asyncio.to_thread(stop.wait)

    monkeypatch.setattr(faulty_way, "NODE_IP", LOCAL)
    monkeypatch.setattr(faulty_way, "TLS_CLOSE_S", 0.5)
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert up.wait(OPEN_S)
    yield came
    stop.set()
    thread.join(OPEN_S)
    assert not thread.is_alive()


def that(request: str) -> Callable[[Settings, int], socket.socket]:
    """A client that asks and then looks at its connection no more, as a killed one's does not."""

    def connect(settings: Settings, port: int) -> socket.socket:
        context = ssl.create_default_context(cafile=settings.pki / "ca.crt")
        made = context.wrap_socket(socket.create_connection((LOCAL, port)), server_hostname=LOCAL)
        made.sendall(f"GET /{request} HTTP/1.1\r\nHost: api\r\n\r\n".encode())
        if not request.startswith("waits"):
            assert made.recv(9) == b"HTTP/1.1 "
        return made

    return connect


def shaking_hands(settings: Settings, port: int) -> socket.socket:
    """A connection that never says what TLS it speaks; accepted, as a later one is answered."""
    made = socket.create_connection((LOCAL, port))
    that("lists")(settings, port).close()
    return made


@pytest.mark.parametrize(
    ("connect", "comes", "refuses"),
    [
        pytest.param(shaking_hands, True, 0.0, id="shaking hands"),
        pytest.param(that("lists"), False, 1.0, id="refused"),
        pytest.param(that("lists"), True, 0.0, id="answered, and kept"),
        pytest.param(that("watches?watch=true"), True, 0.0, id="watching"),
        pytest.param(that("waits"), True, 0.0, id="waiting for an answer"),
    ],
)
def test_it_closes_under_clients_that_do_not(
    settings: Settings,
    asked: threading.Event,
    connect: Callable[[Settings, int], socket.socket],
    comes: bool,
    refuses: float,
) -> None:
    way = FaultyWay(settings, 0)
    way.refuses = refuses
    with way.open():
        client = connect(settings, way.port)
        if comes:
            assert asked.wait(OPEN_S)
    with client:
        # what was not closed says so when it is collected, and pytest fails for it
        gc.collect()
