"""The stand-in packages: built for real, then judged by dpkg-deb and by apt in a root folder of its own."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from laoka.sandbox import boot, card, packages
from laoka.sandbox.lab import SandboxError
from laoka.sandbox.simulated import MODULE_TOOL
from laoka.stack.driver_target import driver_pins, kernel_pins, preferences, target_of

DEADLINE_S = 60
OLD, NEW = "580.159.03-0ubuntu0.24.04.1", "580.173.02-0ubuntu0.24.04.1"
KERNEL = "6.8.0-124-generic"
# What a bare host has already, as far as the stand-ins ask for it.
BARE = ("libc6", "python3", "dkms")


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
    wanted = [
        text
        for text in stanzas
        if f"\nVersion: {version}\n" in text and "-580-server" in text.splitlines()[0] and "-open" not in text.splitlines()[0]
    ]
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
    # 580-server with built modules, renamed, 595, nvidia-driver, NVIDIA's 580, its names for Debian, dkms, CUDA, kernels, trap
    assert len(debs) == 2 * (13 + 5) + 2 * 3 + 2 * 5 + 1 + 4 + 3 * 6 + 1 + 7 + 2 * 6 + 10
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
        r"\./(usr/share/doc/|usr/lib/\S*/libnvidia-ml\.so|usr/bin/nvidia-(smi|persistenced)$|usr/local/cuda-1[23]\.\d/bin/nvcc$|usr/bin/nvcc$|"
        r"lib/systemd/system/nvidia-persistenced\.service$|boot/(vmlinuz|config)-\S+-generic$|lib/modules/\S+-generic/(kernel/stand-in|build)$|"
        r"lib/modules/\S+-generic/kernel/nvidia-580srv(-open)?/nvidia\.ko$|usr/src/nvidia-[\d.]+/nvidia\.ko$|usr/sbin/dkms$|"
        r"usr/src/linux-headers-\S+-generic/Makefile$|etc/apt/preferences\.d/nvidia-driver-pinning-580$)"
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


# ---- laoka's pins


def pins(source: str, version: str | None = None) -> str:
    target = target_of("ubuntu-24.04", "580", version, "proprietary", KERNEL, source)
    return preferences((*driver_pins(target), *kernel_pins()))


TRAPS = (
    ("upgrade",), ("dist-upgrade",), ("install", "cuda"), ("install", "cuda-drivers"), ("install", "cuda-drivers-580"),
    ("install", "nvidia-driver-595"), ("install", "nvidia-headless-595-server"), ("install", "nvidia-driver"),
    ("install", "nvidia-dkms"),
    ("install", "libnvidia-compute"), ("install", "nvidia-dkms-580-server-open"), ("install", "nvidia-kernel-open-dkms"),
    ("install", "linux-generic"), ("install", "linux-image-generic"),
)  # fmt: skip


@pytest.mark.parametrize("version", [OLD, NEW])
def test_the_pins_resist_every_trap_also_when_the_names_become_transitional(tmp_path: Path, repository: Path, version: str) -> None:
    apt = Apt(tmp_path / "root", repository, trap=True, installed=installed_server_branch(repository, version))
    assert any("595" in name for name in apt.plan("dist-upgrade"))  # without the pins it is one
    apt.pin(pins("ubuntu-server", version.split("-")[0]))
    for words in TRAPS:
        done = apt("apt-get", "-s", *words)
        assert "Inst" not in done.stdout and "Remv" not in done.stdout, (words, done.stdout)
        assert done.returncode == 0 or words[0] == "install", (words, done.stdout, done.stderr)  # an upgrade can be tried


def test_signed_modules_of_the_archive_bring_their_driver(apt: Apt) -> None:
    apt.pin(pins("ubuntu-server"))
    plan = apt.plan("install", f"linux-modules-nvidia-580-server-{KERNEL}", "nvidia-headless-no-dkms-580-server")
    assert plan[f"linux-modules-nvidia-580-server-{KERNEL}"] == "6.8.0-124.124+1"
    assert plan["libnvidia-compute-580-server"] == NEW and f"linux-image-{KERNEL}" in plan and "dkms" not in plan


def test_an_older_driver_takes_the_modules_that_were_built_with_it(apt: Apt) -> None:
    apt.pin(pins("ubuntu-server", "580.159.03"))
    name = f"linux-modules-nvidia-580-server-{KERNEL}"
    done = apt("apt-get", "-s", "install", name, "nvidia-headless-no-dkms-580-server")
    # apt takes the newest upload of a name, and that one wants the newer driver: DKMS it is.
    assert done.returncode == 100 and "nvidia-kernel-common-580-server" in done.stdout


def test_nvidias_repository_for_ubuntu_stays_on_its_branch(tmp_path: Path, repository: Path) -> None:
    apt = Apt(tmp_path / "root", repository, trap=True)
    names = ("nvidia-dkms-580", "libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580")
    assert apt.plan("install", "nvidia-dkms-580")["nvidia-dkms"].startswith("610.")  # the name says 580
    apt.pin(pins("nvidia-ubuntu"))
    plan = apt.plan("install", "nvidia-driver-pinning-580", *names)
    assert {version for name, version in plan.items() if name in names} == {NEW}


def test_nvidias_repository_for_debian_stays_on_its_branch(tmp_path: Path, repository: Path) -> None:
    apt = Apt(tmp_path / "root", repository)
    assert apt.plan("install", "nvidia-driver-cuda")["nvidia-driver-cuda"] == "595.71.03-1"
    target = target_of("debian-12", "580", None, "proprietary", KERNEL)
    apt.pin(preferences((*driver_pins(target), *kernel_pins())))
    plan = apt.plan("install", *target.first, *target.packages(built=False))
    assert plan["nvidia-driver-cuda"] == plan["nvidia-kernel-dkms"] == plan["libnvidia-ml1"] == "580.173.02-1"
    assert plan["nvidia-driver-pinning-580"] == "580-1" and not any("open" in name for name in plan)


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
    """A host's folders, the maintainer scripts of a module package changed to use them, and the simulated modprobe."""

    def __init__(self, root: Path, *, bar_above_4g: bool = True) -> None:
        self.root, self.card, self.bdf = root, root / "card", "0000:03:00.0"
        card.create(self.card, (card.v100_pcie_32gb(),), bar_above_4g=bar_above_4g)
        (self.card / "kernel").write_text("6.8.0-124-generic\n")
        (root / "src/linux-headers-6.8.0-124-generic").mkdir(parents=True)
        (root / "bin").mkdir()
        (root / "bin/depmod").write_text("#!/bin/sh\n")
        (root / "bin/depmod").chmod(0o755)

    def script(self, package: Path, name: str, argument: str) -> int:
        control = self.root / "control"
        assert run(["dpkg-deb", "-e", package, control]).returncode == 0
        assert run(["dpkg-deb", "-x", package, self.root]).returncode == 0
        text = (control / name).read_text()
        places = {
            "/srv/laoka-sandbox": "card",
            "/var/lib/dkms-standin": "dkms",
            "/usr/src/linux": "src/linux",
            "/usr/src/nvidia": "usr/src/nvidia",
            "/lib/modules": "lib/modules",
        }
        for path, ours in places.items():
            text = text.replace(path, str(self.root / ours))
        environment = {**os.environ, "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["sh", "-s", argument], input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False, env=environment
        )
        return done.returncode

    def kernel(self, name: str, argument: str) -> subprocess.CompletedProcess[str]:
        tool = self.root / "bin" / name
        tool.write_text(MODULE_TOOL.read_text())
        return run(["sh", tool, argument], CARD=str(self.card), ROOT=str(self.root))

    @property
    def driver(self) -> Path:
        return self.card / f"sys/bus/pci/devices/{self.bdf}/driver"

    @property
    def loaded(self) -> str:
        return (self.card / "proc/driver/nvidia/version").read_text()

    def status(self) -> list[str]:
        return (self.root / "dkms/status").read_text().splitlines()


def test_the_module_package_puts_a_module_there_and_says_what_dkms_would(repository: Path, tmp_path: Path) -> None:
    host, package = ModuleHost(tmp_path), deb(repository, "nvidia-dkms-580-server", NEW)
    assert host.script(package, "postinst", "configure") == 0
    machine = os.uname().machine
    assert host.status() == [f"nvidia/580.173.02, 6.8.0-124-generic, {machine}: installed"]
    assert not host.driver.exists()  # a module on disk is not loaded yet
    (tmp_path / "src/linux-headers-6.14.0-33-generic").mkdir()
    host.script(package, "postinst", "triggered")
    assert f"nvidia/580.173.02, 6.14.0-33-generic, {machine}: installed" in host.status()
    assert host.kernel("modprobe", "nvidia").returncode == 0
    assert host.driver.resolve() == (host.card / "sys/bus/pci/drivers/nvidia").resolve()
    assert host.loaded.startswith("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.173.02  ")
    assert host.script(package, "prerm", "remove") == 0
    assert not list(tmp_path.glob("lib/modules/*/updates/dkms/nvidia.ko")) and not (tmp_path / "dkms").exists()
    assert host.driver.exists()  # it stays loaded until it is unloaded
    assert host.kernel("rmmod", "nvidia").returncode == 0
    assert not host.driver.is_symlink() and not (host.card / "proc/driver/nvidia").exists()
    assert host.kernel("modprobe", "nvidia").returncode == 1


def test_without_headers_the_module_is_added_but_not_built(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path)
    (tmp_path / "src/linux-headers-6.8.0-124-generic").rmdir()
    host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure")
    assert host.status() == ["nvidia/580.173.02: added"]
    done = host.kernel("modprobe", "nvidia")
    assert (done.returncode, "Module nvidia not found" in done.stderr) == (1, True)


def test_a_build_can_fail_on_purpose(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path)
    (host.card / "dkms-fails").touch()
    assert host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure") == 10
    assert host.status() == ["nvidia/580.173.02: added"]


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
    host.script(deb(repository, name, version), "postinst", "configure")
    assert host.kernel("modprobe", "nvidia").returncode == 0
    assert not host.driver.is_symlink()
    assert list((host.card / "sys/bus/pci/drivers/nvidia").iterdir()) == []
    assert ("Open Kernel Module" in host.loaded) == name.endswith("-open")


def test_the_module_does_not_bind_a_card_without_bar1(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path, bar_above_4g=False)
    host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure")
    host.kernel("modprobe", "nvidia")
    assert not host.driver.exists()


def test_secure_boot_refuses_what_nobody_signed(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path)
    (host.card / "secure-boot").touch()
    host.script(deb(repository, "nvidia-dkms-580-server", NEW), "postinst", "configure")
    done = host.kernel("modprobe", "nvidia")
    assert (done.returncode, "Key was rejected by service" in done.stderr) == (1, True)
    (tmp_path / "lib/modules/6.8.0-124-generic/updates/dkms/nvidia.ko").unlink()
    host.script(deb(repository, f"linux-modules-nvidia-580-server-{KERNEL}", "6.8.0-124.124+1"), "postinst", "configure")
    assert host.kernel("modprobe", "nvidia").returncode == 0


def test_a_boot_loads_the_module_of_the_kernel_that_the_menu_takes(repository: Path, tmp_path: Path) -> None:
    host = ModuleHost(tmp_path)
    for kernel in ("6.8.0-124-generic", "6.14.0-33-generic"):
        (tmp_path / f"boot/vmlinuz-{kernel}").parent.mkdir(exist_ok=True)
        (tmp_path / f"boot/vmlinuz-{kernel}").touch()
    host.script(deb(repository, f"linux-modules-nvidia-580-server-{KERNEL}", "6.8.0-124.124"), "postinst", "configure")
    menu = "".join(
        f"menuentry 'L, with Linux {name}' $menuentry_id_option 'gnulinux-{name}-advanced-U' {{\n"
        for name in ("6.14.0-33-generic", "6.8.0-124-generic")
    )
    (tmp_path / "boot/grub").mkdir()
    for default, kernel, version in (
        ("0", "6.14.0-33-generic", None),
        ("gnulinux-6.8.0-124-generic-advanced-U", "6.8.0-124-generic", "580.159.03"),
        ("gone", "6.14.0-33-generic", None),
    ):
        (tmp_path / "boot/grub/grub.cfg").write_text(f'   set default="${{next_entry}}"\n   set default="{default}"\n{menu}')
        boot.boot(tmp_path, host.card)
        assert (host.card / "kernel").read_text() == f"{kernel}\n"
        assert (host.card / "proc/driver/nvidia/version").exists() == (version is not None)
        assert version is None or f"  {version}  " in host.loaded


def test_missing_tools_are_an_error_with_the_command_that_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match="apt-get install gcc libc6-dev dpkg apt-utils"):
        packages.build(tmp_path / "out")
