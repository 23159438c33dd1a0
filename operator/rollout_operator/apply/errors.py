"""What the API server may answer instead of an object."""

from typing import Final


class KubeError(Exception):
    """The API server refused a request, or could not be reached (``status`` 0)."""

    def __init__(
        self, status: int, reason: str, message: str, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds that the server asked us to wait."""

    @property
    def absent(self) -> bool:
        """There is no such object."""
        return self.status == 404

    @property
    def conflict(self) -> bool:
        """It exists already, or a precondition does not hold."""
        return self.status == 409

    @property
    def invalid(self) -> bool:
        """The object itself is wrong: sending it again is no use."""
        return self.status in _INVALID

    @property
    def forbidden(self) -> bool:
        """A quota, an admission policy or our permissions forbid it."""
        return self.status == 403


_INVALID: Final = (400, 413, 422)


class NoConfiguration(Exception):
    """Neither a service account nor a kubeconfig says where the API server is."""
