"""What the operator does when something is lost, late, refused or not its own."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from rollout_operator.api.names import MANAGED_BY_LABEL, MANAGER
from rollout_operator.control.pod_client import PodClient, Unreachable
from rollout_operator.plan.plan import make_plan
from rollout_pod.protocol import StateDocument
from tests.support.fake_apiserver import Fault, Json, Refused, Request
from tests.support.fake_pod_admin import FakePodAdmin
from tests.support.operator_kit import Bench, bench, running_status

SOURCE = {"source": {"path": "/ckpt/{version}"}}
UNLABELLED = {"metadata": {"labels": {MANAGED_BY_LABEL: None}}}


async def test_a_restart_in_peace_writes_nothing():
    async with bench() as b:
        admin = await b.serving()
        await b.stop()
        start, documents = len(b.server.requests), list(admin.documents)
        await b.start()
        await b.quiet(1)
        assert [str(r) for r in b.server.requests[start:] if r.write] == []
        assert admin.documents == documents


async def test_deleted_and_made_anew_while_the_operator_is_down():
    async with bench() as b:
        await b.serving()
        await b.stop()
        b.server.remove("rolloutreplicas", "qwen")
        assert b.server.get("pods", "qwen-0")["metadata"]["deletionTimestamp"]
        b.apply()
        await b.start()
        await b.ready("WaitingForPredecessor", "False")
        b.server.remove("pods", "qwen-0")
        pod = await b.until(lambda: b.server.get("pods", "qwen-0"))
        replica = b.server.get("rolloutreplicas", "qwen")
        assert pod["metadata"]["ownerReferences"][0]["uid"] == replica["metadata"]["uid"]


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("method", ["GET", "POST", "PATCH"])
async def test_an_api_server_in_trouble_is_tried_again(status: int, method: str):
    async with bench() as b:
        fault = Fault(lambda r: r.method == method, status, count=2, headers={"Retry-After": "1"})
        b.server.faults.append(fault)
        await b.serving()
        assert fault.count == 0
        assert b.server.writes().count("POST pods") <= 3
        assert len([r for r in b.server.requests if str(r) == "PATCH services/qwen"]) <= 3


async def test_lost_watch_events_heal():
    async with bench(resync_seconds=2) as b:
        admin = await b.serving()
        b.server.muted = {"rolloutreplicas", "pods"}
        b.patch(paused=True)
        await b.until(lambda: admin.documents[-1].paused)
        b.server.remove("pods", "qwen-0")
        await b.until(lambda: b.server.get("pods", "qwen-0"), "a new pod")


async def test_an_expired_watch_misses_nothing():
    async with bench() as b:
        admin = await b.serving()
        b.server.muted = {"rolloutreplicas"}
        b.patch(paused=True)
        b.server.muted = set()
        b.server.expire_watches()
        await b.ready("Paused")
        assert admin.documents[-1].paused


async def test_a_fenced_pod_is_replaced():
    async with bench() as b:
        admin = await b.serving()
        admin.fence = True
        start = len(b.server.requests)
        b.patch(paused=True)
        await b.until(lambda: "DELETE pods/qwen-0" in b.server.writes(start))
        asked = [str(r) for r in b.server.requests[start:]]
        # the replica is read afresh before anything is destroyed
        assert "GET rolloutreplicas/qwen" in asked[: asked.index("DELETE pods/qwen-0")]
        await b.until(lambda: ("Normal", "Fenced") in b.server.events())
        b.server.remove("pods", "qwen-0")
        await b.run_pod()
        await b.ready("Paused")
        assert b.server.writes(start).count("DELETE pods/qwen-0") == 1


async def test_after_a_backup_was_restored_a_pod_that_saw_what_came_later_is_replaced():
    async with bench() as b:
        admin = await b.serving()
        for paused in (True, False):
            b.patch(paused=paused)
            await b.ready("Paused" if paused else "Serving")
        assert admin.documents[-1].generation == 3
        await b.quiet()
        start = len(b.server.requests)
        b.server.change("rolloutreplicas", "qwen", {"metadata": {"generation": 1}})
        await b.until(lambda: "DELETE pods/qwen-0" in b.server.writes(start))
        b.server.remove("pods", "qwen-0")
        new = await b.run_pod()
        await b.ready("Serving")
        assert [document.generation for document in new.documents] == [1]
        assert b.server.writes(start).count("DELETE pods/qwen-0") == 1
        restarts = b.status()["restarts"]
        assert restarts["byReason"] == [{"reason": "Fenced", "count": 1}]
        assert restarts["consecutive"] == 0


async def test_a_pod_that_refused_is_told_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_operator.steer._REFUSED_RETRY_S", 1.0)
    async with bench() as b:
        admin = await b.serving()
        admin.refuse = True
        b.patch(paused=True)
        await b.ready("DocumentRefused", "False")
        admin.refuse = False
        await b.ready("Paused")
        assert admin.documents[-1].paused
        assert ("Warning", "DocumentRefused") in b.server.events()


async def test_a_pod_with_no_room_for_what_it_is_told_is_told_of(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rollout_operator.steer._REFUSED_RETRY_S", 1.0)
    async with bench() as b:
        admin = await b.serving()
        admin.full = True
        b.patch(paused=True)
        await b.ready("DocumentRefused", "False")
        assert "No space left on device" in b.message()
        admin.full = False
        await b.ready("Paused")


async def test_an_operator_behind_the_times_reads_afresh_and_destroys_nothing():
    async with bench() as b:
        admin = await b.serving()
        # another operator told the pod of a generation whose event we have not had
        b.server.muted = {"rolloutreplicas"}
        b.patch(paused=True)
        admin.documents.append(admin.documents[-1].model_copy(update={"generation": 2}))
        b.server.change("pods", "qwen-0", {"metadata": {"annotations": {"n": "1"}}})
        await admin.become(owner=admin.documents[-1].owner, generation=2)
        await b.until(lambda: admin.documents[-1].paused)
        assert not [w for w in b.server.writes() if w.startswith("DELETE")]


def _other_model(b: Bench) -> None:
    b.patch(model="other")


def _made_anew(b: Bench) -> None:
    b.server.remove("rolloutreplicas", "qwen")
    b.apply(model="other")


@pytest.mark.parametrize("meanwhile", [_other_model, _made_anew])
async def test_no_pod_is_made_for_a_spec_that_is_not_the_newest(
    meanwhile: Callable[[Bench], None],
):
    async with bench() as b:
        await b.serving()
        start = len(b.server.requests)
        b.server.muted = {"rolloutreplicas", "services"}
        meanwhile(b)
        b.server.remove("pods", "qwen-0")
        await b.until(lambda: b.server.get("pods", "qwen-0"))
        await b.quiet()
        (made,) = [r.body for r in b.server.requests[start:] if str(r) == "POST pods"]
        assert "other" in made["spec"]["containers"][0]["args"]
        replica = b.server.get("rolloutreplicas", "qwen")
        assert made["metadata"]["ownerReferences"][0]["uid"] == replica["metadata"]["uid"]


async def test_no_pod_is_made_for_a_replica_that_is_going():
    async with bench() as b:
        await b.serving()
        start = len(b.server.requests)
        b.server.muted = {"rolloutreplicas"}
        going = {"deletionTimestamp": "2027-01-01T00:00:00Z"}
        b.server.change("rolloutreplicas", "qwen", {"metadata": going})
        b.server.remove("pods", "qwen-0")
        await b.until(lambda: b.status()["phase"] == "Terminating")
        await b.quiet()
        assert "POST pods" not in b.server.writes(start)


async def test_no_pod_is_destroyed_for_a_spec_that_is_not_the_newest():
    async with bench() as b:
        admin = await b.serving()
        start = len(b.server.requests)
        changed_back = False

        def change_back(request: Request) -> bool:
            # after the plan was made, before it is done
            nonlocal changed_back
            if not changed_back and str(request) == "GET rolloutreplicas/qwen":
                changed_back = True
                b.patch(model="m")
            return False

        b.server.faults.append(Fault(change_back, 500))
        b.patch(model="other")
        b.server.muted = {"rolloutreplicas"}
        await b.until(lambda: admin.documents[-1].generation == 3)
        await b.quiet()
        assert changed_back
        assert not [w for w in b.server.writes(start) if w.startswith("DELETE")]


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        ("services", "qwen"),
        ("services", "qwen-nodes"),
        ("secrets", "qwen-admin"),
        ("pods", "qwen-0"),
    ],
)
async def test_a_foreign_object_is_reported_and_left_alone(resource: str, name: str):
    async with bench() as b:
        foreign = b.server.put(resource, {"metadata": {"name": name}, "spec": {"of": "another"}})
        b.apply()
        await b.ready("ForeignObject", "False")
        await b.quiet()
        assert b.condition("Stalled") == ("True", "ForeignObject")
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert name in ready["message"]
        assert b.server.get(resource, name) == foreign
        assert set(b.server.writes()) == {"PATCH rolloutreplicas/qwen/status"}


@pytest.mark.parametrize("moment", ["GET", "PATCH"])
async def test_a_service_that_becomes_somebody_elses_meanwhile_is_not_taken(
    moment: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollout_operator.plan.plan.FOREIGN_RETRY_S", 1.0)
    async with bench() as b:
        await b.serving()
        foreign: Json = {}

        def swap(request: Request) -> bool:
            # after the plan was made, before it is done: at the look before the write, or at the write
            if str(request) == f"{moment} services/qwen" and not foreign:
                b.server.remove("services", "qwen")
                body = {"metadata": {"name": "qwen"}, "spec": {"of": "another"}}
                foreign.update(b.server.put("services", body))
            return False

        b.server.faults.append(Fault(swap, 500))
        b.server.change("services", "qwen", {"spec": {"selector": {"rollout.dev/role": "x"}}})
        await b.ready("ForeignObject", "False")
        await b.quiet()
        assert b.server.get("services", "qwen") == foreign
        assert not [w for w in b.server.writes() if w.startswith("DELETE")]
        b.server.remove("services", "qwen")
        await b.ready("Serving")


async def test_a_bad_template_is_refused_with_the_servers_words_and_mended():
    async with bench() as b:
        b.server.admit = _no_typo
        b.apply(template={"spec": {"nodeSelectr": {}}})
        await b.ready("InvalidTemplate", "False")
        assert b.condition("Stalled") == ("True", "InvalidTemplate")
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert 'unknown field "spec.nodeSelectr"' in ready["message"]
        await b.quiet()
        assert b.server.writes().count("POST pods") == 1
        b.patch(template={"spec": {"nodeSelectr": None}})
        await b.run_pod()
        await b.ready("Serving")


async def test_a_bad_template_does_not_cost_the_pod_that_works():
    async with bench() as b:
        admin = await b.serving()
        b.server.admit = _no_typo
        start = len(b.server.requests)
        b.patch(template={"spec": {"nodeSelectr": {}}})
        await b.ready("InvalidTemplate", "False")
        assert b.condition("Available") == ("True", "Serving")
        assert not [w for w in b.server.writes(start) if w.startswith("DELETE")]
        # and it goes on to be steered
        b.patch(paused=True)
        await b.until(lambda: admin.documents[-1].paused)
        await b.until(lambda: b.condition("Paused") == ("True", "Paused"))
        b.patch(paused=False, template={"spec": None})
        await b.ready("Serving")
        assert not [w for w in b.server.writes(start) if w.startswith("DELETE")]


@pytest.mark.parametrize(
    ("container", "field"),
    [
        ({"image": "x"}, "containers[0].name"),
        ({"name": "engine", "env": [{"name": []}]}, "containers[engine].env[0].name"),
    ],
)
async def test_a_template_of_the_wrong_shape_names_the_field(container: Json, field: str):
    async with bench() as b:
        b.apply(template={"spec": {"containers": [container]}})
        await b.ready("InvalidTemplate", "False")
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert f"spec.template.spec.{field}" in ready["message"]


async def test_a_fault_of_the_operator_is_told_once_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
):
    failures = 0

    def faulty(replica: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal failures
        if replica.spec.paused:
            failures += 1
            raise TypeError(f"unhashable, for the time {failures}")
        return make_plan(replica, *args, **kwargs)

    monkeypatch.setattr("rollout_operator.reconcile.make_plan", faulty)
    async with bench() as b:
        await b.serving()
        start = len(b.server.requests)
        b.patch(paused=True)
        await b.ready("InternalError", "False")
        await b.until(lambda: failures == 3)
        await b.until(lambda: ("Warning", "InternalError") in b.server.events())
        assert b.server.writes(start) == ["PATCH rolloutreplicas/qwen/status"]
        assert b.condition("Reconciling") == ("True", "InternalError")
        assert b.condition("Stalled") == ("False", "NotStalled")
        assert b.condition("Available") == ("True", "Serving")
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert ready["message"].startswith("TypeError: unhashable, for the time 1;")
        assert ready["observedGeneration"] == 2
        b.patch(paused=False)
        await b.ready("Serving")
        assert b.server.events().count(("Warning", "InternalError")) == 1


async def test_a_spec_that_cannot_be_understood():
    async with bench() as b:
        b.apply(gpus="many")
        await b.ready("InvalidSpec", "False")
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert ready["message"].startswith("spec.gpus: ")
        assert set(b.server.writes()) == {"PATCH rolloutreplicas/qwen/status"}


async def test_an_evicted_pod_is_replaced():
    async with bench() as b:
        await b.serving()
        old = b.server.get("pods", "qwen-0")
        gone = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
        aged = {"creationTimestamp": "2026-01-01T00:00:00Z"}
        b.server.change("pods", "qwen-0", {"status": gone, "metadata": aged})
        await b.until(lambda: b.server.get("pods", "qwen-0")["metadata"].get("deletionTimestamp"))
        b.server.remove("pods", "qwen-0")
        new = await b.until(lambda: b.server.get("pods", "qwen-0"))
        assert new["metadata"]["uid"] != old["metadata"]["uid"]


async def test_an_engine_that_does_not_start_stalls_and_recovers_with_the_spec():
    async with bench() as b:
        b.apply(model="/no/such")
        await b.until(lambda: b.server.get("pods", "qwen-0"))
        status = running_status("127.0.0.2", ready=False, restarts=1)
        engine = status["containerStatuses"][0]
        engine["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
        message = "Traceback\nOSError: /no/such is not a folder\n"
        engine["lastState"] = {"terminated": {"exitCode": 1, "message": message}}
        b.server.change("pods", "qwen-0", {"status": status})
        await b.ready("EngineFailed", "False")
        assert b.condition("Stalled") == ("True", "EngineFailed")
        ready = next(c for c in b.status()["conditions"] if c["type"] == "Ready")
        assert "OSError: /no/such is not a folder" in ready["message"]
        assert "Traceback" not in ready["message"]
        b.patch(model="/models/base")
        await b.until(lambda: b.server.get("pods", "qwen-0")["metadata"].get("deletionTimestamp"))
        b.server.remove("pods", "qwen-0")
        await b.run_pod()
        await b.ready("Serving")
        assert b.condition("Stalled") == ("False", "NotStalled")


async def test_an_unreachable_pod_is_not_touched():
    async with bench() as b:
        b.apply()
        await b.until(lambda: b.server.get("pods", "qwen-0"))
        start = len(b.server.requests)
        # kubelet calls it ready, nobody listens there
        b.server.change("pods", "qwen-0", {"status": running_status("127.0.0.99")})
        await b.until(lambda: b.condition("Ready") == ("Unknown", "PodUnreachable"), timeout=20)
        assert set(b.server.writes(start)) <= {"PATCH rolloutreplicas/qwen/status"}
        b.server.change("pods", "qwen-0", {"status": {"podIP": None}})
        await b.run_pod()
        await b.ready("Serving")


async def test_a_pod_that_cannot_be_reached_is_told_when_its_poll_gets_through(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rollout_operator.control.pod_watch._BACKOFF_S", (0.2, 0.5))
    puts, polls = [], []
    put_desired, get_state = PodClient.put_desired, PodClient.get_state

    async def put(*args: Any) -> StateDocument:
        puts.append(args)
        return await put_desired(*args)

    async def get(*args: Any, **kwargs: Any) -> StateDocument:
        polls.append(args)
        return await get_state(*args, **kwargs)

    monkeypatch.setattr(PodClient, "put_desired", put)
    monkeypatch.setattr(PodClient, "get_state", get)
    async with bench() as b:
        b.apply()
        await b.until(lambda: b.server.get("pods", "qwen-0"))
        admin = FakePodAdmin(b.token())
        async with admin.running("127.0.0.77", b.port):
            b.server.change("pods", "qwen-0", {"status": running_status(admin.ip)})
            await b.ready("Serving")
            await b.quiet()
        # it is as it was when it comes back: a held poll would have no news
        tried = len(polls)
        await b.until(lambda: len(polls) > tried + 1)
        told = len(puts)
        for n in range(4):
            b.server.change("pods", "qwen-0", {"metadata": {"annotations": {"n": str(n)}}})
            b.patch(paused=n % 2 == 0)
            await asyncio.sleep(0.2)
        b.patch(paused=True)
        await asyncio.sleep(0.5)
        assert len(puts) == told
        async with admin.running("127.0.0.77", b.port):
            await b.until(lambda: admin.documents[-1].paused, timeout=2)
            await b.ready("Paused")


async def test_a_pod_whose_polls_fail_is_told_all_the_same_if_it_takes_connections(
    monkeypatch: pytest.MonkeyPatch,
):
    async def cut(*args: Any, **kwargs: Any) -> StateDocument:
        raise Unreachable("HTTP 504: a proxy on the way holds no poll")

    async with bench() as b:
        admin = await b.serving()
        monkeypatch.setattr(PodClient, "get_state", cut)
        await admin.become()
        b.patch(paused=True)
        await b.until(lambda: admin.documents[-1].paused, timeout=5)


async def test_a_token_that_changed_is_read_again():
    async with bench() as b:
        admin = await b.serving()
        admin.token = "another"
        b.patch(paused=True)
        await b.ready("Unauthorized", "False")
        assert b.condition("Available") == ("True", "Serving")
        b.server.change("secrets", "qwen-admin", {"data": {"token": "YW5vdGhlcg=="}})
        await b.ready("Paused")
        assert not [w for w in b.server.writes() if w.startswith("DELETE")]


async def test_a_deleted_secret_is_made_anew_before_the_next_pod():
    async with bench() as b:
        await b.serving()
        start, token = len(b.server.requests), b.token()
        b.server.remove("secrets", "qwen-admin")
        b.server.remove("pods", "qwen-0")
        await b.run_pod()
        await b.ready("Serving")
        writes = b.server.writes(start)
        assert writes.index("POST secrets") < writes.index("POST pods")
        assert b.token() != token


async def test_a_deleted_service_comes_back():
    async with bench() as b:
        await b.serving()
        b.server.remove("services", "qwen")
        await b.until(lambda: b.server.get("services", "qwen"))


async def test_a_service_that_lost_its_label_gets_it_back_and_the_pod_is_steered():
    async with bench() as b:
        admin = await b.serving()
        start, uid = len(b.server.requests), b.server.get("services", "qwen")["metadata"]["uid"]
        b.server.change("services", "qwen", UNLABELLED)
        b.patch(paused=True)
        await b.ready("Paused")
        assert admin.documents[-1].paused
        await b.quiet()
        meta = b.server.get("services", "qwen")["metadata"]
        assert meta["labels"][MANAGED_BY_LABEL] == MANAGER and meta["uid"] == uid
        assert b.server.writes(start).count("PATCH services/qwen") == 1


async def test_a_pod_that_lost_its_label_is_steered_on_and_its_end_is_seen(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rollout_operator.plan.plan.UNWATCHED_RETRY_S", 2.0)
    async with bench() as b:
        admin = await b.serving()
        start = len(b.server.requests)
        b.server.change("pods", "qwen-0", UNLABELLED)
        await b.quiet()
        b.patch(paused=True)
        await b.ready("Paused")
        assert admin.documents[-1].paused
        assert set(b.server.writes(start)) == {"PATCH rolloutreplicas/qwen/status"}
        # no watch tells of it
        b.server.remove("pods", "qwen-0")
        await b.run_pod()
        await b.ready("Paused")


async def test_a_service_that_somebody_changed_is_put_right():
    async with bench() as b:
        await b.serving()
        b.server.change("services", "qwen", {"spec": {"selector": {"rollout.dev/role": "x"}}})
        await b.until(
            lambda: (
                b.server.get("services", "qwen")["spec"]["selector"]["rollout.dev/role"] == "head"
            )
        )


@pytest.mark.parametrize(
    ("request_", "child"),
    [("POST secrets", "Secret qwen-admin"), ("PATCH services/qwen", "Service qwen")],
)
@pytest.mark.parametrize(
    ("status", "words", "reason"),
    [
        (403, "exceeded quota: objects", "QuotaExceeded"),
        (403, "may not create it", "PodForbidden"),
        (400, 'admission webhook "a.b" denied the request', "PodForbidden"),
    ],
)
async def test_a_child_that_is_refused_is_told_and_no_pod_is_made_without_it(
    request_: str,
    child: str,
    status: int,
    words: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rollout_operator.apply.executor.FORBIDDEN_RETRY_S", 1.0)
    async with bench() as b:
        fault = Fault(lambda r: str(r) == request_, status, count=10**6, message=words)
        b.server.faults.append(fault)
        b.apply()
        await b.ready(reason, "False")
        assert b.condition("Reconciling") == ("True", reason)
        assert b.message() == f"the API server refuses {child}: {words}"
        await b.until(lambda: ("Warning", reason) in b.server.events())
        tries = fault.count
        await b.until(lambda: fault.count < tries)
        assert b.server.writes().count("PATCH rolloutreplicas/qwen/status") == 1
        assert "POST pods" not in b.server.writes()
        fault.count = 0
        await b.run_pod()
        await b.ready("Serving")


@pytest.mark.parametrize("status", [400, 403, 422])
@pytest.mark.parametrize("gone", [False, True])
async def test_a_service_that_is_refused_does_not_cost_the_pod_that_works(status: int, gone: bool):
    async with bench() as b:
        admin = await b.serving()
        fault = Fault(lambda r: str(r) == "PATCH services/qwen", status, count=10**6)
        b.server.faults.append(fault)
        start = len(b.server.requests)
        if gone:
            b.server.remove("services", "qwen")
        else:
            b.server.change("services", "qwen", {"spec": {"selector": {"rollout.dev/role": "x"}}})
        await b.ready("PodForbidden", "False")
        assert b.condition("Available") == ("True", "Serving")
        assert b.message() == "the API server refuses Service qwen: made to fail"
        b.patch(paused=True)
        await b.until(lambda: admin.documents[-1].paused)
        await b.until(lambda: b.condition("Paused") == ("True", "Paused"))
        b.patch(paused=False, weightVersion="v2", weights=SOURCE)
        await b.until(lambda: b.status()["weightVersion"] == "v2")
        if gone:
            # nor is it given up for one that nobody would reach
            b.patch(model="other")
            await b.until(lambda: admin.documents[-1].generation == 4)
            await b.quiet()
        assert not [w for w in b.server.writes(start) if w.startswith("DELETE")]
        assert b.server.writes(start).count("PATCH services/qwen") == 1


async def test_what_the_operator_may_not_read_is_told():
    async with bench() as b:
        words = 'cannot get resource "secrets"'
        fault = Fault(lambda r: str(r).startswith("GET secrets/"), 403, 10**6, words)
        b.server.faults.append(fault)
        b.apply()
        await b.ready("PodForbidden", "False")
        assert b.message() == f"the API server refuses the operator: {words}"
        await b.until(lambda: ("Warning", "PodForbidden") in b.server.events())
        tries = fault.count
        await b.until(lambda: fault.count < tries - 1)
        assert b.server.writes() == ["PATCH rolloutreplicas/qwen/status"]
        fault.count = 0
        await b.run_pod()
        await b.ready("Serving")


@pytest.mark.parametrize(
    ("words", "deleted"),
    [("exceeded quota: gpus", True), ('violates PodSecurity "restricted"', False)],
)
async def test_what_forbids_the_new_pod_decides_whether_the_old_one_goes(words: str, deleted: bool):
    async with bench() as b:
        await b.serving()

        def forbid(body: Json) -> None:
            raise Refused(403, "Forbidden", words)

        b.server.admit = forbid
        b.patch(model="other")
        await b.ready("PodReplacing" if deleted else "PodForbidden", "False")
        await b.quiet()
        assert ("DELETE pods/qwen-0" in b.server.writes()) is deleted
        if not deleted:
            assert b.condition("Available") == ("True", "Serving")


async def test_a_semantic_mistake_is_refused_likewise():
    async with bench() as b:

        def refuse(body: Json) -> None:
            raise Refused(422, "Invalid", "spec.containers[1].image: Required value")

        b.server.admit = refuse
        b.apply(template={"spec": {"containers": [{"name": "extra"}]}})
        await b.ready("InvalidTemplate", "False")


async def test_a_pod_that_somebody_was_faster_to_make_is_seen():
    async with bench() as b:
        b.server.muted = {"pods"}

        def interfere(body: Json) -> None:
            b.server.admit = lambda _: None
            b.server.put("pods", {"metadata": {"name": "qwen-0"}, "spec": {}})

        b.server.admit = interfere
        b.apply()
        await b.ready("ForeignObject", "False")
        assert b.server.writes().count("POST pods") == 1


async def test_a_status_write_that_conflicts_is_tried_again():
    async with bench() as b:
        await b.serving()
        conflict = Fault(lambda r: r.subresource == "status", 409)
        b.server.faults.append(conflict)
        b.patch(paused=True)
        await b.ready("Paused")
        assert conflict.count == 0


async def test_one_replica_in_trouble_does_not_hold_up_another():
    async with bench() as b:
        b.server.faults.append(Fault(lambda r: "sick" in r.name, 500, count=10**6))
        b.apply("sick")
        b.apply()
        await b.run_pod()
        await b.ready("Serving")


def _no_typo(body: Json) -> None:
    if "nodeSelectr" in body["spec"]:
        raise Refused(400, "BadRequest", 'strict decoding error: unknown field "spec.nodeSelectr"')
