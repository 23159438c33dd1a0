"""The command line: settings come from the environment or, each by its name, as options."""

import asyncio
import gc
import sys

from pydantic import ValidationError

from rollout_operator import logs
from rollout_operator.app import run
from rollout_operator.apply.errors import NoConfiguration
from rollout_operator.runtime import Runtime
from rollout_operator.settings import Settings


def main() -> None:
    """Run the operator until it is told to stop."""
    try:
        # --pod-access=proxy is ROLLOUT_OPERATOR_POD_ACCESS=proxy; --help tells all
        settings = Settings(
            _cli_parse_args=sys.argv[1:],
            _cli_kebab_case=True,
            _cli_prog_name="rollout-operator",
            _cli_implicit_flags=True,
        )
        settings.namespaces()
        settings.lease()
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors()
        )
        sys.exit("rollout-operator: " + "; ".join(lines))
    except ValueError as error:
        sys.exit(f"rollout-operator: {error}")
    logs.configure(format=settings.log_format, level=settings.log_level)
    # what was imported stays for good: no collection need walk over it
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(_run(settings))
    except NoConfiguration as error:
        sys.exit(f"rollout-operator: {error}")


async def _run(settings: Settings) -> None:
    await run(Runtime(settings))
