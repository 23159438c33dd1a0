"""Thousands of pods' admin ports in one process: they hold long polls and take documents.

``python -m benchmarks.scale_pods PORT FILE``; FILE is a JSON object: address → state document.
Prints ``ready``, and ``held`` when each pod was told a document and holds a poll: so nobody has to
ask the operator, whose time is measured.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from rollout_pod.protocol import DesiredDocument, GateState, PodPhase, StateDocument


class Pods:
    """All of them."""

    def __init__(self, states: dict[str, Any]) -> None:
        self._states = {ip: StateDocument.model_validate(raw) for ip, raw in states.items()}
        self._texts = {ip: state.model_dump_json() for ip, state in self._states.items()}
        self._news = {ip: asyncio.Event() for ip in states}
        self._not_told, self._not_held = set(states), set(states)

    async def serve(self, request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        ip = request.transport.get_extra_info("sockname")[0]
        if request.method == "PUT":
            self._take(ip, DesiredDocument.model_validate_json(await request.read()))
            self._seen(self._not_told, ip)
            return web.json_response(text=self._texts[ip])
        state = self._states[ip]
        if request.query.get("after") == f"{state.boot_id}:{state.revision}":
            self._seen(self._not_held, ip)
            try:
                async with asyncio.timeout(float(request.query["timeout"])):
                    await self._news[ip].wait()
            except TimeoutError:
                pass
        return web.json_response(text=self._texts[ip])

    def _seen(self, missing: set[str], ip: str) -> None:
        if ip in missing:
            missing.remove(ip)
            if not self._not_told and not self._not_held:
                print("held", flush=True)

    def _take(self, ip: str, document: DesiredDocument) -> None:
        old = self._states[ip]
        phase = PodPhase.PAUSED if document.paused else PodPhase.SERVING
        changes = {
            "owner": document.owner,
            "generation": document.generation,
            "phase": phase,
            "gate": GateState.CLOSED if document.paused else GateState.OPEN,
        }
        new = old.model_copy(update=changes)
        if new == old:
            return
        self._states[ip] = new.model_copy(update={"revision": old.revision + 1})
        self._texts[ip] = self._states[ip].model_dump_json()
        self._news[ip].set()
        self._news[ip] = asyncio.Event()


async def main(port: int, states: dict[str, Any]) -> None:
    server = web.Server(Pods(states).serve, access_log=None)
    await asyncio.get_running_loop().create_server(server, list(states), port, backlog=16)
    print("ready", flush=True)
    # until this process is ended
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())))
