"""Images and videos of a prompt: fetched and rendered by vLLM, before the gate."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from rollout_pod.engine.base import InvalidField
from rollout_pod.engine.lifeline import words_of

FIELD = "multi_modal_data"
FETCH_S = 60.0
RENDER_S = 120.0
MAX_BYTES = 64 << 20
"""Of one item that is downloaded; one in the body is limited by the body's own limit."""

_SHOWN = 80


class Media:
    """Of one engine.

    Args:
        llm: vLLM's ``AsyncLLM``.
    """

    def __init__(self, llm: Any) -> None:
        self._config = llm.model_config
        self._renderer = llm.renderer
        self._connector: Any = None
        if self.is_supported:
            send_whole(llm.renderer, llm.model_config)

    @property
    def is_supported(self) -> bool:
        """Whether the model takes anything but text."""
        config = self._config
        if hasattr(config, "supports_multimodal_inputs"):
            return bool(config.supports_multimodal_inputs)
        return bool(config.is_multimodal_model)  # before 0.32

    async def render(
        self, prompt_token_ids: Sequence[int], media: Mapping[str, Sequence[str]]
    ) -> dict[str, Any]:
        """Fetch everything and make vLLM's input of it, all placeholders expanded.

        Raises:
            InvalidField: names the field and the item.
        """
        if not self.is_supported:
            kinds = " and ".join(f"{kind}s" for kind in media)
            raise InvalidField(FIELD, f"this model takes no {kinds}")
        for kind, urls in media.items():
            for at, url in enumerate(urls):
                self._check(f"{FIELD}.{kind}.{at}", url)
        data = {kind: await self._fetch_all(kind, urls) for kind, urls in media.items()}
        prompt = {"prompt_token_ids": list(prompt_token_ids), "multi_modal_data": data}
        try:
            async with asyncio.timeout(RENDER_S):
                (rendered,) = await self._renderer.render_cmpl_async([prompt])
        except TimeoutError as error:
            raise InvalidField(FIELD, f"rendering took longer than {RENDER_S:g} s") from error
        except Exception as error:  # whatever a processor raises is about these items
            raise InvalidField(FIELD, words_of(error)) from error
        if rendered.get("type") != "multimodal":
            raise InvalidField(FIELD, "this model takes images and videos by its encoder only")
        result: dict[str, Any] = rendered
        return result

    def _check(self, field: str, url: str) -> None:
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return
        if scheme == "file":
            if not self._config.allowed_local_media_path:
                raise InvalidField(
                    field, "file:// is refused; --allowed-local-media-path allows one folder"
                )
        elif scheme not in ("http", "https"):
            raise InvalidField(
                field, f"must begin with https://, http:// or data:, not {url[:_SHOWN]!r}"
            )

    async def _fetch_all(self, kind: str, urls: Sequence[str]) -> list[Any]:
        fetched = await asyncio.gather(
            *(self._fetch(f"{FIELD}.{kind}.{at}", kind, url) for at, url in enumerate(urls)),
            return_exceptions=True,
        )
        for each in fetched:
            if isinstance(each, BaseException):
                raise each
        return list(fetched)

    async def _fetch(self, field: str, kind: str, url: str) -> Any:
        connector = self._made_connector()
        fetch = connector.fetch_image_async if kind == "image" else connector.fetch_video_async
        try:
            async with asyncio.timeout(FETCH_S):
                return await fetch(url)
        except TimeoutError as error:
            raise InvalidField(field, f"{url[:_SHOWN]} did not come in time") from error
        except Exception as error:  # a name not found, an answer of 404, bytes that are no image
            raise InvalidField(
                field, f"{url[:_SHOWN]}: {words_of(error) or type(error).__name__}"
            ) from error

    def _made_connector(self) -> Any:
        if self._connector is None:
            from vllm import envs
            from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY

            config = self._config
            self._connector = MEDIA_CONNECTOR_REGISTRY.load(
                envs.VLLM_MEDIA_CONNECTOR,
                # a redirect could lead out of the allowed domains
                connection=_bounded_connection(follows=not config.allowed_media_domains),
                media_io_kwargs=config.multimodal_config.media_io_kwargs,
                allowed_local_media_path=config.allowed_local_media_path,
                allowed_media_domains=config.allowed_media_domains,
            )
        return self._connector


class _TooLong(Exception):
    """No ValueError: vLLM would say that the URL is wrong."""


def _bounded_connection(*, follows: bool) -> Any:
    from vllm.connections import HTTPConnection

    class Bounded(HTTPConnection):  # type: ignore[misc]  # vLLM is untyped here
        """Its downloads end at ``MAX_BYTES``, and leave no connection behind."""

        async def async_get_bytes(
            self,
            url: str,
            *,
            timeout: float | None = None,
            allow_redirects: bool = True,
            max_bytes: int | None = None,
        ) -> bytes:
            self._validate_http_url(url)
            limit = min(max_bytes or MAX_BYTES, MAX_BYTES)
            body = bytearray()
            async with (
                asyncio.timeout(timeout),
                await self.get_async_client() as client,
                client.get(
                    url, headers=self._headers(), allow_redirects=allow_redirects and follows
                ) as response,
            ):
                response.raise_for_status()
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > limit:
                        raise _TooLong(f"longer than {limit} bytes")
            return bytes(body)

    return Bounded(reuse_client=False)


def send_whole(renderer: Any, model_config: Any) -> None:
    """Let every rendered prompt hold its images, also those that the engine's cache has.

    vLLM leaves them out where it knows that they are in the engine's cache. But a prompt may wait
    behind the gate while an update clears that cache, and then nobody has them any more.
    """
    from vllm.multimodal.cache import MultiModalProcessorOnlyCache

    if model_config.multimodal_config.mm_processor_cache_gb <= 0:
        return
    whole = MultiModalProcessorOnlyCache(model_config)
    if hasattr(renderer, "_mm_processor_cache"):
        renderer._mm_processor_cache = whole
    else:  # before 0.32
        renderer.mm_processor.cache = whole
