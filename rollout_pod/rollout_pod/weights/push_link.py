"""A trainer's line to the pod: HTTP over the unix socket in the run folder."""

import http.client
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from pydantic import BaseModel, ValidationError

from rollout_pod.protocol import (
    PUSH_POLL_MAX_S,
    PUSH_SOCKET,
    Problem,
    PushGiveUp,
    PushOffer,
    PushStatus,
    PushTarget,
    StateDocument,
)
from rollout_pod.weights.push_errors import PodGone, PushError

ANSWER_S: Final = 10.0
"""How long an answer may take beyond the time that it is asked to be held."""

T = TypeVar("T", bound=BaseModel)


class Refusal(Exception):
    """The pod answered with a problem."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.detail)
        self.problem = problem


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket; for one request. Not httpx: its socket stays open, until garbage is
    collected, where nobody listens (httpcore 1.0's ``connect_unix_socket``).
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("pod", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Called by the first request."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(str(self._path))
        except BaseException:
            sock.close()
            raise
        self.sock = sock


class PushLink:
    """One pod's socket. Calls may come from several threads. All raise ``PodGone`` where nobody
    answers, and ``Refusal`` where the pod says no.
    """

    def __init__(self, run_dir: Path) -> None:
        self.socket = run_dir / PUSH_SOCKET

    def target(self) -> PushTarget:
        """Where the ranks are, and what they wait for."""
        return self._ask(PushTarget, "GET", "/v1/push/target")

    def state(self, *, after: str | None = None, hold_s: float = 0.0) -> StateDocument:
        """The state document, as soon as it is newer than ``after`` or ``hold_s`` are over."""
        query: dict[str, Any] = {"timeout": min(hold_s, PUSH_POLL_MAX_S)}
        if after is not None:
            query["after"] = after
        return self._ask(StateDocument, "GET", "/v1/push/state", hold_s=hold_s, query=query)

    def offer(self, offer: PushOffer) -> PushStatus:
        """Every rank has accepted it: the pod may switch."""
        return self._ask(PushStatus, "POST", "/v1/push/sessions", body=offer)

    def session(self, session: str, *, hold_s: float = 0.0) -> PushStatus:
        """How far it came; held until it is over or ``hold_s`` have passed."""
        query = {"timeout": min(hold_s, PUSH_POLL_MAX_S)}
        where = f"/v1/push/sessions/{session}"
        return self._ask(PushStatus, "GET", where, hold_s=hold_s, query=query)

    def give_up(self, session: str, reason: str) -> PushStatus:
        """The sender ends it."""
        body = PushGiveUp(reason=reason[:4000])
        return self._ask(PushStatus, "DELETE", f"/v1/push/sessions/{session}", body=body)

    def _ask(
        self,
        kind: type[T],
        method: str,
        where: str,
        *,
        hold_s: float = 0.0,
        query: Mapping[str, Any] | None = None,
        body: BaseModel | None = None,
    ) -> T:
        target = f"{where}?{urlencode(query)}" if query else where
        sent = body.model_dump_json() if body else None
        headers = {"Content-Type": "application/json"} if body else {}
        connection = _UnixConnection(self.socket, ANSWER_S + hold_s)
        try:
            connection.request(method, target, body=sent, headers=headers)
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise PodGone(
                f"no answer on {self.socket} ({type(error).__name__}: {error}): is the pod's "
                "container up, and is this its run folder?"
            ) from error
        finally:
            connection.close()
        try:
            if answer.status < 400:
                return kind.model_validate_json(content)
            raise Refusal(Problem.model_validate_json(content))
        except ValidationError as error:
            raise PushError(
                f"{method} {where}: HTTP {answer.status}, not an answer of this version: "
                f"{error.errors()[0]['msg']}"
            ) from error


class Watch(threading.Thread):
    """Follows one session until it is over, and sets ``ended`` then, or when nobody answers."""

    HOLD_S: Final = 5.0
    RETRY_S: Final = 0.2

    def __init__(self, link: PushLink, session: str, *, deadline: float) -> None:
        super().__init__(name=f"push {session}", daemon=True)
        self.status: PushStatus | None = None
        """The last one."""
        self.gone: PodGone | None = None
        """The pod ended, or is another by now."""
        self.ended = threading.Event()
        self.on_trouble: threading.Event | None = None
        """Set, too, when it ends in anything but a commit."""
        self._link = link
        self._session = session
        self._deadline = deadline

    @property
    def is_committed(self) -> bool:
        """Every rank serves it."""
        return self.status is not None and self.status.phase == "Committed"

    def run(self) -> None:
        """Until it is over or the deadline has come."""
        try:
            while (left := self._deadline - time.monotonic()) > 0:
                if self._look(min(self.HOLD_S, left)):
                    break
        finally:
            on_trouble = self.on_trouble
            if on_trouble is not None and not self.is_committed:
                on_trouble.set()
            self.ended.set()

    def _look(self, hold_s: float) -> bool:
        try:
            self.status = self._link.session(self._session, hold_s=hold_s)
        except Refusal as error:
            self.gone = PodGone(f"the pod started anew: {error}")
            return True
        except PodGone as error:
            self.gone = error
            return True
        except PushError as error:
            self.gone = PodGone(str(error))
            return True
        return self.status.over
