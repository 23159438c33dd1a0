"""Code blocks of the documentation, run as a reader would run them."""

import ast
import inspect
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of ``docs/{page}`` with exactly this info string."""
    text = (FOLDER / page).read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


async def run_block(code: str) -> dict[str, Any]:
    """Run a block, which may await, and return its names."""
    scope: dict[str, Any] = {}
    compiled = compile(code, "docs", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, scope)
    if inspect.isawaitable(result):
        await result
    return scope
