"""How the cluster is."""

from dataclasses import dataclass
from pathlib import Path

from devcluster import processes
from devcluster.build import bin_folder
from devcluster.health import ailment, fetch
from devcluster.node import node, second_node
from devcluster.parts import Part, control_plane
from devcluster.settings import SECOND, Settings


@dataclass(frozen=True)
class PartStatus:
    """One line of `status`."""

    part: str
    pid: int | None
    ailment: str | None
    log: Path


def has_second_node(settings: Settings) -> bool:
    """Whether the second node was added, and not removed since."""
    return settings.part_folder(SECOND.kubelet).exists()


def all_parts(settings: Settings) -> tuple[Part, ...]:
    """Return all parts, to ask after; containerd's configuration is not the real one."""
    bins = bin_folder(settings)
    first = node(settings, bins, snapshotter="", base_spec="")
    second = second_node(settings, bins, snapshotter="", base_spec="")
    return (
        *control_plane(settings, bins),
        *first,
        *(second if has_second_node(settings) else ()),
    )


def look(settings: Settings) -> list[PartStatus]:
    """Look at every part once."""
    found = []
    for part in all_parts(settings):
        record = processes.read_record(settings.part_folder(part.name) / "record.json")
        alive = record is not None and processes.is_alive(record)
        found.append(
            PartStatus(
                part.name,
                record.pid if record is not None and alive else None,
                ailment(settings, part) if alive else "not running",
                settings.log(part.name),
            )
        )
    return found


def save_metrics(settings: Settings) -> list[Path]:
    """Write every part's present metrics beside its log and return the files."""
    files = []
    for part in all_parts(settings):
        if part.metrics is not None:
            file = settings.part_folder(part.name) / "metrics.prom"
            file.write_text(fetch(settings, part.metrics).raise_for_status().text)
            files.append(file)
    return files
