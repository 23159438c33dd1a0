"""``rollout-operator``: all settings come from the environment."""

import asyncio
import sys

from pydantic import ValidationError

from rollout_operator import logs
from rollout_operator.app import run
from rollout_operator.runtime import Runtime
from rollout_operator.settings import Settings


def main() -> None:
    """Run the operator until it is told to stop."""
    try:
        settings = Settings()
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
    asyncio.run(_run(settings))


async def _run(settings: Settings) -> None:
    await run(Runtime(settings))


if __name__ == "__main__":
    main()
