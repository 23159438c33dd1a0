"""Images and videos in a rollout, with a tiny Qwen2-VL."""

import asyncio
import io
import threading
import uuid
from collections.abc import Iterator
from functools import lru_cache, partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_pod.engine import media
from rollout_pod.engine.base import EngineOutput, EngineRequest, InvalidField
from rollout_pod.engine.vllm import VllmEngine
from tests.support.engine_kit import GREEDY, ask, checkpoint
from tests.support.images import data_url, png
from tests.support.tiny_vision import END, IMAGE, START, VIDEO

KIND = "vision"
ARGS = ('--limit-mm-per-prompt={"image": 2, "video": 1}',)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = [5, 6, START, IMAGE, END, 8, 9]


@lru_cache
def mp4(folder: Path) -> bytes:
    import cv2

    path = folder / "video.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 4.0, (64, 64))
    dice = torch.Generator().manual_seed(3)
    for _ in range(8):
        frame = torch.randint(0, 256, (8, 8, 3), generator=dice, dtype=torch.uint8)
        writer.write(frame.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy())
    writer.release()
    return path.read_bytes()


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, hang: threading.Event, *args: Any) -> None:
        self.hang = hang
        super().__init__(*args)

    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        if self.path == "/hangs":
            self.hang.wait(60)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(png() if self.path == "/image.png" else b"no image")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    hang = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hang))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    hang.set()
    server.shutdown()
    thread.join()
    server.server_close()


async def see(engine: VllmEngine, *urls: str, **how: Any) -> EngineOutput:
    prompt = [*PROMPT, *[START, IMAGE, END] * (len(urls) - 1)]
    return await ask(engine, how.pop("prompt", prompt), GREEDY, media={"image": urls}, **how)


async def test_it_sees_what_transformers_sees(engine: VllmEngine) -> None:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    output = await see(engine, data_url(png()))
    prepared = await engine.prepare(PROMPT, media={"image": [data_url(png())]})
    assert isinstance(prepared.prompt, dict)
    ids = prepared.prompt["prompt_token_ids"]
    assert len(ids) == prepared.num_prompt_tokens > len(PROMPT)
    model = AutoModelForImageTextToText.from_pretrained(
        checkpoint("vision", 0), dtype=torch.float32
    ).eval()
    processor = AutoProcessor.from_pretrained(checkpoint("vision", 0)).image_processor
    seen = processor(images=[Image.open(io.BytesIO(png()))], return_tensors="pt")
    whole = torch.tensor([[*ids, *output.token_ids]])
    kinds = (whole == IMAGE).int()
    with torch.no_grad():
        logits = model(input_ids=whole, mm_token_type_ids=kinds, **seen).logits[0]
    assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == list(output.token_ids)


async def test_one_image_however_it_comes(engine: VllmEngine, site: str) -> None:
    inline = await see(engine, data_url(png()))
    linked = await see(engine, f"{site}/image.png")
    other = await see(engine, data_url(png(1)))
    assert linked.token_ids == inline.token_ids
    assert other.token_ids != inline.token_ids


async def test_a_partial_goes_on_from_the_original_prompt(engine: VllmEngine) -> None:
    urls = [data_url(png()), data_url(png(1, (120, 50)))]
    whole = await see(engine, *urls)
    for cut in (1, 17, 31):
        rest = await see(engine, *urls, generated=whole.token_ids[:cut], max_tokens=32 - cut)
        assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids


async def test_a_video(engine: VllmEngine, tmp_path_factory: pytest.TempPathFactory) -> None:
    video = {"video": [data_url(mp4(tmp_path_factory.mktemp("video")), "video/mp4")]}
    prompt = [5, START, VIDEO, END, 6]
    whole = await ask(engine, prompt, GREEDY, media=video)
    rest = await ask(
        engine, prompt, GREEDY, media=video, generated=whole.token_ids[:9], max_tokens=23
    )
    assert whole.token_ids[:9] + rest.token_ids == whole.token_ids
    mixed = {"image": [data_url(png())], **video}
    both = await ask(engine, [*PROMPT, *prompt], GREEDY, media=mixed)
    assert len(both.token_ids) == 32


async def test_caches_may_be_cleared_before_it_passes_the_gate(engine: VllmEngine) -> None:
    first = await see(engine, data_url(png(5)))
    prepared = await engine.prepare(PROMPT, media={"image": [data_url(png(5))]})
    assert await engine.clear_caches()
    params = engine.sampling_params(GREEDY, max_tokens=32)
    again = await engine.generate(
        EngineRequest(uuid.uuid4().hex, PROMPT, params, prepared=prepared)
    )
    assert again.token_ids == first.token_ids


async def test_prompt_log_probs_are_of_the_expanded_prompt(engine: VllmEngine) -> None:
    prepared = await engine.prepare(PROMPT, media={"image": [data_url(png())]})
    output = await ask(
        engine, PROMPT, GREEDY | {"prompt_logprobs": 0}, media={"image": [data_url(png())]},
        generated=(5, 6), max_tokens=2,
    )  # fmt: skip
    assert output.prompt_log_probs is not None
    assert len(output.prompt_log_probs) == prepared.num_prompt_tokens


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("file:///etc/hostname", "--allowed-local-media-path"),
        ("ftp://host/image.png", "ftp"),
        ("/etc/hostname", "must begin with"),
        ("data:image/png;base64,AAAA", ""),
        ("data:image/png;base64,???", ""),
        ("data:image/png,x", "base64"),
        ("data:", ""),
        ("http://", ""),
        ("http://127.0.0.1:1/x", ""),
        ("http://no.such.host.invalid/x", ""),
        ("{site}/missing", "404"),
        ("{site}/text", ""),
    ],
)
async def test_what_is_no_image_is_refused(
    engine: VllmEngine, site: str, url: str, names: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        await see(engine, data_url(png()), url.format(site=site))
    assert caught.value.field == "multi_modal_data.image.1"
    assert names in str(caught.value)


async def test_limits_of_a_download(
    engine: VllmEngine, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "MAX_BYTES", 100)
    with pytest.raises(InvalidField, match="longer than 100 bytes"):
        await see(engine, f"{site}/image.png")
    monkeypatch.setattr(media, "FETCH_S", 0.05)
    with pytest.raises(InvalidField, match="in time"):
        await see(engine, f"{site}/hangs")


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ([5, 6], 1),
        ([5, START, IMAGE, END, START, IMAGE, END], 1),
        ([5, START, IMAGE, END], 2),
        ([5, *[START, IMAGE, END] * 3], 3),
        ([5, *[START, IMAGE, END] * 9], 9),
    ],
)
async def test_placeholders_that_do_not_fit(
    engine: VllmEngine, prompt: list[int], count: int
) -> None:
    try:
        await see(engine, *[data_url(png(i)) for i in range(count)], prompt=prompt, max_tokens=2)
    except InvalidField as error:
        assert error.field == "multi_modal_data"  # noqa: PT017 - some are taken
    await _alive(engine)


@pytest.mark.parametrize(
    "tokens", [[IMAGE], [START, IMAGE, END], [START, VIDEO, END], [VIDEO] * 50, [START], [END]]
)
async def test_placeholders_without_data_end_no_engine(
    engine: VllmEngine, tokens: list[int]
) -> None:
    await ask(engine, [5, *tokens, 6], GREEDY, max_tokens=2)
    await see(engine, data_url(png()), generated=tuple(tokens), max_tokens=2)
    await _alive(engine)


async def test_many_at_once(engine: VllmEngine) -> None:
    alone = [await see(engine, data_url(png(i))) for i in range(4)]
    together = await asyncio.gather(*(see(engine, data_url(png(i % 4))) for i in range(16)))
    assert [o.token_ids for o in together] == [o.token_ids for o in alone] * 4


async def _alive(engine: VllmEngine) -> None:
    assert engine.dead_error() is None
    assert len((await see(engine, data_url(png()), max_tokens=3)).token_ids) == 3
