"""The admin side of a soaked pod: pauses, updates, and what it tells of itself."""

import asyncio
import time
from types import TracebackType
from typing import Any, Self

import aiohttp

from tests.support.process import ServeProcess

WAIT_S = 60.0


class SoakedPod:
    """The only one who writes to this pod."""

    def __init__(self, process: ServeProcess) -> None:
        self._process = process
        token = (process.run_dir / "admin" / "token").read_text().strip()
        self._headers = {"Authorization": f"Bearer {token}"}

    async def __aenter__(self) -> Self:
        """Open a connection."""
        self._http = aiohttp.ClientSession(
            f"http://{self._process.admin}", headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=WAIT_S),
        )  # fmt: skip
        async with self._http.get("/admin/v1/desired") as answer:
            self._document: dict[str, Any] = await answer.json()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        """Close it."""
        await self._http.close()

    async def pause(self) -> int:
        """Pause, and wait until it is. Returns how many requests are in the engine then; 0 where
        they are kept there on purpose.
        """
        await self._put(paused=True)
        state = await self._until(lambda s: s["phase"] == "Paused")
        is_kept = self._document["interruption"]["mode"] == "keep"
        return 0 if is_kept else int(state["unfinished"])

    async def resume(self) -> None:
        """Go on."""
        await self._put(paused=False)
        await self._until(lambda s: s["phase"] == "Serving")

    async def update(self, version: str) -> None:
        """Serve another version: ``base`` or one of the pod's own source."""
        source = (self._process.run_dir / "source").read_text()
        path = source.format(version=version)
        weights = {"version": version, "source": {"path": path}} if version != "base" else None
        await self._put(weights=weights)
        await self._until(lambda s: s["phase"] == "Serving" and s["weight_version"] == version)

    async def interrupt(self, mode: str) -> None:
        """What pauses and updates do from now on to requests in flight."""
        await self._put(interruption={"mode": mode, "timeout_s": 0.2 if mode == "drain" else 30})

    async def metrics(self) -> dict[str, float]:
        """Those without labels, by name."""
        async with aiohttp.request("GET", f"http://{self._process.data}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.split() for line in lines if line[:1] not in ("#", "") and "{" not in line)
        return {name: float(value) for name, value in pairs}

    async def _put(self, **changes: Any) -> None:
        generation = self._document["generation"] + 1
        self._document = self._document | changes | {"generation": generation}
        async with self._http.put("/admin/v1/desired", json=self._document) as answer:
            answer.raise_for_status()

    async def _until(self, done: Any) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_S
        after = ""
        while True:
            params = {"timeout": "5", "after": after}
            async with self._http.get("/admin/v1/state", params=params) as answer:
                state: dict[str, Any] = await answer.json()
            if done(state):
                return state
            if time.monotonic() > deadline:
                raise TimeoutError(f"still {state}")
            after = f"{state['boot_id']}:{state['revision']}"
            await asyncio.sleep(0)
