"""What a source's name looks like, and how to speak of it without giving secrets away. Pure."""

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

SCHEMES: Final = ("https", "http", "s3", "gs", "hf")
AUTHORIZATION: Final = "ROLLOUT_SOURCE_AUTHORIZATION"
"""Environment: the ``Authorization`` header of ``https://`` sources."""
QUERY: Final = "ROLLOUT_SOURCE_QUERY"
"""Environment: the query string of ``https://`` sources, as a shared access signature."""

_URL: Final = re.compile(r"(https?|s3|gs|hf)://([^@/?#\s]+)((?:/[^?#\s]*)?)")
_HUB: Final = re.compile(r"([^/@]+/[^/@]+)(?:@([^/@]+))?(?:/(.*))?")
_LINK: Final = re.compile(r"(\w+://)(?:[^\s/?#@]+@)?([^\s?#'\"]*)(?:[?#][^\s'\")]*)?")


def is_url(source: str) -> bool:
    """Whether a source is a URL; else it is a folder."""
    return source.partition("://")[0] in SCHEMES and "://" in source


@dataclass(frozen=True)
class Location:
    """A URL's parts; the path without slashes at its ends."""

    scheme: str
    host: str
    """Or bucket; for ``hf`` the owner."""
    path: str

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"{self.scheme}://{self.host}" + (f"/{self.path}" if self.path else "")


def parse_url(url: str) -> Location:
    """The parts of a folder's URL.

    Raises:
        ValueError: it is none, or holds what may be a secret; says so without the secret.
    """
    found = _URL.fullmatch(url)
    if not found:
        raise ValueError(
            f"{redact(url)!r} is no URL of a folder: expected one of "
            f"{', '.join(f'{scheme}://…' for scheme in SCHEMES)} without user, query, fragment or "
            "blank; credentials belong into the agent's environment (weights.source.secretRef)"
        )
    return Location(found[1], found[2], found[3].strip("/"))


@dataclass(frozen=True)
class HubFolder:
    """A folder of a model repository on the Hugging Face Hub."""

    repo: str
    revision: str | None
    folder: str


def parse_hub(location: Location) -> HubFolder:
    """``hf://owner/repo[@revision][/folder]``; a revision's slashes are written ``%2F``.

    Raises:
        ValueError: it is not of this form.
    """
    found = _HUB.fullmatch(f"{location.host}/{location.path}")
    if not found:
        raise ValueError(f"{location.url}: expected hf://owner/repo[@revision][/folder]")
    revision = unquote(found[2]) if found[2] else None
    return HubFolder(found[1], revision, (found[3] or "").strip("/"))


def redact(text: str, secrets: tuple[str, ...] = ()) -> str:
    """``text`` with all URLs in it without user, query and fragment, and without ``secrets``."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, "…")
    return _LINK.sub(r"\1\2", text)
