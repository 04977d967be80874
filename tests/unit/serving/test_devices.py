"""NVIDIA's device nodes by the kernel's own numbers."""

from __future__ import annotations

from pathlib import Path

from laoka.serving.devices import Node, main, parse_minor, wanted_nodes

# As read on a host with driver 580.159.04; its nodes were 195:0, 195:255, 238:0 and 238:1.
DEVICES = """\
Character devices:
  1 mem
195 nvidia
195 nvidiactl
238 nvidia-uvm
239 nvidia-nvswitch
241 nvidia-caps

Block devices:
  7 loop
238 virtblk
"""
OLDER = DEVICES.replace("195 nvidia\n195 nvidiactl", "195 nvidia-frontend")


def test_the_nodes_of_a_real_host() -> None:
    uvm = (Node("/dev/nvidia-uvm", 238, 0), Node("/dev/nvidia-uvm-tools", 238, 1))
    nodes = (Node("/dev/nvidia0", 195, 0), Node("/dev/nvidiactl", 195, 255), *uvm)
    assert wanted_nodes(DEVICES, (0,)) == nodes
    assert wanted_nodes(OLDER, (0,)) == nodes


def test_a_module_that_is_not_loaded_has_no_nodes() -> None:
    assert wanted_nodes(DEVICES.replace("238 nvidia-uvm\n", ""), (0,)) == wanted_nodes(DEVICES, (0,))[:2]
    assert wanted_nodes("Character devices:\n  1 mem\n", (0, 1)) == ()


def test_minors() -> None:
    assert parse_minor("Model: Tesla V100\nDevice Minor: \t 3\n") == 3
    assert parse_minor("Model: Tesla V100\n") is None and parse_minor("Device Minor: 300\n") is None


def test_what_is_there_is_left_alone_and_a_host_without_driver_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/devices").write_text(DEVICES)
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        (tmp_path / "dev" / name).touch()
    assert main(tmp_path) == 0 and sorted(path.name for path in (tmp_path / "dev").iterdir()) == [
        "nvidia-uvm",
        "nvidia-uvm-tools",
        "nvidiactl",
    ]
    (tmp_path / "proc/devices").write_text("Character devices:\n  1 mem\n")
    assert main(tmp_path) == 0
