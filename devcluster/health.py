"""Asking the parts how they are."""

import ssl
import subprocess
from collections.abc import Callable

import httpx
from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed

from devcluster.certs import admin_token
from devcluster.parts import Part
from devcluster.settings import Settings

REQUEST_TIMEOUT_S = 5.0
COMMAND_TIMEOUT_S = 15.0
INTERVAL_S = 0.2
CHARACTERS = 120


def wait_until(check: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until the answer is true; false when ``timeout_s`` seconds are over. What ``check``
    raises goes through.
    """
    retrying = Retrying(
        stop=stop_after_delay(timeout_s),
        wait=wait_fixed(INTERVAL_S),
        retry=retry_if_result(lambda good: not good),
    )
    try:
        return retrying(check)
    except RetryError:
        return False


def fetch(settings: Settings, url: str) -> httpx.Response:
    """Get a URL of a part, as the admin and with the cluster's own authority.

    Raises:
        httpx.HTTPError: no answer.
    """
    if not url.startswith("https:"):
        return httpx.get(url, timeout=REQUEST_TIMEOUT_S, trust_env=False)
    context = ssl.create_default_context(cafile=settings.pki / "ca.crt")
    headers = {"Authorization": f"Bearer {admin_token(settings)}"}
    return httpx.get(
        url, timeout=REQUEST_TIMEOUT_S, verify=context, headers=headers, trust_env=False
    )


def ailment(settings: Settings, part: Part) -> str | None:
    """Return what is wrong with a part in a few words; None if nothing is."""
    if isinstance(part.health, tuple):
        try:
            done = subprocess.run(
                part.health, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return complaint(str(error))
        return None if done.returncode == 0 else complaint(done.stderr) or "no answer"
    try:
        answer = fetch(settings, part.health)
    except (httpx.HTTPError, OSError) as error:
        return str(error) or type(error).__name__
    if answer.status_code == 200:
        return None
    return f"{answer.status_code} {complaint(answer.text)}"


def complaint(text: str) -> str:
    """Shorten a health page to one line; of the API server's list only the failed checks."""
    failed = [line for line in text.splitlines() if line.startswith("[-]")]
    return " ".join(" ".join(failed or [text]).split())[:CHARACTERS]
