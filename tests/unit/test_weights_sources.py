"""Folders of safetensors, whole and broken."""

import errno
import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from rollout_pod.weights import sources
from rollout_pod.weights.buckets import make_plan
from rollout_pod.weights.source_kinds import FolderSource
from rollout_pod.weights.sources import INDEX, SourceError, open_checkpoint, read_tensors
from tests.support.weights import mixed_tensors, write_checkpoint


def file_of(header: object, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(path: Path) -> dict[str, bytes]:
    checkpoint = open_checkpoint(path)
    manifest = checkpoint.manifest("v")
    plan = make_plan(manifest.tensors, 4096)
    target = bytearray(plan.nbytes)
    counted: list[int] = []
    read_tensors(
        checkpoint, memoryview(target), plan.offsets, progress=counted.append,
        cancel=threading.Event(),
    )  # fmt: skip
    assert sum(counted) == manifest.nbytes
    return {
        tensor.name: bytes(target[offset : offset + tensor.nbytes])
        for tensor, offset in zip(manifest.tensors, plan.offsets, strict=True)
    }


@pytest.mark.parametrize("shards", [1, 3])
def test_every_byte_is_read(tmp_path: Path, shards: int, monkeypatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    tensors = mixed_tensors(1)
    path = write_checkpoint(tmp_path, tensors, shards)
    (path / "config.json").write_text("{}")
    assert read(path) == {
        name: bytes(tensor.reshape(-1).view(torch.uint8).numpy())
        for name, tensor in tensors.items()
    }


def test_shards_are_read_side_by_side(tmp_path: Path, monkeypatch) -> None:
    """One reader alone gets a fraction of what a network file system has to give."""
    tensors = {name: torch.full((1000,), float(i)) for i, name in enumerate("ab")}
    path = write_checkpoint(tmp_path, tensors, shards=2)
    preadv, both = os.preadv, threading.Barrier(2, timeout=5)

    def meet(*args: Any) -> int:
        both.wait()
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", meet)
    assert read(path) == {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_files_that_the_index_does_not_name_are_ignored(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, mixed_tensors(1), 2)
    (path / "consolidated.safetensors").write_bytes(b"junk")
    assert len(open_checkpoint(path).files) == 2


GOOD = {"a": entry("F32", [2], 0, 8), "b": entry("U8", [3], 8, 11)}


@pytest.mark.parametrize(
    ("content", "words", "retryable"),
    [
        (b"", "truncated, 0 bytes", True),
        (b"1234567", "truncated, 7 bytes", True),
        (file_of(GOOD)[:30], "truncated within its header, 30 of at least", True),
        (file_of(GOOD, b"x" * 10), "truncated, ", True),
        (file_of(GOOD, b"x" * 12), "its header accounts for", True),
        (b"\xff" * 8 + b"x" * 50, "this is no safetensors file", False),
        (file_of(b"{]"), "bad header", False),
        (file_of([1]), "no JSON object", False),
        (file_of({}), "hold no tensor", True),
        (file_of(b'{"a": 1, "a": 2}'), "'a' is there twice", False),
        (file_of({"a": 1}), "'a' has a bad header entry", False),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}), "'a' has a bad header entry", False),
        (file_of({"a": entry("F32", [-2], 0, 8)}, b"x" * 8), "bad header entry", False),
        (file_of({"a": entry("F32", [True], 0, 4)}, b"x" * 4), "bad header entry", False),
        (file_of({"a": entry("F32", 2, 0, 8)}, b"x" * 8), "bad header entry", False),
        (file_of({"a": {"dtype": ["F32"]} | {"shape": [2], "data_offsets": [0, 8]}}), "bad", False),
        (file_of(b'{"a": ' + b"[" * 200_000), "bad header", False),
        (file_of(b'{"a": {"x": ' * 100_000), "bad header", False),
        (file_of({"": entry("U8", [1], 0, 1)}, b"x"), "a tensor's name '' is empty", False),
        (file_of(b'{"\\ud800": {}}'), r"a tensor's name '\ud800' is", False),
        (file_of({"a" * 5000: entry("U8", [1], 0, 1)}, b"x"), "longer than 4096", False),
        (file_of({"a": entry("U8", [10**4000], 0, 1)}, b"x"), "bad header entry", False),
        (file_of({"a": entry("U8", [2**62] * 64, 0, 1)}, b"x"), "has 1 bytes, U8", False),
        (file_of({"a": entry("U8", [1] * 65, 0, 1)}, b"x"), "bad header entry", False),
        (file_of({"a": entry("F4", [2], 0, 1)}, b"x"), "dtype 'F4', known are BOOL", False),
        (file_of({"a": entry("F32", [2], 0, 7)}, b"x" * 7), "has 7 bytes, F32 [2] takes 8", False),
        (
            file_of({"a": GOOD["a"], "b": entry("U8", [3], 9, 12)}, b"x" * 12),
            "'b' at byte 9 leaves a gap, expected 8",
            False,
        ),
        (
            file_of({"a": GOOD["a"], "b": entry("U8", [3], 7, 10)}, b"x" * 10),
            "'b' at byte 7 overlaps",
            False,
        ),
        (file_of({"a": entry("F32", [2], 8, 16)}, b"x" * 16), "'a' at byte 8 leaves a gap", False),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, words: str, retryable: bool) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(SourceError) as caught:
        open_checkpoint(tmp_path)
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.retryable is retryable


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_damage_raises_anything_else(tmp_path_factory, data) -> None:
    good = save({"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.uint8)})
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(0, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    folder = tmp_path_factory.mktemp("bad")
    (folder / "model.safetensors").write_bytes(bad[:cut])
    try:
        found = open_checkpoint(folder)
    except SourceError:
        return
    assert cut == len(good)
    assert sum(tensor.spec.nbytes for tensor in found.tensors) == 17


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b"{", "cannot be read"),
        (b"[]", "has no weight_map"),
        (b"{}", "has no weight_map"),
        (b'{"weight_map": {"a": "../x.safetensors"}}', "no plain file name"),
        (b'{"weight_map": {"a": 1}}', "no plain file name"),
        (b'{"weight_map": {"a": ".."}}', "no plain file name"),
        (b'{"weight_map": {"a": "x\\u0000.safetensors"}}', "no plain file name; write it"),
        (b'{"weight_map": {"a": "\\ud800"}}', "no plain file name"),
        (b'{"weight_map": {"a": "%s"}}' % (b"x" * 256), "no plain file name"),
        (b"[" * 200_000, "cannot be read.*write it anew"),
        (b"\xff", "cannot be read"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors: missing"),
        (b'{"weight_map": {"z": "model.safetensors"}}', "lacks tensor 'z'"),
    ],
)
def test_broken_index(tmp_path: Path, index: bytes, words: str) -> None:
    write_checkpoint(tmp_path, {"a": torch.zeros(1)})
    (tmp_path / INDEX).write_bytes(index)
    with pytest.raises(SourceError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "link to a pipe"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    folder = tmp_path / "v"
    write_checkpoint(folder, {"a": torch.zeros(1)})
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            here = os.open(folder, os.O_RDONLY)
            bound.bind(f"/proc/self/fd/{here}/{name}")
            os.close(here)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(tmp_path / "pipe")
        file.symlink_to(tmp_path / "pipe")
    with pytest.raises(SourceError, match=f"{name}: .*is no regular file"):
        open_checkpoint(folder)


def test_a_pipe_that_takes_the_place_of_a_checked_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, {"a": torch.zeros(1000)})
    checkpoint = open_checkpoint(path)
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")
    with pytest.raises(SourceError, match="is no regular file"):
        read_tensors(
            checkpoint, memoryview(bytearray(4096)), [0], progress=lambda _: None,
            cancel=threading.Event(),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/tmp/" + "x" * 300, "File name too long; use a shorter path"),
        ("/tmp" + "/x" * 3000, "File name too long; use a shorter path"),
        ("/tmp/\0", "is no possible path"),
        ("/tmp/\ud800", "is no possible path"),
        ("/dev/null/x", "does not exist"),
    ],
)
def test_impossible_paths(path: str, words: str) -> None:
    with pytest.raises(SourceError, match=words) as caught:
        open_checkpoint(Path(path))
    str(caught.value).encode()


def test_a_name_that_is_no_text_can_be_spoken_of(tmp_path: Path) -> None:
    os.mkfifo(os.fsencode(tmp_path) + b"/\xff.safetensors")
    with pytest.raises(SourceError, match=r"\\udcff.safetensors: is no regular") as caught:
        open_checkpoint(tmp_path)
    str(caught.value).encode()


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.safetensors").write_bytes(save({"a": torch.zeros(1)}))
    with pytest.raises(SourceError, match=r"two.safetensors: tensor 'a' is in one.safetensors"):
        open_checkpoint(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    for path, words in (
        (tmp_path / "x", "does not exist"),
        (tmp_path, "holds no"),
        (file, "no fo"),
    ):
        if path == file:
            file.write_bytes(b"")
        with pytest.raises(SourceError, match=words) as caught:
            open_checkpoint(path)
        assert caught.value.retryable


@pytest.mark.parametrize("what", ["cancel", "shorter", "changed", "gone"])
def test_reading_that_goes_wrong(tmp_path: Path, what: str) -> None:
    path = write_checkpoint(tmp_path, {"a": torch.zeros(1000)})
    file = path / "model.safetensors"
    checkpoint = open_checkpoint(path)
    cancel = threading.Event()

    def progress(_: int) -> None:
        if what == "changed":
            write_checkpoint(tmp_path, {"a": torch.ones(1000)})

    if what == "cancel":
        cancel.set()
    if what == "shorter":
        file.write_bytes(file.read_bytes()[:-1])
    if what == "gone":
        file.unlink()
    words = {
        "cancel": "cancelled", "shorter": "became shorter", "changed": "changed while",
        "gone": "No such file",
    }  # fmt: skip
    with pytest.raises(SourceError, match=words[what]) as caught:
        read_tensors(checkpoint, memoryview(bytearray(4096)), [0], progress=progress, cancel=cancel)
    assert caught.value.retryable


@pytest.mark.parametrize("what", ["cancelled", "Input/output error"])
def test_a_read_goes_on_from_the_pieces_that_are_there(
    tmp_path: Path, monkeypatch, what: str
) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "READERS", 1)
    tensors = {"a": torch.arange(1000.0)}
    source = FolderSource(write_checkpoint(tmp_path, tensors))
    checkpoint = source.open(threading.Event())
    preadv, asked, broken = os.preadv, [], threading.Event()

    def count(fd: int, buffers: list[memoryview], position: int) -> int:
        asked.append(position - checkpoint.tensors[0].position)
        if broken.is_set():
            raise OSError(errno.EIO, what)
        return preadv(fd, buffers, position)

    monkeypatch.setattr(os, "preadv", count)
    target, done, told = bytearray(4000), set(), []
    cancel = threading.Event()

    def progress(nbytes: int) -> None:
        (cancel if what == "cancelled" else broken).set()

    with pytest.raises(SourceError, match=what):
        source.read(
            checkpoint, memoryview(target), [0], done=done, progress=progress, cancel=cancel
        )
    assert len(done) == 1 and asked[0] == 0
    asked.clear()
    broken.clear()
    source.read(
        checkpoint, memoryview(target), [0], done=done, progress=told.append,
        cancel=threading.Event(),
    )  # fmt: skip
    assert asked == [1000, 2000, 3000], "each missing piece once, and no other"
    assert told == [1000] * 4, "what was there is counted too"
    assert target == tensors["a"].numpy().tobytes()


def test_a_file_that_was_there_for_a_while_only_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "PIECE_BYTES", 1000)
    monkeypatch.setattr(sources, "READERS", 1)
    wanted, other = ({"a": torch.full((1000,), float(n))} for n in range(2))
    path = write_checkpoint(tmp_path / "v", wanted)
    checkpoint = open_checkpoint(path)
    target = bytearray(4096)
    done: set[int] = set()
    cancel = threading.Event()
    file = path / "model.safetensors"
    kept = file.rename(tmp_path / "kept")
    write_checkpoint(path, other)
    with pytest.raises(SourceError, match=r"cancelled|changed while"):
        read_tensors(
            checkpoint, memoryview(target), [0], progress=lambda _: cancel.set(), cancel=cancel,
            done=done,
        )  # fmt: skip
    kept.rename(file)
    again = open_checkpoint(path)
    assert again.fingerprint == checkpoint.fingerprint
    read_tensors(
        again, memoryview(target), [0], progress=lambda _: None, cancel=threading.Event(), done=done
    )
    assert target[:4000] == wanted["a"].numpy().tobytes()
