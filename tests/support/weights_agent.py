"""A real agent process: ``python weights_agent.py RUN_DIR SHM_DIR HOST_MEMORY``."""

import asyncio
import logging
import signal
import sys
from pathlib import Path

from rollout_pod.weights.agent import run_agent


async def main(run_dir: str, shm_dir: str, host_memory: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await run_agent(Path(run_dir), Path(shm_dir), int(host_memory), stop)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main(*sys.argv[1:]))
