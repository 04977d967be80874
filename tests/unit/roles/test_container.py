"""The container route: Containerfile, quadlet and `docker run` say what the lock pins, and systemd takes the units.

None of it is started here: there is no card and no image. What is checked is the text.
"""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest

from roles.engine.choice import choose
from roles.engine.container import container_values
from roles.engine.deploy import TEMPLATES

DATA: dict[str, Any] = {
    "expected_gpus": [{"bdf": "0000:03:00.0", "device_id": "10de:1db6"}] * 4, "os_release": "debian-12",
    "engine_name": "1cat-vllm", "engine_version": "1.5.1", "model_id": "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4",
    "served_model_name": "qwen3.8-27b", "serve_port": 8001,
}  # fmt: skip
SHA256 = "757f2200ba6bd20f7e3e5c8fc68c7e05461df6d284baf676ac0c16ce19434959"  # 1Cat-vLLM 1.5.1
# Keys of a [Container] section: podman-systemd.unit(5) of Podman 4.4 to 5.4.
QUADLET_KEYS = {
    "Image", "ContainerName", "Exec", "EnvironmentFile", "AddDevice", "Network", "ShmSize", "Volume", "NoNewPrivileges",
    "DropCapability", "PodmanArgs",
}  # fmt: skip


def render(name: str) -> str:
    choice = choose("h", DATA, {}, glibc="2.36", container=True)
    assert choice.pin is not None, choice.refused
    values = container_values(choice.pin, choice.stack or {}, DATA, "docker.io/nvidia/cuda:12.8.0-devel-ubuntu24.04", "/x/python")
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.get_template(f"{name}.j2").render(**values)


def test_the_image_installs_nothing_but_the_pinned_wheel() -> None:
    text = render("Containerfile")
    assert f'echo "{SHA256}  /opt/wheels/1cat_vllm-1.5.1-cp312-cp312-linux_x86_64.whl" | sha256sum -c -' in text
    assert text.index("sha256sum -c -") < text.index("pip install") and f"#sha256={SHA256}" in text
    assert "python3.12-venv" in text and text.startswith("# laoka: 1cat-vllm==1.5.1")
    assert "tilelang==0.1.10\n" in render("laoka-constraints.txt") and "torch==2.10.0\n" in render("laoka-constraints.txt")
    assert SHA256 in render("README") and "releases/download/v1.5.1" in render("README")


def sections(text: str) -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for line in text.splitlines():
        if head := re.fullmatch(r"\[(\w+)\]", line):
            found[head[1]] = []
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found[list(found)[-1]].append((key, value))
    return found


def test_the_quadlet_has_only_keys_that_podman_knows() -> None:
    found = sections(render("qwen-serve.container"))
    assert list(found) == ["Unit", "Container", "Service", "Install"]
    container = dict(found["Container"])
    assert set(container) <= QUADLET_KEYS
    assert container["Image"] == "localhost/laoka/1cat-vllm:1.5.1" and container["AddDevice"] == "nvidia.com/gpu=all"
    assert ("Volume", "/srv/laoka/models:/srv/laoka/models:ro") in found["Container"]
    assert "--url http://127.0.0.1:8001 --model qwen3.8-27b" in dict(found["Service"])["ExecStartPost"]
    configparser.ConfigParser(strict=False, interpolation=None).read_string(render("qwen-serve.container"))


def test_docker_gets_the_same(tmp_path: Path) -> None:
    found = sections(render("qwen-serve-docker.service"))
    start = dict(found["Service"])["ExecStart"]
    for word in ("--runtime=nvidia", "--gpus all", "--network host", "--volume /srv/laoka/models:/srv/laoka/models:ro",
                 "localhost/laoka/1cat-vllm:1.5.1 serve --config /etc/qwen-serve/vllm.yaml"):  # fmt: skip
        assert word in start


@pytest.mark.parametrize("which", ["docker", "quadlet"])
def test_systemd_takes_the_units(tmp_path: Path, which: str) -> None:
    """The quadlet is checked as what Podman's generator makes of it: its [Unit], [Service], [Install], and an ExecStart."""
    assert shutil.which("systemd-analyze"), "systemd-analyze is missing: apt-get install systemd"
    stand_in = tmp_path / "stand-in"
    stand_in.write_text("#!/bin/sh\n")
    stand_in.chmod(0o755)
    text = render("qwen-serve-docker.service" if which == "docker" else "qwen-serve.container")
    if which == "quadlet":
        kept = {name: rows for name, rows in sections(text).items() if name != "Container"}
        kept["Service"] = [("Type", "notify"), ("ExecStart", f"{stand_in} run"), *kept["Service"]]
        text = "\n".join(f"[{name}]\n" + "\n".join(f"{key}={value}" for key, value in rows) for name, rows in kept.items())
    unit = tmp_path / "laoka-check.service"
    # Docker and laoka's Python are not on this machine: something executable stands at their paths, the rest is as rendered.
    unit.write_text(
        text.replace("/usr/bin/docker", str(stand_in)).replace("/x/python", str(stand_in)).replace("docker.service", "")
    )
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)], capture_output=True, text=True, timeout=60
    )
    complaints = [line for line in done.stderr.splitlines() if "laoka-check" in line]
    assert complaints == [] and done.returncode == 0, done.stderr
