"""``kubectl rr`` as a person at a terminal sees it: one line that changes, and the result after it."""

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollout_client.kubectl.app import Exit
from tests.support.fake_pod_admin import FakePodAdmin
from tests.support.operator_kit import Bench, bench
from tests.support.terminal import Screen, Terminal

pytestmark = pytest.mark.timeout(90)

SOURCE = {"source": {"path": "/ckpt/{version}"}}
PLUGIN = Path(sys.executable).with_name("kubectl-rr")
COLUMNS = 100
SPINNER = re.compile(r"^[⠀-⣿] ")
RESULT = ["every rank of qwen holds step-1"]


def command(b: Bench, *args: str) -> list[str]:
    return [str(PLUGIN), *args, "--namespace=ns", f"--server={b.server.url}"]


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "TERM": "xterm-256color", "LANG": "C.UTF-8", **more}


@asynccontextmanager
async def terminal(
    b: Bench, *args: str, stdout: int | None = None, **more: str
) -> AsyncIterator[Terminal]:
    made = Terminal(command(b, *args), environment(**more), stdout=stdout, columns=COLUMNS)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


@asynccontextmanager
async def held_replica() -> AsyncIterator[tuple[Bench, FakePodAdmin]]:
    """A replica whose updates stand still after the gate closed, until ``hold`` is set."""
    async with bench() as b:
        admin = await b.serving(weights=SOURCE)
        admin.hold = asyncio.Event()
        yield b, admin


async def shows(seen: Terminal, words: str) -> None:
    await asyncio.to_thread(
        seen.until, lambda screen: any(words in row for rows in screen.shown for row in rows)
    )


def lines(screen: Screen) -> list[str]:
    """What the line said, one after the other, without the thing that turns before it."""
    found: list[str] = []
    for rows in screen.shown:
        for row in rows:
            words = SPINNER.sub("", row)
            if not found or words != found[-1]:
                found.append(words)
    return found


async def test_one_line_changes_until_the_result_takes_its_place() -> None:
    async with held_replica() as (b, admin):
        admin.prefetched = asyncio.Event()
        async with terminal(b, "update", "qwen", "step-1", "--wait") as seen:
            await shows(seen, "prefetching step-1")
            admin.prefetched.set()
            await shows(seen, "transferring step-1")
            assert not seen.screen.has_cursor
            admin.hold.set()
            assert await asyncio.to_thread(seen.end) == 0
    screen = seen.screen
    assert screen.text == RESULT, "nothing but the result is left"
    assert max(len(rows) for rows in screen.shown) == 1, "one line, at any moment"
    assert screen.has_cursor
    told = lines(screen)
    order = ["prefetching step-1", "transferring step-1", *RESULT]
    at = [[words in line for line in told].index(True) for words in order]
    assert at == sorted(at), told
    assert all("holds base" in told[i] for i in at[:2])
    # it turns while nothing is new: whoever watches sees that it lives
    turns = {row[0] for rows in screen.shown for row in rows if SPINNER.match(row)}
    assert len(turns) >= 3


async def test_a_line_that_is_too_long_is_cut_and_stays_one() -> None:
    version = "v" * COLUMNS
    async with (
        held_replica() as (b, admin),
        terminal(b, "update", "qwen", version, "--wait") as seen,
    ):
        await shows(seen, "transferring v")
        admin.hold.set()
        assert await asyncio.to_thread(seen.end) == 0
    assert seen.screen.text == [f"every rank of qwen holds {version}"]
    cut = [row for rows in seen.screen.shown for row in rows if "transferring" in row]
    assert all(len(row) <= COLUMNS and row.endswith("…") for row in cut)
    assert max(len(rows) for rows in seen.screen.shown) == 1


async def test_ctrl_c_gives_the_terminal_back_and_the_update_goes_on() -> None:
    async with (
        held_replica() as (b, admin),
        terminal(b, "update", "qwen", "step-1", "--wait") as seen,
    ):
        await shows(seen, "transferring step-1")
        seen.type(b"\x03")
        assert await asyncio.to_thread(seen.end) == Exit.INTERRUPTED
        assert seen.screen.has_cursor
        assert seen.screen.text[-1].endswith("not waited for any longer; it goes on by itself")
        admin.hold.set()
        await b.until(lambda: b.status().get("weightVersion") == "step-1")


async def test_the_result_goes_to_a_file_and_the_line_to_the_terminal(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        async with (
            held_replica() as (b, admin),
            terminal(b, "update", "qwen", "step-1", "--wait", stdout=out.fileno()) as seen,
        ):
            await shows(seen, "transferring step-1")
            admin.hold.set()
            assert await asyncio.to_thread(seen.end) == 0
    assert seen.screen.text == []
    assert (tmp_path / "out").read_text().splitlines() == RESULT


async def test_where_nobody_watches_each_news_is_a_line_without_codes() -> None:
    async with held_replica() as (b, admin):
        child = await asyncio.create_subprocess_exec(
            *command(b, "update", "qwen", "step-1", "--wait"), env=environment(),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        await b.until(lambda: b.status().get("weightUpdate", {}).get("phase") == "Transferring")
        await asyncio.sleep(0.3)  # and the watch brings it
        admin.hold.set()
        async with asyncio.timeout(30):
            out, err = (text.decode() for text in await child.communicate())
    assert child.returncode == 0
    assert out.splitlines() == RESULT
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", out + err)
    assert any("transferring step-1" in line for line in err.splitlines())
    assert len(err.splitlines()) == len(set(err.splitlines()))


async def test_a_terminal_that_knows_no_codes_gets_none() -> None:
    async with (
        held_replica() as (b, admin),
        terminal(b, "update", "qwen", "step-1", "--wait", TERM="dumb") as seen,
    ):
        await shows(seen, "transferring step-1")
        admin.hold.set()
        assert await asyncio.to_thread(seen.end) == 0
    assert not seen.screen.codes
    assert seen.screen.text[-1:] == RESULT
