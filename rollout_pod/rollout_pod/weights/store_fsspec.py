"""Buckets: ``s3://`` by s3fs and ``gs://`` by gcsfs.

Credentials are found as these libraries do it: environment, workload identity, instance metadata.
"""

import asyncio
import importlib
import json
import os
from collections.abc import Mapping
from typing import Any, Final

from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.locations import Location, redact
from rollout_pod.weights.stores import Changed, Patience, Put, RemoteFile, Transient

GOOGLE: Final = "GOOGLE_CREDENTIALS"
"""Environment: the JSON of a service account's key, where no file can hold it."""
_PACKAGES: Final = {"s3": ("s3fs", "S3FileSystem"), "gs": ("gcsfs.core", "GCSFileSystem")}
_TAGS: Final = ("generation", "VersionId", "ETag", "etag", "LastModified")
"""What tells contents apart; an ETag alone comes back with the bytes."""
_LASTING: Final = ("Credential", "Forbidden", "InvalidBucket", "NoSuchBucket", "ParamValidation")
"""Parts of the names and words of errors that no waiting heals."""


class BucketStore:
    """A folder of a bucket, by an asynchronous fsspec file system."""

    def __init__(self, location: Location, patience: Patience) -> None:
        self._scheme = location.scheme
        self.where = location.url
        self._path = f"{location.host}/{location.path}".rstrip("/")
        self._patience = patience
        self._fs: Any = None
        self._session: Any = None
        self._opening = asyncio.Lock()

    async def names(self) -> frozenset[str] | None:
        """See ``Store``."""
        entries = await self._call(self.where, "_ls", self._path, detail=True)
        names = (str(e["name"]).rpartition("/")[2] for e in entries if e["type"] == "file")
        return frozenset(name for name in names if name)

    async def known_sums(self) -> Mapping[str, str]:
        """An ETag is no hash that could be relied on."""
        return {}

    async def content(self, name: str, limit: int) -> bytes | None:
        """See ``Store``."""
        file = await self._info(name)
        return await self._range(file, 0, min(file.size, limit + 1))

    async def head(self, name: str, nbytes: int) -> tuple[RemoteFile, bytes]:
        """See ``Store``."""
        file = await self._info(name)
        found = await self._range(file, 0, min(file.size, nbytes))
        await self.check(file)
        return file, found

    async def read(self, file: RemoteFile, start: int, stop: int, put: Put) -> None:
        """See ``Store``."""
        found = await self._range(file, start, stop)
        # now, since a later look does not see a content that was there for a while only
        await self.check(file)
        put(start, found)

    async def check(self, file: RemoteFile) -> None:
        """See ``Store``: a range does not say which content it is of."""
        if await self._info(file.name) != file:
            raise Changed(self._name(file.name))

    async def close(self) -> None:
        """See ``Store``."""
        if self._session is not None:
            await self._session.close()

    async def _info(self, name: str) -> RemoteFile:
        info = await self._call(self._name(name), "_info", f"{self._path}/{name}")
        return RemoteFile(name, int(info["size"]), _tag(info))

    async def _range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        what = self._name(file.name)
        found = await self._call(
            what, "_cat_file", f"{self._path}/{file.name}", start=start, end=stop
        )
        if len(found) != stop - start:
            raise Transient(f"{what}: {len(found)} of {stop - start} bytes came from {start} on")
        return bytes(found)

    async def _call(self, what: str, method: str, path: str, **named: Any) -> Any:
        patience = self._patience
        try:
            async with asyncio.timeout(patience.piece_s):
                async with self._opening:
                    if self._session is None:
                        self._fs = await asyncio.to_thread(_file_system, self._scheme, patience)
                        fs = self._fs  # gcsfs has no public name for it
                        open_ = getattr(fs, "set_session", None) or fs._set_session
                        self._session = await open_()
                self._fs.invalidate_cache()
                return await getattr(self._fs, method)(path, **named)
        except SourceError:
            raise
        except TimeoutError:
            raise Transient(f"{what}: no answer in {patience.piece_s:g} s") from None
        except FileNotFoundError:
            raise SourceError(f"{what}: missing; copy it there", retryable=True) from None
        except PermissionError as error:
            raise SourceError(
                f"{what}: not allowed ({_words(error)}); the credentials "
                "(weights.source.secretRef) must be allowed to list and get",
                retryable=False,
            ) from None
        except Exception as error:
            words = _words(error)
            if any(part in words for part in _LASTING):
                raise SourceError(
                    f"{what}: {words}; check bucket and credentials (weights.source.secretRef)",
                    retryable=False,
                ) from None
            raise Transient(f"{what}: {words}") from None

    def _name(self, name: str) -> str:
        return f"{self.where}/{name}"


def _file_system(scheme: str, patience: Patience) -> Any:
    package, kind = _PACKAGES[scheme]
    try:
        module = importlib.import_module(package)
    except ImportError:
        raise SourceError(
            f"{scheme}:// needs the package {package.partition('.')[0]}: "
            f"install rollout-replica[{scheme}]",
            retryable=False,
        ) from None
    named: dict[str, Any] = {"asynchronous": True, "skip_instance_cache": True}
    if scheme == "s3":
        named["config_kwargs"] = {
            "connect_timeout": patience.connect_s,
            "read_timeout": patience.stall_s,
            "retries": {"max_attempts": 1},
        }
    else:
        named |= {"access": "read_only", "project": ""}  # no project: only to list buckets
        if os.environ.get(GOOGLE):
            try:
                named["token"] = json.loads(os.environ[GOOGLE])
            except ValueError:
                raise SourceError(f"{GOOGLE} is no JSON of a key", retryable=False) from None
    fs = getattr(module, kind)(**named)
    if scheme == "s3":
        fs.retries = 1  # tries again are ours, with the same patience everywhere
    return fs


def _tag(info: Mapping[str, Any]) -> str:
    return " ".join(str(info[key]) for key in _TAGS if info.get(key))


def _words(error: BaseException) -> str:
    """Libraries put URLs into their words, and some of those are signed."""
    return redact(f"{type(error).__name__}: {error}")[:500]
