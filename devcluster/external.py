"""The user's own cluster in place of ours (``DEVCLUSTER=external``)."""

import shutil

from devcluster.errors import DevclusterError
from devcluster.network import run
from devcluster.settings import ALLOWED_CONTEXTS, Settings, context_allowed


def check_external(settings: Settings) -> str:
    """Return the context of the user's kubeconfig, if demo and tests may use it.

    Raises:
        DevclusterError: it does not look like a throw-away cluster, or it does not answer.
    """
    if shutil.which("kubectl") is None:
        raise DevclusterError("DEVCLUSTER=external needs kubectl on PATH")
    context = run("kubectl", "config", "current-context").strip()
    if not context_allowed(context, settings.allow_context):
        raise DevclusterError(
            f"The current context of KUBECONFIG is {context!r}, which does not begin with "
            f"{', '.join(ALLOWED_CONTEXTS)}. The tests create and delete things: if that is "
            f"what you want there, set DEVCLUSTER_ALLOW_CONTEXT={context}."
        )
    run("kubectl", "get", "--raw", "/readyz", "--request-timeout=15s")
    return context
