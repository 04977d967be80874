"""Labs keep apart: names, networks, and the record of what they changed on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from laoka.sandbox import lab, network, supervise, tree
from laoka.sandbox.lab import Changes, SandboxError, open_lab


def test_labs_have_networks_and_folders_of_their_own(tmp_path: Path) -> None:
    labs = [open_lab(name, tmp_path) for name in (*lab.LAB_NETWORKS, "mine", "yours")]
    assert len({item.prefix for item in labs}) == len({item.folder for item in labs}) == len(labs)


def test_interface_names_fit_the_kernels_limit(tmp_path: Path) -> None:
    for name in (*lab.LAB_NETWORKS, "sixsix"):
        assert len(open_lab(name, tmp_path).host(99).interface) <= 15  # IFNAMSIZ is 16 with the closing zero


@pytest.mark.parametrize("name", ["", "Demo", "sevenxx", "a/b", "..", "1st", "a b"])
def test_a_name_that_no_lab_can_have_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAOKA_SANDBOX_LAB", name)
    if name:
        with pytest.raises(SandboxError, match="lower-case letters"):
            open_lab(state=tmp_path)
    else:
        assert open_lab(state=tmp_path).name == "demo"


def test_a_lab_whose_network_is_taken_is_refused(tmp_path: Path) -> None:
    names = [f"x{number}" for number in range(500)]
    first = open_lab(names[0], tmp_path)
    first.folder.mkdir(parents=True)
    twin = next(name for name in names[1:] if lab.Lab(name, tmp_path).prefix == first.prefix)
    with pytest.raises(SandboxError, match=f"network of lab {first.name}, which is up"):
        open_lab(twin, tmp_path)


def test_hosts_are_those_with_a_record(tmp_path: Path) -> None:
    demo = open_lab("demo", tmp_path)
    for number in (10, 2):
        demo.host(number).folder.mkdir(parents=True)
        demo.host(number).record.write_text("{}")
    demo.host(3).folder.mkdir()  # left by a run that was killed before it wrote the record
    assert [host.name for host in lab.hosts(demo)] == ["v100-2", "v100-10"]
    assert lab.hosts(demo)[0].address == "10.77.0.2"


def test_changes_survive_a_crash(tmp_path: Path) -> None:
    changes = Changes(("demo", "tests"), (("net/ipv4/ip_forward", "0"),), True)
    lab.write_changes(tmp_path, changes)
    assert lab.read_changes(tmp_path) == changes
    assert lab.read_changes(tmp_path / "none") == Changes()


def test_ruleset_masquerades_only_the_labs_own_network(tmp_path: Path) -> None:
    text = network.ruleset(open_lab("tests", tmp_path))
    assert 'ip saddr 10.77.1.0/24 oifname != "lk-tests" masquerade' in text
    assert "forward" not in text and "input" not in text


def test_boot_command_gives_the_host_a_clock_from_zero_and_asks_no_systemd_here() -> None:
    argv = supervise.command("lk-demo-1", "v100-1", "lk-demo", Path("/x/root"), ["--bind=/a:/b"], 1234)
    assert argv[argv.index("--boottime") + 1] == "-1234"
    assert {"--register=no", "--keep-unit", "--network-bridge=lk-demo", "--bind=/a:/b", "--directory=/x/root"} <= set(argv)


def test_the_trees_name_changes_with_its_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = tree.path(tmp_path)
    monkeypatch.setattr(tree, "PACKAGES", (*tree.PACKAGES, "htop"))
    assert tree.path(tmp_path) != before
