"""Pods that only the API server reaches: its proxy, which keeps Authorization for itself."""

from tests.support.fake_apiserver import FakeApiServer
from tests.support.operator_kit import bench

SOURCE = {"source": {"path": "/ckpt/{version}"}}


async def test_a_replica_is_steered_and_heard_through_the_proxy():
    async with bench(pod_access="proxy") as b:
        admin = await b.serving(weights=SOURCE)
        b.patch(weightVersion="step-1")
        await b.until(lambda: b.status().get("weightVersion") == "step-1")
        b.patch(paused=True)
        await b.ready("Paused")
        # the pod's own token never stands where the proxy would take it
        assert admin.bearers == {None}
        assert b.server.proxied
        assert not any(b.token() in bearer for bearer in b.server.proxied)


async def test_straight_ways_use_no_proxy():
    async with bench() as b:
        admin = await b.serving()
        assert admin.bearers == {f"Bearer {b.token()}"}
        assert b.server.proxied == []


async def test_a_proxy_that_does_not_reach_the_pod_is_not_the_pods_answer():
    async with bench(pod_access="proxy") as b:
        await b.serving()
        start = len(b.server.requests)
        b.server.change("pods", "qwen-0", {"status": {"podIP": "127.0.0.98"}})
        await b.until(lambda: b.condition("Ready") == ("Unknown", "PodUnreachable"), timeout=25)
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert "503" in ready["message"]
        assert not [w for w in b.server.writes(start) if w.startswith("DELETE")]


async def test_a_proxy_that_we_may_not_use_is_no_wrong_token(monkeypatch):
    from aiohttp import web

    async def forbid(self: FakeApiServer, request: web.Request) -> web.Response:
        body = {"kind": "Status", "code": 401, "message": "Unauthorized"}
        return web.json_response(body, status=401)

    monkeypatch.setattr(FakeApiServer, "_proxy", forbid)
    async with bench(pod_access="proxy") as b:
        b.apply()
        await b.run_pod()
        await b.until(lambda: b.condition("Ready") == ("Unknown", "PodUnreachable"), timeout=25)
