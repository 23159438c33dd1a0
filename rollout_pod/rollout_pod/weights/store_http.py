"""Files behind ``https://`` and ``http://``, by range requests.

aiohttp and not fsspec's own HTTP file system, which neither looks whether a range was answered with
a range nor whether the file is still the one it was.
"""

import asyncio
import math
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final
from urllib.parse import quote

import aiohttp
from yarl import URL

from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.locations import AUTHORIZATION, QUERY, Location, redact
from rollout_pod.weights.stores import TEMPORARY, Changed, Patience, Put, RemoteFile, Transient

REDIRECTS: Final = 5
_RANGE: Final = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_UNSATISFIED: Final = re.compile(r"bytes \*/(\d+)")
_KEPT: Final = "/:@!$&'()*+,;=~%"
"""Characters of a folder's URL that are not quoted (again)."""


class HttpStore:
    """A folder behind HTTP.

    Args:
        location: of the folder.
        patience: with the server.
        authorization: value of that header.
        query: of every request; may be a secret.

    Raises:
        SourceError: credentials would travel in the clear.
    """

    def __init__(
        self, location: Location, patience: Patience, *, authorization: str = "", query: str = ""
    ) -> None:
        if location.scheme == "http" and (authorization or query):
            raise SourceError(
                f"{location.url}: credentials are not sent over http://; use https://, or remove "
                f"{AUTHORIZATION} and {QUERY}",
                retryable=False,
            )
        self.where = location.url
        self._query = query.removeprefix("?")
        self._secrets = (authorization, authorization.partition(" ")[2], self._query)
        self._patience = patience
        self._headers = {"Accept-Encoding": "identity"}
        if authorization:
            self._headers["Authorization"] = authorization
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of_environment(cls, location: Location, patience: Patience) -> "HttpStore":
        """With the credentials of the environment."""
        return cls(
            location,
            patience,
            authorization=os.environ.get(AUTHORIZATION, "").strip(),
            query=os.environ.get(QUERY, "").strip(),
        )

    async def names(self) -> frozenset[str] | None:
        """HTTP has no folders."""
        return None

    async def known_sums(self) -> Mapping[str, str]:
        """HTTP knows none."""
        return {}

    async def content(self, name: str, limit: int) -> bytes | None:
        """See ``Store``."""
        async with self._get(name) as answer:
            if answer.status == 404:
                return None
            self._refuse(name, answer)
            found = bytearray()
            async for chunk in answer.content.iter_any():
                found += chunk
                if len(found) > limit:
                    break
            return bytes(found)

    async def head(self, name: str, nbytes: int) -> tuple[RemoteFile, bytes]:
        """See ``Store``."""
        async with self._get(name, f"bytes=0-{nbytes - 1}") as answer:
            empty = _UNSATISFIED.fullmatch(answer.headers.get("Content-Range", ""))
            if answer.status == 416 and empty and empty[1] == "0":
                return RemoteFile(name, 0, _tag(answer)), b""
            if answer.status == 200 and answer.content_length == 0:
                return RemoteFile(name, 0, _tag(answer)), b""
            self._refuse(name, answer)
            size = self._range(name, answer, 0)[1]
            found = bytearray()
            async for chunk in answer.content.iter_any():
                found += chunk
            return RemoteFile(name, size, _tag(answer)), bytes(found)

    async def read(self, file: RemoteFile, start: int, stop: int, put: Put) -> None:
        """See ``Store``."""
        at = start
        async with self._get(file.name, f"bytes={start}-{stop - 1}") as answer:
            if answer.status in (404, 412, 416):
                raise Changed(self._name(file.name))
            self._refuse(file.name, answer)
            end, size = self._range(file.name, answer, start)
            if size != file.size or _tag(answer) != file.tag:
                raise Changed(self._name(file.name))
            async for chunk in answer.content.iter_any():
                if at + len(chunk) > min(end, stop):
                    raise SourceError(
                        f"{self._name(file.name)}: the server sent more than was asked for",
                        retryable=True,
                    )
                put(at, chunk)
                at += len(chunk)
        if at < stop:
            raise Transient(f"{self._name(file.name)}: the answer ended at byte {at} of {stop}")

    async def check(self, file: RemoteFile) -> None:
        """Every read compares; a file without a tag is taken with a known hash only."""

    async def close(self) -> None:
        """See ``Store``."""
        if self._session is not None:
            await self._session.close()

    # --- requests ---

    @asynccontextmanager
    async def _get(
        self, name: str, range_: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            patience = self._patience
            self._session = aiohttp.ClientSession(
                auto_decompress=False,
                trust_env=True,
                timeout=aiohttp.ClientTimeout(
                    total=None, connect=patience.connect_s, sock_read=patience.stall_s
                ),
                # aiohttp's own context is made when it is imported
                connector=aiohttp.TCPConnector(ssl=ssl.create_default_context(), limit_per_host=16),
                read_bufsize=1 << 20,
            )
        headers = self._headers | ({"Range": range_} if range_ else {})
        what = self._name(name)
        try:
            async with self._session.get(
                self._url(name), headers=headers, max_redirects=REDIRECTS
            ) as answer:
                if self.where.startswith("https") and any(
                    step.url.scheme != "https" for step in (*answer.history, answer)
                ):
                    raise SourceError(f"{what}: redirected away from https://", retryable=False)
                yield answer
        except (aiohttp.ClientError, OSError) as error:  # of aiohttp all time-outs are OSErrors
            raise self._failed(what, error) from None  # its words may hold a signed URL

    def _url(self, name: str) -> URL:
        folder, _, _ = self.where.partition("?")
        url = quote(folder, safe=_KEPT) + "/" + quote(name, safe="")
        return URL(url + (f"?{self._query}" if self._query else ""), encoded=True)

    def _name(self, name: str) -> str:
        return f"{self.where}/{name}"

    def _refuse(self, name: str, answer: aiohttp.ClientResponse) -> None:
        what, status = self._name(name), answer.status
        if status in (200, 206):
            encoding = answer.headers.get("Content-Encoding", "identity")
            if encoding not in ("identity", ""):
                raise SourceError(
                    f"{what}: is sent as {redact(encoding)[:64]}; let the server send safetensors "
                    "as they are",
                    retryable=False,
                )
        elif status in TEMPORARY:
            raise Transient(f"{what}: HTTP {status}", after=_retry_after(answer))
        elif status in (404, 410):
            raise SourceError(f"{what}: HTTP {status}, missing; copy it there", retryable=True)
        elif status in (401, 403):
            raise SourceError(
                f"{what}: HTTP {status}, not allowed; check the credentials "
                "(weights.source.secretRef)",
                retryable=False,
            )
        else:
            raise SourceError(f"{what}: HTTP {status}, not expected", retryable=False)

    def _range(self, name: str, answer: aiohttp.ClientResponse, start: int) -> tuple[int, int]:
        """Where the answer ends, and the file's size."""
        what = self._name(name)
        if answer.status != 206:
            raise SourceError(
                f"{what}: the server does not answer range requests (RFC 9110); use one that does, "
                "for example nginx or an object store",
                retryable=False,
            )
        found = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
        if not found or int(found[1]) != start:
            raise SourceError(f"{what}: the server answered another range", retryable=False)
        return int(found[2]) + 1, int(found[3])

    def _failed(self, what: str, error: Exception) -> SourceError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
            reason = getattr(error, "certificate_error", None) or error
            return SourceError(
                f"{what}: TLS failed ({self._safe(getattr(reason, 'verify_message', '') or '')}"
                f"{type(reason).__name__}); for an authority of your own set SSL_CERT_FILE",
                retryable=False,
            )
        if isinstance(error, aiohttp.TooManyRedirects):
            return SourceError(f"{what}: more than {REDIRECTS} redirects", retryable=False)
        if isinstance(error, aiohttp.InvalidURL | aiohttp.NonHttpUrlClientError):
            return SourceError(f"{what}: led to what is no URL", retryable=False)
        if isinstance(error, aiohttp.ClientConnectorDNSError):
            return Transient(f"{what}: no such host ({_words(error.os_error)})")
        if isinstance(error, aiohttp.ClientConnectorError):
            return Transient(f"{what}: no connection ({_words(error.os_error)})")
        if isinstance(error, aiohttp.ConnectionTimeoutError):
            return Transient(f"{what}: no connection in {self._patience.connect_s:g} s")
        if isinstance(error, TimeoutError):
            return Transient(f"{what}: no byte in {self._patience.stall_s:g} s")
        if isinstance(error, aiohttp.ClientPayloadError):
            return Transient(f"{what}: the answer broke off")
        return Transient(f"{what}: the connection broke ({type(error).__name__})")

    def _safe(self, text: str) -> str:
        return redact(text, self._secrets) + ", " if text else ""


def _tag(answer: aiohttp.ClientResponse) -> str:
    """Weak ones do: they, too, change when the content does."""
    return answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""


def _retry_after(answer: aiohttp.ClientResponse) -> float | None:
    try:
        seconds = float(answer.headers.get("Retry-After", ""))
    except ValueError:
        return None  # none, or a date
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _words(error: OSError) -> str:
    if isinstance(error, socket.gaierror | asyncio.TimeoutError):
        return str(error.args[-1]) if error.args else type(error).__name__
    return error.strerror or type(error).__name__
