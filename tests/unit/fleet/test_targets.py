"""An inventory's hosts as targets: where each is, how to get there, how many cards it should have."""

from __future__ import annotations

from pathlib import Path

from laoka.cli.inventory import targets_of_inventory
from laoka.fleet.targets import ssh_target
from laoka.host.collect import SshTarget, ssh_argv

ROOT = Path(__file__).resolve().parents[3]


def test_the_examples_hosts_are_reached_as_pyinfra_reaches_them(tmp_path: Path) -> None:
    example = (ROOT / "inventories" / "example.py").read_text()
    (tmp_path / "lab.py").write_text(example.replace('# "ssh_config_file"', '"ssh_config_file"'))
    (tmp_path / "example_ssh_config").write_text((ROOT / "inventories" / "example_ssh_config").read_text())
    targets = {target.name: target for target in targets_of_inventory(str(tmp_path / "lab.py"))}
    tower = targets["x99-tower"]
    assert tower.expected_gpus == 2 and tower.ssh is not None
    assert (tower.ssh.host, tower.ssh.user) == ("192.168.7.21", "ops")
    argv = ssh_argv(tower.ssh)
    assert argv[argv.index("-F") + 1] == str(tmp_path / "example_ssh_config")  # it has the ProxyJump


def test_a_host_without_data_is_its_own_name() -> None:
    assert ssh_target("gpu1.lan", {}) == SshTarget("gpu1.lan")
    assert ssh_target("@local", {"ssh_user": "x"}) is None


def test_no_expected_cards_means_not_said(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text('hosts = ["a", ("b", {"expected_gpus": []})]\n')
    assert [target.expected_gpus for target in targets_of_inventory(str(tmp_path / "lab.py"))] == [None, 0]
