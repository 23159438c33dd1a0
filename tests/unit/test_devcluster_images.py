"""The dev cluster's images and what its containers get from the host."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from devcluster import images
from devcluster.settings import PROJECT_IMAGES, load_settings


@pytest.fixture
def settings():
    return replace(
        load_settings({}),
        root=Path("/r/dev"),
        repo=Path("/tmp/checkout"),
        prefix=Path("/tmp/checkout/.venv"),
        base_prefix=Path("/home/me/python"),
    )


def test_the_checkout_and_its_python_come_from_where_up_ran(settings):
    binds = images.project_binds(settings, lambda path: path in ("/usr", "/lib64"))
    assert binds == {
        "/usr": "/usr",
        "/lib64": "/lib64",
        "/home/me/python": "/home/me/python",
        "/opt/rollout/venv": "/tmp/checkout/.venv",
        "/opt/rollout/bin": "/r/dev/project/bin",
        "/opt/rollout/src/operator": "/tmp/checkout/operator",
        "/opt/rollout/src/rollout_pod": "/tmp/checkout/rollout_pod",
        "/opt/rollout/src/client": "/tmp/checkout/client",
    }


def test_nothing_is_mounted_where_pods_mount_their_volumes(settings):
    binds = images.project_binds(settings, lambda _: True)
    for volume in ("/tmp", "/run", "/dev/shm", "/etc/rollout"):
        assert not any(Path(bind).is_relative_to(volume) for bind in binds)


def test_the_systems_own_python_needs_no_mount(settings):
    system = replace(settings, prefix=Path("/usr"), base_prefix=Path("/usr"))
    binds = images.project_binds(system, lambda path: path == "/usr")
    assert "/opt/rollout/venv" not in binds
    assert images.search_path(system).split(":")[:2] == ["/opt/rollout/bin", "/usr/bin"]


def test_base_spec_only_adds(settings):
    default = {"process": {"cwd": "/", "rlimits": []}, "mounts": [{"destination": "/proc"}], "x": 1}
    spec = images.base_spec(default, {"/usr": "/usr"}, max_files=4096)
    assert spec["x"] == 1
    assert spec["process"]["cwd"] == "/"
    assert spec["process"]["rlimits"] == [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}]
    proc, usr = spec["mounts"]
    assert proc == {"destination": "/proc"}
    assert usr["source"] == usr["destination"] == "/usr"
    assert "ro" in usr["options"]
    assert default["mounts"] == [{"destination": "/proc"}]


def test_console_scripts_call_the_projects_entry_points(tmp_path):
    (tmp_path / "thing.py").write_text("def main():\n    return 7\n")
    text = '[project.scripts]\nthing = "thing:main"\n'
    script = images.console_scripts(text, "/venv/bin/python")["thing"]
    assert script.startswith("#!/venv/bin/python\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        exec(script, {"__name__": "__mp_main__"})  # what a spawned process does
        with pytest.raises(SystemExit) as ended:
            exec(script, {"__name__": "__main__"})
    assert ended.value.code == 7


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return {
            entry.name: tar.extractfile(entry).read() if entry.isfile() else None for entry in tar
        }


def test_project_image(settings):
    image = images.project_image(settings)
    files = members(image.archive)
    index = json.loads(files["index.json"])
    assert {m["annotations"]["io.containerd.image.name"] for m in index["manifests"]} == set(
        PROJECT_IMAGES
    )
    assert {m["digest"] for m in index["manifests"]} == {image.digest}

    def blob(digest):
        return files[f"blobs/{digest.replace(':', '/')}"]

    manifest = json.loads(blob(image.digest))
    config = json.loads(blob(manifest["config"]["digest"]))
    assert config["config"]["User"] == "10001"
    assert (
        "PATH=/opt/rollout/bin:/opt/rollout/venv/bin:/usr/local/bin:/usr/bin:/bin"
        in (config["config"]["Env"])
    )
    (layer,) = manifest["layers"]
    assert config["rootfs"]["diff_ids"] == [layer["digest"]]
    root = members(blob(layer["digest"]))
    assert b"rollout:x:10001:10001:" in root["etc/passwd"]
    assert layer["size"] == len(blob(layer["digest"]))


def test_equal_images_have_equal_digests(settings):
    assert images.project_image(settings).digest == images.project_image(settings).digest


def test_only_missing_or_old_images_are_loaded(settings):
    image = images.Image(("a:dev", "b:dev"), b"", "sha256:1")
    header = "REF TYPE DIGEST SIZE PLATFORMS LABELS\n"
    both = header + "a:dev app sha256:1 1 KiB linux -\nb:dev app sha256:1 1 KiB linux -\n"
    assert images.missing_names([image], both) == ()
    assert images.missing_names([image], header) == ("a:dev", "b:dev")
    assert images.missing_names(
        [image], both.replace("b:dev app sha256:1", "b:dev app sha256:2")
    ) == ("b:dev",)
