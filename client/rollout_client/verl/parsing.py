"""Reads the settings out of verl's configuration: pure."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from string import Formatter
from typing import Any, Final

from rollout_client.verl.settings import KEY, WHERE, Pod, Settings, SettingsError


def parse(custom: Any) -> Settings:
    """Read the value of ``rollout.custom``.

    Raises:
        SettingsError: a field is unknown or of the wrong kind.
    """
    mine = custom.get(KEY) if isinstance(custom, Mapping) else None
    if mine is None:
        return Settings()
    if not isinstance(mine, Mapping):
        raise SettingsError(f"{WHERE}: must be a mapping, not {mine!r}")
    known = {f.name: f for f in fields(Settings)}
    for name in mine:
        if name not in known:
            raise SettingsError(f"{WHERE}.{name}: unknown; known are {', '.join(known)}")
    values: dict[str, Any] = {}
    for name, value in mine.items():
        match name:
            case "replicas":
                values[name] = _names(value)
            case "pods":
                values[name] = tuple(_pod(i, pod) for i, pod in enumerate(_list(name, value)))
            case "namespace" | "data_url" | "version" | "receivers":
                values[name] = _text(name, value)
            case "sleep_level" | "keep" | "transport":
                values[name] = _one_of(name, value)
            case "receiver_gpus" if value == 0:
                values[name] = 0.0
            case "max_concurrency" if isinstance(value, float):
                raise SettingsError(f"{WHERE}.{name}: must be a whole number, not {value!r}")
            case _:
                values[name] = _positive(name, value)
    settings = Settings(**values)
    if settings.pods and settings.replicas:
        raise SettingsError(f"{WHERE}: set one of `replicas` and `pods`, not both")
    _check_template("data_url", settings.data_url, {"name"}, {"name", "namespace"})
    _check_template("version", settings.version, {"step"}, {"step"})
    if settings.receivers is not None:
        known_fields = {"name", "rank"} if settings.replicas else {"rank"}
        _check_template("receivers", settings.receivers, set(), known_fields)
    return settings


_CHOICES: Final[Mapping[str, tuple[Any, ...]]] = {
    "sleep_level": (1, 2),
    "keep": ("nothing", "copy"),
    "transport": ("auto", "shared_memory", "cuda_ipc"),
}


def _one_of(name: str, value: Any) -> Any:
    if isinstance(value, bool) or value not in _CHOICES[name]:
        known = ", ".join(map(str, _CHOICES[name]))
        raise SettingsError(f"{WHERE}.{name}: one of {known}, not {value!r}")
    return value


def _check_template(name: str, text: str, needed: set[str], known: set[str]) -> None:
    try:
        found = {field for _, field, _, _ in Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise SettingsError(f"{WHERE}.{name}: {text!r}: {error}") from None
    if not needed <= found <= known:
        names = ", ".join(f"{{{field}}}" for field in sorted(known))
        raise SettingsError(
            f"{WHERE}.{name}: {text!r} must hold {' and '.join(f'{{{n}}}' for n in sorted(needed))}"
            f" and may hold {names}"
            if needed
            else f"{WHERE}.{name}: {text!r} may hold {names}"
        )


def _list(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        raise SettingsError(f"{WHERE}.{name}: must be a list, not {value!r}")
    found = list(value)
    if not found:
        raise SettingsError(f"{WHERE}.{name}: empty; leave it out")
    return found


def _names(value: Any) -> tuple[str, ...]:
    names = tuple(_text(f"replicas.{i}", name) for i, name in enumerate(_list("replicas", value)))
    if len(set(names)) != len(names):
        raise SettingsError(f"{WHERE}.replicas: names one twice; each is one replica of verl's")
    return names


def _pod(index: int, value: Any) -> Pod:
    where = f"pods.{index}"
    if not isinstance(value, Mapping) or set(value) != {"data", "admin", "run_dir"}:
        raise SettingsError(f"{WHERE}.{where}: must have data, admin and run_dir, not {value!r}")
    return Pod(
        data=_text(f"{where}.data", value["data"]),
        admin=_text(f"{where}.admin", value["admin"]),
        run_dir=Path(_text(f"{where}.run_dir", value["run_dir"])),
    )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise SettingsError(f"{WHERE}.{name}: must be a text, not {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise SettingsError(f"{WHERE}.{name}: must be a positive number, not {value!r}")
    return value
