"""The stand-in packages: built for real, then judged by dpkg-deb and by apt in a root folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from laoka.sandbox import card, packages
from laoka.sandbox.lab import SandboxError

DEADLINE_S = 60
OLD, NEW = "580.159.03-0ubuntu0.24.04.1", "580.173.02-0ubuntu0.24.04.1"
# What a bare host has already, as far as the stand-ins ask for it.
BARE = ("libc6", "python3")


def run(argv: Sequence[str | Path], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in argv],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    assert packages.build(folder) is True
    return folder


def deb(repository: Path, name: str, version: str) -> Path:
    (path,) = (repository / "pool").glob(f"{name}_{version}_*.deb")
    return path


def stanza(name: str, version: str) -> str:
    fields = f"Package: {name}\nStatus: install ok installed\nVersion: {version}\nArchitecture: {architecture()}\nMaintainer: t\n"
    return fields + "Description: t\n\n"


def architecture() -> str:
    return run(["dpkg", "--print-architecture"]).stdout.strip()


class Apt:
    """apt in a root folder of its own: its own configuration, sources, lists and dpkg status; the machine's stay untouched."""

    def __init__(self, root: Path, repository: Path, *, trap: bool = False, installed: str = "") -> None:
        self.root = root
        for folder in (
            "etc/apt/preferences.d",
            "etc/apt/apt.conf.d",
            "var/lib/apt/lists/partial",
            "var/cache/apt/archives/partial",
        ):
            (root / folder).mkdir(parents=True)
        (root / "var/lib/dpkg").mkdir(parents=True)
        (root / "var/lib/dpkg/status").write_text("".join(stanza(name, "9") for name in BARE) + installed)
        lines = [packages.apt_source(repository), *([packages.apt_source(repository / "trap")] if trap else [])]
        (root / "etc/apt/sources.list").write_text("\n".join(lines) + "\n")
        (root / "apt.conf").write_text(
            f'Dir "{root}";\nDir::State::status "{root}/var/lib/dpkg/status";\nAPT::Sandbox::User "root";\n'
            f'APT::Architecture "{architecture()}";\nAPT::Architectures {{ "{architecture()}"; }};\n'
        )
        updated = self("apt-get", "update")
        assert updated.returncode == 0, updated.stderr

    def __call__(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return run(argv, APT_CONFIG=str(self.root / "apt.conf"), LC_ALL="C")

    def pin(self, text: str) -> None:
        (self.root / "etc/apt/preferences.d/test").write_text(text)

    def plan(self, *arguments: str) -> dict[str, str]:
        """What `apt-get -s` would install, by name; the version in brackets."""
        done = self("apt-get", "-s", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", done.stdout, re.MULTILINE))


@pytest.fixture
def apt(tmp_path: Path, repository: Path) -> Apt:
    return Apt(tmp_path / "root", repository)


def installed_server_branch(repository: Path, version: str) -> str:
    """dpkg status entries of a host on which nvidia-headless-580-server and nvidia-utils-580-server are installed."""
    stanzas = (repository / "Packages").read_text().split("\n\n")
    wanted = [text for text in stanzas if f"\nVersion: {version}\n" in text and "-open" not in text.splitlines()[0]]
    assert len(wanted) == 9
    of_the_archive = re.compile(r"^(Filename|Size|MD5sum|SHA\d+): .*\n?", re.MULTILINE)
    return "".join(of_the_archive.sub("", text).strip() + "\nStatus: install ok installed\n\n" for text in wanted)


# ---- the repository


def test_it_is_built_once(repository: Path) -> None:
    before = (repository / "Packages").stat().st_mtime_ns
    assert packages.build(repository) is False
    assert (repository / "Packages").stat().st_mtime_ns == before


def test_it_is_built_again_when_it_was_left_half_done(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "stamp").write_text("of older sources\n")
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool/stale.deb").write_text("")
    inode = tmp_path.stat().st_ino
    assert packages.build(tmp_path) is True
    assert tmp_path.stat().st_ino == inode  # running hosts have this folder mounted
    assert not (tmp_path / "pool/stale.deb").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in repository.iterdir())


def test_every_package_says_what_it_is(repository: Path) -> None:
    debs = [*(repository / "pool").glob("*.deb"), *(repository / "trap/pool").glob("*.deb")]
    assert len(debs) == 2 * 13 + 2 * 3 + 2 * 5 + 1 + 6 + 2 * 6 + 8  # 580, renamed, 595, nvidia-driver, CUDA, kernels, trap
    index = (repository / "Packages").read_text() + (repository / "trap/Packages").read_text()
    descriptions = re.findall(r"^Description: (.*)$", index, re.MULTILINE)
    assert len(descriptions) == len(debs)
    assert all(text.startswith("stand-in of laoka's sandbox, contains no NVIDIA software: ") for text in descriptions)


def test_both_versions_of_the_server_branch_and_their_open_twins_are_there(apt: Apt) -> None:
    for name in (
        "nvidia-headless-580-server",
        "nvidia-headless-no-dkms-580-server",
        "nvidia-dkms-580-server",
        "nvidia-kernel-source-580-server",
        "nvidia-kernel-common-580-server",
        "libnvidia-compute-580-server",
        "nvidia-compute-utils-580-server",
        "nvidia-utils-580-server",
        "nvidia-headless-580-server-open",
        "nvidia-headless-no-dkms-580-server-open",
        "nvidia-dkms-580-server-open",
        "nvidia-kernel-source-580-server-open",
    ):
        versions = re.findall(r"\| (\S+) \|", apt("apt-cache", "madison", name).stdout)
        assert versions == [NEW, OLD], name


def test_packages_touch_no_place_that_could_break_a_host(repository: Path) -> None:
    allowed = re.compile(
        r"\./(usr/share/doc/|usr/lib/\S*/libnvidia-ml\.so|usr/bin/nvidia-(smi|persistenced)$|usr/local/cuda-1[23]\.\d/bin/nvcc$|"
        r"lib/systemd/system/nvidia-persistenced\.service$|boot/vmlinuz-\S+-generic$|lib/modules/\S+-generic/stand-in$|"
        r"usr/src/linux-headers-\S+-generic/stand-in$|etc/apt/preferences\.d/nvidia-driver-pinning-580$)"
    )
    for path in (repository / "pool").glob("*.deb"):
        listing = run(["dpkg-deb", "-c", path]).stdout.splitlines()
        files = [line.split(maxsplit=5)[5].split(" -> ")[0] for line in listing]
        assert all(allowed.match(name) for name in files if not name.endswith("/")), path.name
        assert all(line.split()[1] == "root/root" for line in listing)


# ---- what apt makes of it


def test_the_headless_driver_brings_its_whole_branch_and_no_nvidia_smi(apt: Apt) -> None:
    plan = apt.plan("install", "nvidia-headless-580-server")
    assert set(plan) == {
        "nvidia-headless-580-server",
        "nvidia-headless-no-dkms-580-server",
        "nvidia-dkms-580-server",
        "nvidia-kernel-source-580-server",
        "nvidia-kernel-common-580-server",
        "nvidia-firmware-580-server-580.173.02",
        "libnvidia-compute-580-server",
        "nvidia-compute-utils-580-server",
    }
    assert set(plan.values()) == {NEW}


def test_a_version_pin_holds_the_older_driver(apt: Apt) -> None:
    apt.pin("Package: *nvidia*\nPin: version 580.159.03*\nPin-Priority: 1001\n")
    plan = apt.plan("install", "nvidia-headless-580-server", "nvidia-utils-580-server")
    assert set(plan.values()) == {OLD}


@pytest.mark.parametrize("trap", ["cuda", "cuda-drivers", "cuda-drivers-580"])
def test_the_cuda_packages_pull_branch_595(apt: Apt, trap: str) -> None:
    plan = apt.plan("install", trap)
    assert plan["nvidia-driver-595"].startswith("595.")
    assert plan["libnvidia-compute-595"].startswith("595.")


@pytest.mark.parametrize("trap", ["cuda", "cuda-drivers", "cuda-drivers-580", "nvidia-driver-595", "nvidia-headless-595-server"])
def test_a_negative_pin_forbids_branch_595(apt: Apt, trap: str) -> None:
    apt.pin("Package: *nvidia*\nPin: version 595.*\nPin-Priority: -1\n")
    done = apt("apt-get", "-s", "install", trap)
    assert done.returncode == 100, done.stdout
    assert "Inst" not in done.stdout


def test_cuda_on_a_working_host_throws_the_driver_out(tmp_path: Path, repository: Path) -> None:
    apt = Apt(tmp_path / "root", repository, installed=installed_server_branch(repository, NEW))
    done = apt("apt-get", "-s", "install", "cuda")
    assert done.returncode == 0, done.stderr
    assert "Remv libnvidia-compute-580-server" in done.stdout


def test_the_toolkit_alone_is_harmless(apt: Apt) -> None:
    assert apt.plan("install", "cuda-toolkit-12-8") == {"cuda-toolkit-12-8": "12.8.1-1"}


def test_renamed_packages_move_on_to_the_newest_branch(apt: Apt) -> None:
    assert apt.plan("install", "libnvidia-compute", "nvidia-dkms")["libnvidia-compute"].startswith("610.")


def test_an_upgrade_moves_an_unpinned_driver(tmp_path: Path, repository: Path) -> None:
    apt = Apt(tmp_path / "root", repository, installed=installed_server_branch(repository, OLD))
    assert apt.plan("dist-upgrade")["libnvidia-compute-580-server"] == NEW


def test_the_transitional_package_pulls_595_only_with_the_trap_on(tmp_path: Path, repository: Path) -> None:
    calm = Apt(tmp_path / "calm", repository, installed=installed_server_branch(repository, NEW))
    assert calm.plan("dist-upgrade") == {}
    trapped = Apt(tmp_path / "trapped", repository, trap=True, installed=installed_server_branch(repository, NEW))
    plan = trapped.plan("dist-upgrade")
    assert plan["nvidia-headless-580-server"].startswith("595.")
    assert "nvidia-headless-595-server" in plan
    trapped.pin("Package: *nvidia*\nPin: version 595.*\nPin-Priority: -1\n")
    assert trapped.plan("dist-upgrade") == {}


def test_the_kernel_metapackage_moves_on_to_6_14(apt: Apt) -> None:
    plan = apt.plan("install", "linux-generic")
    assert {"linux-image-6.14.0-33-generic", "linux-headers-6.14.0-33-generic", "linux-modules-6.14.0-33-generic"} <= set(plan)
    apt.pin("Package: linux-image-generic linux-headers-generic linux-generic\nPin: version 6.8.*\nPin-Priority: 1001\n")
    plan = apt.plan("install", "linux-generic")
    assert "linux-image-6.8.0-124-generic" in plan
    assert not any("6.14" in name for name in plan)


def test_nvidias_pinning_package_raises_branch_580(apt: Apt, repository: Path, tmp_path: Path) -> None:
    run(["dpkg-deb", "-x", deb(repository, "nvidia-driver-pinning-580", "580-1"), tmp_path / "root"])
    policy = apt("apt-cache", "policy", "nvidia-headless-580-server").stdout
    assert f"{NEW} 1000" in policy


# ---- what is in them


def test_the_library_and_the_tool_work_together(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("libnvidia-compute-580-server", "nvidia-utils-580-server"):
        assert run(["dpkg-deb", "-x", deb(repository, name, OLD), root]).returncode == 0
    card.create(tmp_path / "card", (card.v100_pcie_32gb(),))
    (library,) = root.glob("usr/lib/*/libnvidia-ml.so.1")
    done = run(
        [root / "usr/bin/nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"],
        LD_LIBRARY_PATH=str(library.parent),
        LAOKA_SANDBOX_GPU_CONF=str(tmp_path / "card/gpu.conf"),
    )
    assert done.stdout == "580.159.03, Tesla V100-PCIE-32GB\n"


def test_nvcc_says_its_release_and_that_it_is_a_stand_in(repository: Path, tmp_path: Path) -> None:
    for release, name, version in (("12.8", "cuda-toolkit-12-8", "12.8.1-1"), ("13.0", "cuda-toolkit-13-0", "13.0.2-1")):
        run(["dpkg-deb", "-x", deb(repository, name, version), tmp_path])
        done = run([tmp_path / f"usr/local/cuda-{release}/bin/nvcc", "--version"])
        assert "stand-in of laoka's sandbox" in done.stdout
        assert f"Cuda compilation tools, release {release}, V{release}" in done.stdout
        assert run([tmp_path / f"usr/local/cuda-{release}/bin/nvcc", "x.cu"]).returncode == 1


def test_persistenced_sets_the_mode_and_waits_for_its_end(repository: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("libnvidia-compute-580-server", "nvidia-compute-utils-580-server"):
        run(["dpkg-deb", "-x", deb(repository, name, NEW), root])
    unit = (root / "lib/systemd/system/nvidia-persistenced.service").read_text()
    assert "ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode" in unit
    (library,) = root.glob("usr/lib/*/libnvidia-ml.so.1")
    card.create(tmp_path / "card", (card.v100_pcie_32gb(),))
    conf = tmp_path / "card/gpu.conf"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "LAOKA_SANDBOX_GPU_CONF": str(conf)}
    for option, words, mode in (
        ("--no-persistence-mode", "persistence mode left alone for 1 of 1 GPU(s)", "0"),
        ("--verbose", "persistence mode on for 1 of 1 GPU(s)", "1"),
    ):
        if mode == "1" and os.geteuid() != 0:
            continue  # as with a real card, only root sets it
        process = subprocess.Popen(
            [root / "usr/bin/nvidia-persistenced", option], env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout
            assert process.stdout.readline() == f"nvidia-persistenced (simulated by laoka's sandbox): {words}\n"
            assert card.parse_conf(conf.read_text())["gpu0.persistence"] == mode
            process.terminate()
            assert process.wait(DEADLINE_S) == 0
        finally:
            process.kill()
            process.communicate()


class ModuleHost:
    """A host's folders, and the maintainer scripts of a module package changed to use them."""

    def __init__(self, root: Path, *, bar_above_4g: bool = True) -> None:
        self.root, self.card, self.bdf = root, root / "card", "0000:03:00.0"
        card.create(self.card, (card.v100_pcie_32gb(),), bar_above_4g=bar_above_4g)
        (root / "src/linux-headers-6.8.0-124-generic").mkdir(parents=True)

    def script(self, package: Path, name: str, argument: str) -> None:
        control = self.root / "control"
        assert run(["dpkg-deb", "-e", package, control]).returncode == 0
        text = (control / name).read_text()
        for path, ours in (("/srv/laoka-sandbox", "card"), ("/var/lib/dkms-standin", "dkms"), ("/usr/src", "src")):
            assert path in text or name == "prerm"
            text = text.replace(path, str(self.root / ours))
        done = subprocess.run(["sh", "-s", argument], input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    @property
    def driver(self) -> Path:
        return self.card / f"sys/bus/pci/devices/{self.bdf}/driver"

    def status(self) -> list[str]:
        return (self.root / "dkms/status").read_text().splitlines()


def test_the_module_package_binds_the_card_and_says_what_dkms_would(repository: Path, tmp_path: Path) -> None:
    host, package = ModuleHost(tmp_path), deb(repository, "nvidia-dkms-580-server", NEW)
    host.script(package, "postinst", "configure")
    machine = os.uname().machine
    assert host.status() == [
        "# stand-in of laoka's sandbox: no module was built",
        f"nvidia/580.173.02, 6.8.0-124-generic, {machine}: installed",
    ]
    assert host.driver.resolve() == (host.card / "sys/bus/pci/drivers/nvidia").resolve()
    assert (
        (host.card / "proc/driver/nvidia/version")
        .read_text()
        .startswith("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.173.02  ")
    )
    (tmp_path / "src/linux-headers-6.14.0-33-generic").mkdir()
    host.script(package, "postinst", "triggered")
    assert f"nvidia/580.173.02, 6.14.0-33-generic, {machine}: installed" in host.status()
    host.script(package, "prerm", "upgrade")
    assert host.driver.exists()
    host.script(package, "prerm", "remove")
    assert not host.driver.is_symlink()
    assert not (host.card / "sys/bus/pci/drivers/nvidia").exists()
    assert not (tmp_path / "dkms").exists()


def test_without_headers_the_module_is_added_but_not_built(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path)
    (tmp_path / "src/linux-headers-6.8.0-124-generic").rmdir()
    host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure")
    assert host.status()[1:] == ["nvidia/580.173.02: added"]


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("nvidia-dkms-580-server-open", NEW),
        ("nvidia-dkms", "595.71.03-0ubuntu0.24.04.1"),
        ("nvidia-dkms-open", "610.43.02-0ubuntu0.24.04.1"),
    ],
)
def test_open_and_newer_modules_do_not_bind_a_v100(repository: Path, tmp_path: Path, name: str, version: str) -> None:
    host = ModuleHost(tmp_path)
    host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure")
    host.script(deb(repository, name, version), "postinst", "configure")
    assert not host.driver.is_symlink()
    assert list((host.card / "sys/bus/pci/drivers/nvidia").iterdir()) == []
    opened = "Open Kernel Module" in (host.card / "proc/driver/nvidia/version").read_text()
    assert opened == name.endswith("-open")


def test_the_module_does_not_bind_a_card_without_bar1(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path, bar_above_4g=False)
    host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure")
    assert not host.driver.exists()


def test_missing_tools_are_an_error_with_the_command_that_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install gcc libc6-dev dpkg apt-utils"):
        packages.build(tmp_path / "out")
