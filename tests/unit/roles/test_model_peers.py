"""Copies between hosts of one inventory: how a source is written for the host, which key goes with it, what stays of old lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from laoka.operations.peers import merged
from laoka.serving.model_source import Source, parse_source, remote_shell
from roles.model.peers import address_of, is_from_peer, named_hosts, written
from roles.settings import InventoryError


def inventory(**hosts: dict[str, Any]) -> dict[str, Any]:
    """Hosts as pyinfra has them, by name."""
    found: dict[str, Any] = {}
    state = SimpleNamespace(inventory=found.values())
    for name, data in hosts.items():
        found[name] = SimpleNamespace(name=name, state=state, data=SimpleNamespace(dict=lambda data=data: data))
    return found


HOSTS = inventory(a={"ssh_hostname": "192.0.2.1"}, b={"ssh_port": 2222, "model_peer_address": "10.0.0.2"}, c={})
FOLDER = "org--model/" + "ab" * 20


def test_another_host_is_asked_at_its_address_and_the_host_itself_is_left_out() -> None:
    told = ("host:a", "host:b", "host:c", "hf-mirror")
    assert written(HOSTS["a"], told, FOLDER) == [
        f"ssh://laoka-peer@10.0.0.2:2222/{FOLDER}", f"ssh://laoka-peer@c:22/{FOLDER}", "hf-mirror",
    ]  # fmt: skip
    assert address_of(HOSTS["a"]) == ("192.0.2.1", 22)
    assert named_hosts(told) == ("a", "b", "c")
    assert is_from_peer(HOSTS["a"], told) and not is_from_peer(HOSTS["a"], ("host:a", "hf"))


def test_a_host_that_the_inventory_does_not_have_is_told() -> None:
    with pytest.raises(InventoryError, match="host a: source host:d: the inventory has no host of this name; it has: a, b, c"):
        written(HOSTS["a"], ("host:d",), FOLDER)


def test_the_peers_key_goes_to_peers_only() -> None:
    source = parse_source(f"ssh://laoka-peer@192.0.2.1:22/{FOLDER}", "org/model")
    assert source == Source("rsync", f"laoka-peer@192.0.2.1:/{FOLDER}", port=22)
    shell = remote_shell(source, {})
    assert "-i /etc/laoka/peer/key" in shell and "StrictHostKeyChecking=yes" in shell and shell.endswith(" -p 22")
    assert "peer" not in remote_shell(parse_source("ssh://me@nas/models", "org/model"), {})
    assert remote_shell(parse_source("ssh://me@nas:23/models", "org/model"), {"RSYNC_RSH": "ssh -i k"}) == "ssh -i k -p 23"


def test_a_host_that_is_not_part_of_a_run_keeps_its_line() -> None:
    old = "one # a\ntwo # b\nthree # gone\nby hand\n"
    assert merged(old, {"a": "ONE # a"}, {"a", "b"}) == "ONE # a\ntwo # b\n"
    assert merged("", {}, {"a"}) == ""
