"""LoRA adapters of the engine's arguments, by name.

After a weight update vLLM reads an adapter again with the first request that names it, and dies of
one that it cannot read: so what it reads are copies of the pod's own.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_pod.engine.base import EngineStartError, InvalidField
from rollout_pod.engine.lifeline import words_of


def moved(modules: Iterable[Any] | None, run_dir: Path) -> list[Any] | None:
    """``--lora-modules`` with the paths of their copies, the same in every process of the pod."""
    if modules is None:
        return None
    return [
        replace(module, path=str(_copies_in(run_dir) / str(number)))
        for number, module in enumerate(modules, start=1)
    ]


def copy(modules: Iterable[Any] | None, run_dir: Path) -> None:
    """Make the copies of ``moved``, instead of those of an earlier start. In one process.

    Args:
        modules: as they were given; what is no path is fetched as vLLM fetches it.
        run_dir: the pod's.

    Raises:
        EngineStartError: an adapter cannot be read, or its copy not be written.
    """
    remove(run_dir)
    if not modules:
        return
    from vllm.lora.utils import get_adapter_absolute_path

    for number, module in enumerate(modules, start=1):
        try:
            folder = Path(get_adapter_absolute_path(module.path))
            if not folder.is_dir():  # vLLM's answer to a download that failed is the name
                raise FileNotFoundError(f"{module.path} is no folder, and could not be fetched")
            _copy_files(folder, _copies_in(run_dir) / str(number))
        except Exception as error:
            message = f"engineArgs: --lora-modules {module.name}: {words_of(error)}"
            raise EngineStartError(message) from error


def remove(run_dir: Path) -> None:
    """Remove all copies; nothing there is no error."""
    shutil.rmtree(_copies_in(run_dir), ignore_errors=True)


def _copies_in(run_dir: Path) -> Path:
    # a name that nobody gives to what is theirs: it is removed without a look
    return run_dir.absolute() / "lora-copies"


def _copy_files(folder: Path, target: Path) -> None:
    """What PEFT writes of an adapter, which is all that vLLM reads: beside it there may be states
    of an optimizer, or a whole model. A link's contents are copied (Hugging Face's cache has
    links), and whatever else is no file is left out.
    """
    files = [file for file in sorted(folder.iterdir()) if file.name.startswith("adapter_")]
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # adapters may be private
    target.mkdir()
    for file in files:
        if file.is_file():
            shutil.copyfile(file, target / file.name)
    if not (target / "adapter_config.json").exists():
        raise FileNotFoundError(f"{folder} holds no adapter_config.json")
    if not any(target.glob("adapter_model.*")):
        raise FileNotFoundError(f"{folder} holds no adapter_model.safetensors")


def requests_of(modules: Iterable[Any] | None, *, enabled: bool) -> dict[str, Any]:
    """Make requests for ``--lora-modules``, numbered as vLLM's own server numbers them: an engine
    that is asked for an adapter by both holds it once.

    Raises:
        EngineStartError: adapters without ``--enable-lora``, or two of one name.
    """
    from vllm.lora.request import LoRARequest

    requests: dict[str, Any] = {}
    for number, module in enumerate(modules or (), start=1):
        if not enabled:
            raise EngineStartError("engineArgs: --lora-modules needs --enable-lora")
        if module.name in requests:
            raise EngineStartError(f"engineArgs: --lora-modules names {module.name} twice")
        requests[module.name] = LoRARequest(
            lora_name=module.name,
            lora_int_id=number,
            lora_path=module.path,
            is_3d_lora_weight=module.is_3d_lora_weight,
        )
    return requests


def find(requests: dict[str, Any], name: str, *, enabled: bool) -> Any:
    """The adapter of this name.

    Raises:
        InvalidField: there is none.
    """
    if name in requests:
        return requests[name]
    if not enabled:
        raise InvalidField(
            "lora", "the engine runs without LoRA; start it with --enable-lora --lora-modules"
        )
    known = ", ".join(sorted(requests)) or "none"
    raise InvalidField("lora", f"no adapter is called {name!r}; known: {known}")
