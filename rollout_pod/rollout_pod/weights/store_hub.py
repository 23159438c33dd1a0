"""Folders of model repositories on the Hugging Face Hub.

``huggingface_hub`` resolves the revision to a commit, once, so that nothing changes meanwhile, and
knows the sizes and hashes; the bytes come by range requests to that commit.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Final

from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.locations import HubFolder, parse_url, redact
from rollout_pod.weights.store_http import HttpStore
from rollout_pod.weights.stores import TEMPORARY, Patience, Put, RemoteFile, Transient

_HINT: Final = "set HF_TOKEN (weights.source.secretRef) if it is private"


class HubStore:
    """A folder of a repository. Credentials are those of ``huggingface_hub`` (``HF_TOKEN``)."""

    def __init__(self, where: str, folder: HubFolder, patience: Patience) -> None:
        self._where = where
        self._folder = folder
        self._patience = patience
        self._files: dict[str, Any] = {}
        self._http: HttpStore | None = None
        self._resolving = asyncio.Lock()

    async def names(self) -> frozenset[str] | None:
        """See ``Store``."""
        await self._resolved()
        return frozenset(self._files)

    async def known_sums(self) -> Mapping[str, str]:
        """Of the files that the Hub keeps as large ones."""
        await self._resolved()
        return {name: file.lfs.sha256 for name, file in self._files.items() if file.lfs}

    async def content(self, name: str, limit: int) -> bytes | None:
        """See ``Store``."""
        return await (await self._resolved()).content(name, limit)

    async def head(self, name: str, nbytes: int) -> tuple[RemoteFile, bytes]:
        """See ``Store``."""
        return await (await self._resolved()).head(name, nbytes)

    async def read(self, file: RemoteFile, start: int, stop: int, put: Put) -> None:
        """See ``Store``."""
        await (await self._resolved()).read(file, start, stop, put)

    async def check(self, file: RemoteFile) -> None:
        """A commit does not change."""

    async def close(self) -> None:
        """See ``Store``."""
        if self._http is not None:
            await self._http.close()

    async def _resolved(self) -> HttpStore:
        async with self._resolving:
            if self._http is None:
                self._http = await asyncio.to_thread(self._resolve)
            return self._http

    def _resolve(self) -> HttpStore:
        # takes half a second to import, and only this source needs it
        from huggingface_hub import HfApi, get_token, hf_hub_url
        from huggingface_hub import errors as hub

        wanted = self._folder
        endpoint = os.environ.get("HF_ENDPOINT") or None
        try:
            info = HfApi(endpoint=endpoint).model_info(
                wanted.repo,
                revision=wanted.revision,
                files_metadata=True,
                timeout=self._patience.stall_s,
            )
        except hub.GatedRepoError:
            raise self._bad("the repository is gated; accept its terms and set HF_TOKEN") from None
        except hub.RepositoryNotFoundError:
            raise self._bad(f"no such repository; {_HINT}", retryable=True) from None
        except hub.RevisionNotFoundError:
            raise self._bad("no such revision; push it", retryable=True) from None
        except hub.OfflineModeIsEnabled:
            raise self._bad("HF_HUB_OFFLINE is set in the container weights; remove it") from None
        except hub.HFValidationError:
            raise self._bad(f"{wanted.repo!r} is no name of a repository") from None
        except hub.HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            if status in (401, 403):
                raise self._bad(f"HTTP {status}, not allowed; {_HINT}") from None
            if status in TEMPORARY:
                raise Transient(f"{self._where}: the Hub answered HTTP {status}") from None
            raise self._bad(f"the Hub answered HTTP {status}", retryable=True) from None
        except Exception as error:  # whatever HTTP client the library uses
            text = redact(f"{type(error).__name__}: {error}")[:500]
            raise Transient(f"{self._where}: the Hub could not be asked ({text})") from None
        prefix = f"{wanted.folder}/" if wanted.folder else ""
        self._files = {
            file.rfilename.removeprefix(prefix): file
            for file in info.siblings or ()
            if file.rfilename.startswith(prefix) and "/" not in file.rfilename.removeprefix(prefix)
        }
        if not self._files:
            raise self._bad(f"holds no file in {prefix or '/'}", retryable=True)
        any_file = next(iter(self._files))
        url = hf_hub_url(wanted.repo, prefix + any_file, revision=info.sha, endpoint=endpoint)
        token = get_token()
        base = parse_url(url.partition("?")[0].rsplit("/", 1)[0])
        if base.scheme == "http":  # a mirror of one's own; a token stays here
            token = None
        return HttpStore(base, self._patience, authorization=f"Bearer {token}" if token else "")

    def _bad(self, words: str, *, retryable: bool = False) -> SourceError:
        return SourceError(f"{self._where}: {words}", retryable=retryable)
