"""The cluster's images, made without a registry, and what every container gets from the host.

The two images of the project are one almost empty root. The host's programs, the Python that runs
`up`, its packages and the checkout's code come into every container as read-only bind mounts of
the OCI base spec, so that manifests and chart are applied as they stand.
"""

import hashlib
import io
import json
import platform
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.errors import DevclusterError
from devcluster.network import run
from devcluster.settings import PAUSE_IMAGE, PROJECT_IMAGES, USER_ID, Node, Settings

HOME = "/opt/rollout"
"""Where containers find the project. Not the host's own paths: a checkout below /tmp would vanish
under the volume that a pod mounts there."""
SOURCES = ("operator", "rollout_pod", "client")
HOST_PATHS = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"),
    *("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs"),
)
IMPORT_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Image:
    """An image as an OCI archive."""

    names: tuple[str, ...]
    archive: bytes
    digest: str


def venv_folder(settings: Settings) -> str:
    """Return where containers find the packages' Python: the interpreter itself without a venv."""
    same = settings.prefix == settings.base_prefix
    return str(settings.base_prefix) if same else f"{HOME}/venv"


def search_path(settings: Settings) -> str:
    """Return the containers' PATH."""
    return f"{HOME}/bin:{venv_folder(settings)}/bin:/usr/local/bin:/usr/bin:/bin"


def project_binds(settings: Settings, exists: Callable[[str], bool]) -> dict[str, str]:
    """Return what is mounted into every container: destination → folder of the host."""
    binds = {path: path for path in HOST_PATHS if exists(path)}
    if not settings.base_prefix.is_relative_to("/usr"):
        binds[str(settings.base_prefix)] = str(settings.base_prefix)
    if settings.prefix != settings.base_prefix:
        binds[venv_folder(settings)] = str(settings.prefix)
    binds[f"{HOME}/bin"] = str(settings.project / "bin")
    for source in SOURCES:
        binds[f"{HOME}/src/{source}"] = str(settings.repo / source)
    return binds


def base_spec(
    default: Mapping[str, Any], binds: Mapping[str, str], *, max_files: int
) -> dict[str, Any]:
    """Add the read-only mounts to containerd's default OCI spec and raise the limit of open files
    from 1024, with which no server could hold a thousand connections.
    """
    mounts = [
        {
            "destination": destination,
            "type": "bind",
            "source": source,
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
        for destination, source in binds.items()
    ]
    limit = {"type": "RLIMIT_NOFILE", "hard": max_files, "soft": max_files}
    return {
        **default,
        "process": {**default["process"], "rlimits": [limit]},
        "mounts": [*default["mounts"], *mounts],
    }


def console_scripts(pyproject: str, interpreter: str) -> dict[str, str]:
    """Return the project's console scripts for a Python that has another path in containers."""
    scripts: dict[str, str] = tomllib.loads(pyproject)["project"]["scripts"]
    made = {}
    for name, target in scripts.items():
        module, function = target.split(":")
        made[name] = (
            f"#!{interpreter}\nimport sys\n\nfrom {module} import {function}\n\n"
            # a process that an engine spawns imports this file again
            f'if __name__ == "__main__":\n    sys.exit({function}())\n'
        )
    return made


def write_console_scripts(settings: Settings) -> None:
    """Write the scripts that every container finds first on its PATH."""
    folder = settings.project / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    pyproject = (settings.repo / "pyproject.toml").read_text()
    scripts = console_scripts(pyproject, f"{venv_folder(settings)}/bin/python")
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    for file in folder.iterdir():
        if file.name not in scripts:
            file.unlink()


def project_image(settings: Settings) -> Image:
    """Make the image that stands in for the operator's and the pod's."""
    user = f"{USER_ID}:{USER_ID}"
    files = {
        "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\nrollout:x:{user}:rollout:/tmp:/bin/sh\n",
        "etc/group": f"root:x:0:\nrollout:x:{USER_ID}:\n",
        "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }
    folders = ("etc", "opt", "proc", "sys", "dev", "run", "root", "var", "usr", "home", "tmp")
    layer = layer_tar({name: text.encode() for name, text in files.items()}, folders=folders)
    sources = ":".join(f"{HOME}/src/{source}" for source in SOURCES)
    config = {
        "User": str(USER_ID),
        "Env": [f"PATH={search_path(settings)}", f"PYTHONPATH={sources}", "PYTHONUNBUFFERED=1"],
        "WorkingDir": "/tmp",  # noqa: S108 - the image's, a folder that always exists
    }
    return oci_archive(PROJECT_IMAGES, layer, config)


def pause_image(settings: Settings) -> Image:
    """Compile the process that holds a pod's namespaces and make its image.

    Raises:
        DevclusterError: gcc failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "pause")
        source = settings.go_folder / "pause.c"
        run("gcc", "-static", "-Os", "-s", "-Wall", "-o", str(program), str(source))
        layer = layer_tar({"pause": program.read_bytes()}, mode=0o755)
    return oci_archive((PAUSE_IMAGE,), layer, {"User": "65535", "Entrypoint": ["/pause"]})


def layer_tar(
    files: Mapping[str, bytes], *, folders: Sequence[str] = (), mode: int = 0o644
) -> bytes:
    """Return a layer; equal content gives equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in folders:
            folder = tarfile.TarInfo(name)
            folder.type = tarfile.DIRTYPE
            folder.mode = 0o1777 if name == "tmp" else 0o755
            tar.addfile(folder)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            entry.mode = mode
            tar.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def oci_archive(names: tuple[str, ...], layer: bytes, config: Mapping[str, Any]) -> Image:
    """Return an image of one layer as an OCI archive that is known by all ``names``."""
    architecture = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = data
        media_type = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

    layer_blob = blob(layer, "layer.v1.tar")
    image_config = {
        "architecture": architecture,
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [layer_blob["digest"]]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob(json.dumps(image_config).encode(), "config.v1+json"),
        "layers": [layer_blob],
    }
    manifest_blob = blob(json.dumps(manifest).encode(), "manifest.v1+json")
    index = {
        "schemaVersion": 2,
        "manifests": [
            {**manifest_blob, "annotations": {"io.containerd.image.name": name}} for name in names
        ],
    }
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps(index).encode(),
    }
    return Image(names, layer_tar({**files, **blobs}), manifest_blob["digest"])


def missing_names(images: Sequence[Image], listing: str) -> tuple[str, ...]:
    """Say which names ``ctr images list`` does not show with the wanted digest."""
    present = {tuple(line.split()[0::2][:2]) for line in listing.splitlines()[1:]}
    return tuple(n for image in images for n in image.names if (n, image.digest) not in present)


def load_images(
    settings: Settings, node: Node, images: Sequence[Image], *, snapshotter: str
) -> None:
    """Bring the images into a node's containerd, where they are missing or old.

    Raises:
        DevclusterError: containerd refused one.
    """
    socket = str(settings.containerd_socket(node))
    ctr = ("ctr", "--address", socket, "--namespace", "k8s.io", "images")
    missing = missing_names(images, run(*ctr, "list"))
    for image in images:
        if not set(image.names) & set(missing):
            continue
        done = subprocess.run(
            (*ctr, "import", "--snapshotter", snapshotter, "-"),
            input=image.archive,
            capture_output=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            raise DevclusterError(f"import of {image.names} failed: {done.stderr.decode()}")
