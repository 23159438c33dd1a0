"""Lists everything, page by page: at the start, and now and then for what a watch has lost."""

import asyncio
import random
from collections.abc import Callable
from typing import Any, Final

import structlog

from rollout_operator.api import names
from rollout_operator.api.selector import Selector
from rollout_operator.apply.cache import Cache
from rollout_operator.apply.errors import KubeError
from rollout_operator.apply.kube import PODS, REPLICAS, SERVICES, Kube
from rollout_operator.background import Background
from rollout_operator.hub import Hub
from rollout_operator.observe import Caches

OURS: Final = Selector.parse(f"{names.MANAGED_BY_LABEL}={names.MANAGER}")
_RETRY_S: Final = 2.0
_DEADLINE_S: Final = 120.0

log = structlog.get_logger(__name__)


class Relist:
    """One task. A restart costs pages, not a read for each object."""

    def __init__(
        self,
        kube: Kube,
        caches: Caches,
        hub: Hub,
        *,
        namespaces: tuple[str, ...],
        selector: Selector,
        period_s: float,
        wanted: Callable[[], bool],
    ) -> None:
        self._kube = kube
        self._namespaces = namespaces or ("",)
        self._period_s = period_s
        self._wanted = wanted
        self._due = asyncio.Event()
        self._begun = self._ended = 0
        self._news = asyncio.Event()
        self._background = Background()
        # replicas first: it is by them that the others are known
        self._kinds: tuple[tuple[str, Selector, Cache, Callable[[Any], None]], ...] = (
            (REPLICAS, selector, caches.replicas, hub.replica),
            (PODS, OURS, caches.pods, hub.pod),
            (SERVICES, OURS, caches.services, hub.service),
        )
        self.trouble = ""
        """Why the last attempt failed; empty if it did not."""
        self.first = asyncio.Event()
        """Set when everything was listed once."""

    def start(self) -> None:
        """Begin with a first list."""
        self._background.start(self._run())

    async def stop(self) -> None:
        """End the task."""
        await self._background.stop()

    async def renew(self) -> None:
        """List again, and wait for it: what another operator did last may have been lost."""
        wanted = self._begun + 1
        self._due.set()
        while self._ended < wanted:
            await self._news.wait()

    async def _run(self) -> None:
        while True:
            self._due.clear()
            delay = self._period_s * random.uniform(0.9, 1.1)  # noqa: S311 - jitter
            if not self.first.is_set() or self._wanted():
                self._begun = number = self._begun + 1
                try:
                    async with asyncio.timeout(_DEADLINE_S):
                        await self._all()
                    self._ended = number
                    self.trouble = ""
                    self.first.set()
                    self._news.set()
                    self._news = asyncio.Event()
                except (KubeError, TimeoutError) as error:
                    self.trouble = str(error) or "no end in time"
                    log.warning("not listed", reason=self.trouble)
                    delay = _RETRY_S
                except Exception:
                    # the watches go on; a bug here must not end what heals them
                    log.exception("not listed")
            try:
                async with asyncio.timeout(delay):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def _all(self) -> None:
        for resource, selector, cache, feed in self._kinds:
            for namespace in self._namespaces:
                await self._one(resource, namespace, selector, cache, feed)

    async def _one(
        self,
        resource: str,
        namespace: str,
        selector: Selector,
        cache: Cache,
        feed: Callable[[Any], None],
    ) -> None:
        listed: set[tuple[str, str]] = set()
        version = ""
        async for page in self._kube.pages(resource, namespace, selector=selector.text):
            version = page["metadata"].get("resourceVersion", "")
            for raw in page.pop("items") or ():
                listed.add((raw["metadata"]["namespace"], raw["metadata"]["name"]))
                feed({"type": None, "object": raw})
        for key in cache.keys():  # noqa: SIM118 - a Cache is no mapping
            if key in listed or (namespace and key[0] != namespace):
                continue
            raw = cache.get(key)
            if raw is None:
                continue
            meta = raw["metadata"]
            # what is not ours was read by name; what is newer than the list was made since
            if resource != REPLICAS and not selector.matches(meta.get("labels") or {}):
                continue
            if _older(meta.get("resourceVersion", ""), version):
                feed({"type": "DELETED", "object": raw})


def _older(version: str, than: str) -> bool:
    return not (version.isdecimal() and than.isdecimal()) or int(version) <= int(than)
