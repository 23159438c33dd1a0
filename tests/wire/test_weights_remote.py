"""Sources behind URLs, read from real servers: whole, broken, slow, changing, forbidden."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_pod.weights import remote
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.checkpoint import INDEX, SUMS
from rollout_pod.weights.headers import SourceError
from rollout_pod.weights.locations import AUTHORIZATION, QUERY
from rollout_pod.weights.remote import RemoteSource
from rollout_pod.weights.source_kinds import source_of, verify_all
from rollout_pod.weights.store_fsspec import BucketStore
from rollout_pod.weights.stores import Patience
from tests.support.file_server import (
    FileServer,
    compressed,
    cut_after,
    file_server,
    no_ranges,
    other_range,
    sha256,
    stall_after,
    status,
    wrong_bytes,
)
from tests.support.weights import mixed_tensors, write_checkpoint

QUICK = Patience(connect_s=5, stall_s=1, piece_s=20, attempts=3, first_wait_s=0.01)
SECRET = "s3cr3t"


@pytest.fixture
def server() -> Iterator[FileServer]:
    with file_server() as made:
        yield made


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*os.environ,):
        if name.startswith(("AWS_", "HF_", "GOOGLE_", "GCSFS_", "ROLLOUT_", "STORAGE_", "FSSPEC_")):
            monkeypatch.delenv(name)


def raw_of(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {n: bytes(t.reshape(-1).view(torch.uint8).numpy()) for n, t in tensors.items()}


def read(
    source: RemoteSource,
    done: set[int] | None = None,
    target: bytearray | None = None,
    cancel: threading.Event | None = None,
) -> dict[str, bytes]:
    """All tensors' bytes by name, as the agent gets them."""
    cancel = cancel or threading.Event()
    checkpoint = source.open(cancel)
    manifest = checkpoint.manifest("v")
    plan = make_plan(manifest.tensors, 4096)
    memory = bytearray(plan.nbytes) if target is None else target
    counted: list[int] = []
    source.read(
        checkpoint, memoryview(memory), plan.offsets, done=set() if done is None else done,
        progress=counted.append, cancel=cancel,
    )  # fmt: skip
    assert sum(counted) == manifest.nbytes
    verify_all(checkpoint, memoryview(memory), plan.offsets, cancel)
    return {
        tensor.name: bytes(memory[offset : offset + tensor.nbytes])
        for tensor, offset in zip(manifest.tensors, plan.offsets, strict=True)
    }


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("piece", [1000, 16 << 20])
def test_every_byte_is_read(
    server: FileServer, tmp_path: Path, shards: int, piece: int, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", piece)
    monkeypatch.setattr(remote, "HEAD_BYTES", 100)  # headers need a second request
    tensors = mixed_tensors(1)
    url = server.publish("step-1", write_checkpoint(tmp_path, tensors, shards))
    assert read(RemoteSource(url, QUICK)) == raw_of(tensors)
    assert {seen.headers.get("Accept-Encoding") for seen in server.seen} == {"identity"}


@pytest.mark.parametrize("at", ["headers", "tensors"])
def test_shards_are_read_side_by_side(server: FileServer, tmp_path: Path, at: str) -> None:
    """One connection alone gets a fraction of what a store has to give."""
    tensors = {name: torch.full((1000,), float(i)) for i, name in enumerate("ab")}
    url = server.publish("v", write_checkpoint(tmp_path, tensors, shards=2))
    both = threading.Barrier(2, timeout=5)

    def meet(*_: object) -> bool:
        both.wait()
        return False

    for path in server.files:
        if path.endswith(".safetensors"):
            server.faults[path] = [meet] if at == "headers" else [lambda *_: False, meet]
    # patience, so that no second try comes to the meeting instead
    assert read(RemoteSource(url, replace(QUICK, stall_s=20))) == raw_of(tensors)
    assert not both.broken, "one came alone"
    assert not any(server.faults.values()), "nobody came"


def test_nothing_but_the_agents_choice_of_source_is_needed(server: FileServer, tmp_path: Path):
    url = server.publish("a b%", write_checkpoint(tmp_path, mixed_tensors(1)))
    assert read(source_of(url.replace(" ", "%20").replace("b%", "b%25"))) == raw_of(
        mixed_tensors(1)
    )


SHARD = "model.safetensors"


@pytest.mark.parametrize(
    ("fault", "times"),
    [
        (status(503), 2),
        (status(429, Retry_After="0"), 2),
        (status(500), 2),
        (cut_after(0), 2),
        (cut_after(5000), 2),
        (stall_after(5000), 2),
    ],
    ids=["503", "429", "500", "dies", "dies midway", "stalls midway"],
)
def test_a_passing_fault_is_waited_out_and_what_came_is_kept(
    server: FileServer, tmp_path: Path, fault: Any, times: int
) -> None:
    tensors = mixed_tensors(1)
    url = server.publish("v", write_checkpoint(tmp_path, tensors))
    source = RemoteSource(url, QUICK)
    source.open(threading.Event())
    data = server.sent
    server.faults[f"/v/{SHARD}"] = [lambda *_: False, *[fault] * times]
    assert read(source) == raw_of(tensors)
    size = len(server.files[f"/v/{SHARD}"])
    assert server.sent - data < 2 * size + 2000, "once for the header, once for the tensors"


@pytest.mark.parametrize(
    ("fault", "words", "retryable"),
    [
        (status(404), "HTTP 404, missing; copy it there", True),
        (status(403), "HTTP 403, not allowed; check the credentials", False),
        (status(401), "HTTP 401, not allowed", False),
        (status(503), "HTTP 503", True),
        (status(302, Location=f"/v/{SHARD}?X-Sig={SECRET}"), "more than 5 redirects", False),
        (status(302, Location=f"http://127.0.0.1:1/x?sig={SECRET}"), "no connection", True),
        (status(302, Location=f"ftp://u:{SECRET}@h/x?sig={SECRET}"), "no URL", False),
        (status(418), "HTTP 418, not expected", False),
        (cut_after(0), "broke", True),
        (stall_after(0), "no byte in 1 s", True),
        (no_ranges, "does not answer range requests", False),
        (other_range, "answered another range", False),
        (compressed, "is sent as gzip", False),
    ],
)
@pytest.mark.parametrize("when", ["at the header", "at the tensors"])
def test_a_lasting_fault_is_told(
    server: FileServer, tmp_path: Path, fault: Any, words: str, retryable: bool, when: str
) -> None:
    url = server.publish("v", write_checkpoint(tmp_path, mixed_tensors(1)))
    if when == "at the tensors":
        server.faults[f"/v/{SHARD}"] = [lambda *_: False]
        words = words.replace("HTTP 404, missing; copy it there", "changed while it was read")
    server.always[f"/v/{SHARD}"] = fault
    with pytest.raises(SourceError) as caught:
        read(RemoteSource(url, QUICK))
    assert words in str(caught.value)
    assert f"{url}/{SHARD}" in str(caught.value)
    assert SECRET not in str(caught.value)
    if "changed" not in words:
        assert caught.value.retryable is retryable


def test_content_that_changes_between_header_and_bytes(server: FileServer, tmp_path: Path) -> None:
    url = server.publish("v", write_checkpoint(tmp_path, mixed_tensors(1)))
    other = write_checkpoint(tmp_path / "other", mixed_tensors(2))
    source = RemoteSource(url, QUICK)
    cancel = threading.Event()
    checkpoint = source.open(cancel)
    server.publish("v", other)
    plan = make_plan(checkpoint.manifest("v").tensors, 4096)
    done = {7}
    with pytest.raises(SourceError, match="changed while it was read"):
        source.read(
            checkpoint, memoryview(bytearray(plan.nbytes)), plan.offsets, done=done,
            progress=lambda _: None, cancel=cancel,
        )  # fmt: skip
    assert done == set(), "what came before is of no use"
    assert source.open(cancel).fingerprint != checkpoint.fingerprint


def with_sums(folder: Path) -> Path:
    """With what ``sha256sum`` writes."""
    files = sorted(folder.glob("*.safetensors"))
    lines = [f"{sha256(file.read_bytes())}  {file.name}" for file in files]
    (folder / SUMS).write_text("\n".join(lines) + "\n")
    return folder


def test_content_without_a_name_is_never_taken_for_what_is_there(
    server: FileServer, tmp_path: Path
) -> None:
    tensors = mixed_tensors(1)
    folder = with_sums(write_checkpoint(tmp_path, tensors))
    source = RemoteSource(server.publish("v", folder), QUICK)
    cancel = threading.Event()
    assert source.open(cancel).fingerprint == source.open(cancel).fingerprint
    server.tags = False
    assert source.open(cancel).fingerprint != source.open(cancel).fingerprint
    assert read(source) == raw_of(tensors)


@pytest.mark.parametrize("known", [True, False], ids=["hash known", "hash unknown"])
def test_content_without_a_name_that_changes_in_the_middle(
    server: FileServer, tmp_path: Path, monkeypatch, known: bool
) -> None:
    """Of the same size, so that only the hash can tell; without one it is not even begun."""
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(remote, "READERS", 1)  # the first piece before the change, the rest after
    folder = write_checkpoint(tmp_path, {"a": torch.arange(40_000.0)})
    url = server.publish("v", with_sums(folder) if known else folder)
    other = write_checkpoint(tmp_path / "other", {"a": torch.arange(40_000.0) + 1}) / SHARD
    path = f"/v/{SHARD}"
    assert len(server.files[path]) == other.stat().st_size

    def change(*_: object) -> bool:
        server.files[path] = other.read_bytes()
        return False  # this answer still has the bytes from before

    server.tags = False
    server.faults[path] = [lambda *_: False, change]
    with pytest.raises(SourceError) as caught:
        read(RemoteSource(url, QUICK))
    told = str(caught.value)
    if known:
        assert f"{SHARD}: wrong bytes, SHA-256 is" in told
        assert len(server.requests(SHARD)) == 1 + 16, "the head and all pieces"
    else:
        assert f"{url}/{SHARD}: the server sends neither ETag nor Last-Modified" in told
        assert f"use a server that sends one of them, or write {SUMS} there" in told
        assert not caught.value.retryable
        assert len(server.requests(SHARD)) == 1, "the head only"


def test_content_without_a_name_needs_the_hash_of_each_file(
    server: FileServer, tmp_path: Path
) -> None:
    folder = with_sums(write_checkpoint(tmp_path, mixed_tensors(1), 2))
    first, second = (folder / SUMS).read_text().splitlines()
    (folder / SUMS).write_text(first + "\n")
    source = RemoteSource(server.publish("v", folder), QUICK)
    assert source.open(threading.Event()).files, "with tags it is taken"
    server.tags = False
    with pytest.raises(SourceError, match=f"{second.split()[1]}: the server sends neither"):
        source.open(threading.Event())


def test_a_read_goes_on_from_the_pieces_that_are_there(
    server: FileServer, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    tensors = {"a": torch.arange(40_000.0)}
    url = server.publish("v", write_checkpoint(tmp_path, tensors))
    done: set[int] = set()
    target = bytearray(160_000)
    server.faults[f"/v/{SHARD}"] = [lambda *_: False] * 9
    server.always[f"/v/{SHARD}"] = status(503)
    with pytest.raises(SourceError, match="HTTP 503"):
        read(RemoteSource(url, QUICK), done, target)
    assert 0 < len(done) < 16
    first, missing = len(server.requests(SHARD)), 16 - len(done)
    # At another path: requests that the first read gave up may still be waiting for an answer.
    again = RemoteSource(server.publish("again", tmp_path), replace(QUICK, stall_s=10))
    assert read(again, done, target) == raw_of(tensors)
    asked = [seen.path for seen in server.seen[first:] if seen.path.startswith("/again/")]
    assert asked.count(f"/again/{SHARD}") == 1 + missing, "the head, and each missing piece once"


@pytest.mark.parametrize("at", ["header", "tensors"])
def test_cancel_ends_a_wait_for_a_server(server: FileServer, tmp_path: Path, at: str) -> None:
    url = server.publish("v", write_checkpoint(tmp_path, mixed_tensors(1)))
    if at == "tensors":
        server.faults[f"/v/{SHARD}"] = [lambda *_: False]
    server.always[f"/v/{SHARD}"] = stall_after(10)
    source = RemoteSource(url, Patience(stall_s=3600))
    cancel = threading.Event()
    timer = threading.Timer(0.3, cancel.set)
    timer.start()
    with pytest.raises(SourceError, match="reading was cancelled"):
        read(source, cancel=cancel)
    timer.join()


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, f"{SHARD}: HTTP 404"),
        ({SHARD: b""}, "truncated, 0 bytes"),
        ({SHARD: b"1234567"}, "truncated, 7 bytes"),
        ({SHARD: b"\xff" * 100}, "no safetensors file"),
        ({INDEX: b"{"}, "cannot be read"),
        ({INDEX: b'{"weight_map": {"a": "../x"}}'}, "no plain file name"),
        ({INDEX: b'{"weight_map": {"a": "x.safetensors"}}'}, "x.safetensors: HTTP 404, missing"),
        ({SUMS: b"nonsense"}, "line 1 is none of sha256sum's"),
    ],
)
def test_broken_folders(server: FileServer, files: dict[str, bytes], words: str) -> None:
    server.files = {f"/v/{name}": content for name, content in files.items()}
    if SUMS in files:
        server.files[f"/v/{SHARD}"] = b"x"
    with pytest.raises(SourceError) as caught:
        read(RemoteSource(f"{server.url}/v", QUICK))
    assert words in str(caught.value)


@pytest.mark.parametrize("length", [-1, 1])
def test_a_wrong_length(server: FileServer, tmp_path: Path, length: int) -> None:
    url = server.publish("v", write_checkpoint(tmp_path, mixed_tensors(1)))
    content = server.files[f"/v/{SHARD}"]
    server.files[f"/v/{SHARD}"] = content[:-1] if length < 0 else content + b"x"
    with pytest.raises(SourceError, match=r"truncated, |its header accounts for"):
        read(RemoteSource(url, QUICK))


@pytest.mark.parametrize("kind", ["remote", "folder"])
def test_wrong_bytes_are_found_where_sums_are_known(
    server: FileServer, tmp_path: Path, kind: str
) -> None:
    tensors = mixed_tensors(1)
    folder = with_sums(write_checkpoint(tmp_path, tensors, 2))
    files = sorted(folder.glob("*.safetensors"))
    url = server.publish("v", folder)
    source: Any = RemoteSource(url, QUICK) if kind == "remote" else source_of(str(folder))
    assert read(source) == raw_of(tensors)
    if kind == "remote":
        server.faults[f"/v/{files[1].name}"] = [lambda *_: False, wrong_bytes]
    else:
        content = files[1].read_bytes()
        files[1].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        SourceError, match=rf"{files[1].name}: wrong bytes, SHA-256 is \w+, expected"
    ):
        read(source)


# --- credentials ---


def test_tls_credentials_and_what_is_said_of_them(tmp_path: Path, monkeypatch) -> None:
    tensors = mixed_tensors(1)
    folder = write_checkpoint(tmp_path / "v", tensors)
    with file_server(tls=tmp_path) as server, file_server() as elsewhere:
        url = server.publish("v", folder)
        with pytest.raises(SourceError, match=r"TLS failed.*set SSL_CERT_FILE") as caught:
            read(RemoteSource(url, QUICK))
        assert not caught.value.retryable

        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert read(RemoteSource(url, QUICK)) == raw_of(tensors)

        server.wanted_token = f"Bearer {SECRET}"
        with pytest.raises(SourceError, match="HTTP 403, not allowed"):
            read(RemoteSource(url, QUICK))
        monkeypatch.setenv(AUTHORIZATION, f"Bearer {SECRET}")
        monkeypatch.setenv(QUERY, "?sv=1&sig=abc%2F")
        server.seen.clear()
        assert read(RemoteSource(url, QUICK)) == raw_of(tensors)
        assert {seen.query for seen in server.seen} == {"sv=1&sig=abc%2F"}

        server.always[f"/v/{SHARD}"] = status(302, Location=f"{elsewhere.url}/v/{SHARD}")
        elsewhere.publish("v", folder)
        with pytest.raises(SourceError, match="redirected away from https://"):
            read(RemoteSource(url, QUICK))
        assert all("Authorization" not in seen.headers for seen in elsewhere.seen)
        with pytest.raises(SourceError, match="credentials are not sent over http://") as caught:
            read(RemoteSource(elsewhere.url, QUICK))
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"https://u:{SECRET}@host/v", f"https://host/v?sig={SECRET}", f"https://host/v#{SECRET}",
        "s3://", "hf://owner", "https:///v", "gs://b/a b", "hf://o/r@a@b",
    ],
)  # fmt: skip
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(SourceError, match="expected") as caught:
        source_of(url).open(threading.Event())
    assert SECRET not in str(caught.value)
    assert not caught.value.retryable


def test_a_host_that_is_not_there() -> None:
    with pytest.raises(SourceError, match="no connection"):
        RemoteSource("http://127.0.0.1:1/v", QUICK).open(threading.Event())
    with pytest.raises(SourceError, match="no such host"):
        RemoteSource("https://nowhere.invalid/v", QUICK).open(threading.Event())


# --- the Hub and buckets ---


@pytest.fixture
def hub(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> FileServer:
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    return server


@pytest.mark.parametrize(
    ("url", "prefix"),
    [
        ("hf://org/tiny", "org/tiny"),
        ("hf://org/tiny@step-1", "org/tiny"),
        ("hf://org/tiny@refs%2Fpr%2F1/", "org/tiny"),
        ("hf://org/tiny@step-1/sub/folder", "org/tiny/sub/folder"),
    ],
)
def test_the_hub(hub: FileServer, tmp_path: Path, url: str, prefix: str) -> None:
    tensors = mixed_tensors(1)
    hub.publish(prefix, write_checkpoint(tmp_path, tensors, 2))
    assert read(RemoteSource(url, QUICK)) == raw_of(tensors)
    shard = "model-00002.safetensors"
    assert all(f"/resolve/{hub.commit}/" in seen.path for seen in hub.requests(shard))
    hub.faults[f"/{prefix}/{shard}"] = [lambda *_: False, wrong_bytes]
    with pytest.raises(SourceError, match="wrong bytes, SHA-256"):
        read(RemoteSource(url, QUICK))


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hf://org/none", "no such repository; set HF_TOKEN"),
        ("hf://org/tiny@step-2", "no such revision; push it"),
        ("hf://org/tiny/none", "holds no file in none/"),
        ("hf://org/-tiny-", "is no name of a repository"),
    ],
)
def test_what_the_hub_lacks(hub: FileServer, tmp_path: Path, url: str, words: str) -> None:
    hub.publish("org/tiny", write_checkpoint(tmp_path, mixed_tensors(1)))
    with pytest.raises(SourceError, match=words):
        read(RemoteSource(url, QUICK))


@pytest.fixture(scope="module")
def s3_server() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A client for an empty bucket ``ckpt``; the agent finds the server by its environment."""
    import boto3

    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3")
    client.create_bucket(Bucket="ckpt")
    yield client
    for entry in client.list_objects_v2(Bucket="ckpt").get("Contents", []):
        client.delete_object(Bucket="ckpt", Key=entry["Key"])
    client.delete_bucket(Bucket="ckpt")


def upload(s3: Any, folder: Path, prefix: str) -> None:
    for file in folder.iterdir():
        s3.upload_file(str(file), "ckpt", f"{prefix}/{file.name}")


@pytest.mark.parametrize("shards", [1, 3])
def test_s3(s3: Any, tmp_path: Path, shards: int, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 50_000)
    tensors = mixed_tensors(1)
    upload(s3, write_checkpoint(tmp_path / "step-1", tensors, shards), "run/step-1")
    source = RemoteSource("s3://ckpt/run/step-1", QUICK)
    assert read(source) == raw_of(tensors)
    cancel = threading.Event()
    checkpoint = source.open(cancel)
    upload(s3, write_checkpoint(tmp_path / "other", mixed_tensors(2), shards), "run/step-1")
    plan = make_plan(checkpoint.manifest("v").tensors, 4096)
    with pytest.raises(SourceError, match="changed while it was read"):
        source.read(
            checkpoint, memoryview(bytearray(plan.nbytes)), plan.offsets, done=set(),
            progress=lambda _: None, cancel=cancel,
        )  # fmt: skip
    assert source.open(cancel).fingerprint != checkpoint.fingerprint


@pytest.mark.parametrize("back", ["after a piece", "within a piece", "within the header"])
def test_content_that_was_in_s3_for_a_while_only(s3: Any, tmp_path: Path, back, monkeypatch):
    """The first content is there again whenever the whole is looked at."""
    monkeypatch.setattr(remote, "PIECE_BYTES", 50_000)
    monkeypatch.setattr(remote, "READERS", 1)
    first = write_checkpoint(tmp_path / "first", mixed_tensors(1))
    other = write_checkpoint(tmp_path / "other", mixed_tensors(2))
    upload(s3, first, "v")
    source = RemoteSource("s3://ckpt/v", QUICK)
    time.sleep(1.1)  # S3 tells whole seconds
    original = BucketStore._range
    ranges, there = 0, 1 if back == "within the header" else 2

    async def flipping(self, file, start, stop):
        nonlocal ranges
        ranges += 1
        if ranges == there:
            await asyncio.to_thread(upload, s3, other, "v")
        found = await original(self, file, start, stop)
        if ranges == there + (back == "after a piece"):
            await asyncio.to_thread(upload, s3, first, "v")
        return found

    monkeypatch.setattr(BucketStore, "_range", flipping)
    done = {99}
    with pytest.raises(SourceError, match="changed while it was read"):
        read(source, done)
    assert done == ({99} if back == "within the header" else set())
    monkeypatch.setattr(BucketStore, "_range", original)
    upload(s3, first, "v")
    assert read(source) == raw_of(mixed_tensors(1))


@pytest.mark.parametrize(
    ("url", "words", "change"),
    [
        ("s3://ckpt/none", "none: missing; copy it there", {}),
        ("s3://no-bucket/v", "no-bucket/v: ", {}),
        ("s3://ckpt/empty", r"holds no \*.safetensors", {}),
        (
            "s3://ckpt/v",
            "check bucket and cred",
            {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""},
        ),
        ("s3://ckpt/v", "s3://ckpt/v: ", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}),
    ],
)
def test_what_s3_lacks(s3: Any, url: str, words: str, change: dict[str, str], monkeypatch) -> None:
    s3.put_object(Bucket="ckpt", Key="empty/readme", Body=b"x")
    with monkeypatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name, value in change.items():
            patch.setenv(name, value) if value else patch.delenv(name)
        with pytest.raises(SourceError, match=words) as caught:
            read(RemoteSource(url, QUICK))
    assert SECRET not in str(caught.value)


def test_gs(server: FileServer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
    monkeypatch.setenv("GOOGLE_CREDENTIALS", "{")
    source = RemoteSource("gs://ckpt/run/step-1", QUICK)
    with pytest.raises(SourceError, match="GOOGLE_CREDENTIALS is no JSON"):
        read(source)
    monkeypatch.delenv("GOOGLE_CREDENTIALS")
    with pytest.raises(SourceError, match="run/step-1: missing; copy it there"):
        read(source)
    tensors = mixed_tensors(1)
    server.publish("ckpt/run/step-1", write_checkpoint(tmp_path, tensors, 3))
    assert read(source) == raw_of(tensors)
    before = source.open(threading.Event()).fingerprint
    server.publish("ckpt/run/step-1", write_checkpoint(tmp_path, mixed_tensors(2), 3))
    assert source.open(threading.Event()).fingerprint != before


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_package_that_is_missing(scheme: str, package: str, monkeypatch) -> None:
    for name in (package, "gcsfs.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SourceError, match=rf"needs the package {package}: install .*\[{scheme}\]"):
        RemoteSource(f"{scheme}://b/v", QUICK).open(threading.Event())
