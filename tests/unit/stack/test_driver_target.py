"""What driver a host is to have, and the pins: by the catalogue, without a host."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest

from laoka.catalog.drivers import PackageSource, package_source, package_sources, release
from laoka.stack.driver_change import OWN_VERSION
from laoka.stack.driver_target import (
    DRIVER_NAMES,
    PROPRIETARY,
    DriverTarget,
    Pin,
    TargetError,
    belongs,
    driver_pins,
    kernel_names,
    kernel_pins,
    newer_branches,
    preferences,
    target_from_lock,
    target_of,
    upgrade_blacklist,
    upstream_version,
    wished_driver,
)
from laoka.stack.request import card_of, parse_driver
from laoka.stack.tables import stack_table
from roles.driver.deploy import TYPED_TOO
from tests.unit.stack.asking import stack

ROOT = Path(__file__).resolve().parents[3]
KERNEL = "6.8.0-124-generic"
UBUNTU = target_of("ubuntu-24.04", "580", None, "proprietary", KERNEL)


def priority(pins: tuple[Pin, ...], name: str, version: str) -> int | None:
    """The priority that apt gives: the first stanza that fits name and version (apt_preferences(5)); None: no stanza does."""
    for pin in pins:
        kind, _, wanted = pin.pin.partition(" ")
        if wanted.startswith("/"):
            fits = re.search(wanted.strip("/"), version) is not None
        else:
            fits = kind == "release" or version.startswith(wanted.removesuffix("*"))
        if fits and any(fnmatch.fnmatchcase(name, glob) for glob in pin.packages):
            return pin.priority
    return None


# Names of Ubuntu's and NVIDIA's archives with versions that were seen there.
@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [
        ("nvidia-headless-no-dkms-580-server", "580.173.02-0ubuntu0.24.04.1", 1001),
        ("libnvidia-compute-580-server", "580.159.03-0ubuntu0.24.04.1", 1001),
        ("nvidia-firmware-580-server-580.173.02", "580.173.02-0ubuntu0.24.04.1", 1001),
        # a transitional dummy of the pinned name
        ("nvidia-headless-580-server", "595.71.03-0ubuntu0.24.04.1", -1),
        ("linux-modules-nvidia-580-server-6.8.0-124-generic", "6.8.0-124.124+1", 500),
        ("linux-modules-nvidia-580-server-6.14.0-33-generic", "6.14.0-33.33", -1),
        ("linux-modules-nvidia-580-server-generic", "6.8.0-124.124", -1),
        ("linux-modules-nvidia-580-server-open-6.8.0-124-generic", "6.8.0-124.124+1", -1),
        ("nvidia-dkms-580-server-open", "580.173.02-0ubuntu0.24.04.1", -1),
        ("nvidia-open", "580.173.02-1", -1),
        ("nvidia-kernel-open-dkms", "580.173.02-1", -1),
        ("cuda", "13.0.2-1", -1), ("cuda-12-8", "12.8.1-1", -1), ("cuda-drivers", "595.71.03-1", -1),
        ("cuda-drivers-580", "580.173.02-1", -1), ("nvidia-driver-595", "595.71.03-0ubuntu1", -1),
        ("nvidia-dkms", "610.43.02-0ubuntu1", -1), ("libnvidia-compute", "590.10.01-1", -1),
        ("libnvidia-compute-700", "700.1.1-1", -1),
        # What is not ours, or has a version of its own.
        ("cuda-toolkit-12-8", "12.8.1-1", None), ("nvidia-container-toolkit", "1.17.8-1", None), ("python3", "3.12.3", None),
        ("libnvidia-container1", "1.17.8-1", None), ("nvidia-settings", "510.47.03-0ubuntu1", None),
    ],
)  # fmt: skip
def test_pins_on_ubuntu(name: str, version: str, expected: int | None) -> None:
    assert priority(driver_pins(UBUNTU), name, version) == expected


def test_an_exact_version_is_pinned_exactly() -> None:
    pins = driver_pins(target_of("ubuntu-24.04", "580", "580.159.03", "proprietary", KERNEL))
    assert priority(pins, "nvidia-utils-580-server", "580.159.03-0ubuntu0.24.04.1") == 1001
    assert priority(pins, "nvidia-utils-580-server", "580.173.02-0ubuntu0.24.04.1") == -1


def test_nvidias_repository_has_its_pinning_package_first() -> None:
    for os_release, source in (("debian-12", None), ("ubuntu-22.04", "nvidia-ubuntu")):
        target = target_of(os_release, "580", None, "proprietary", "6.1.0-42-amd64", source)
        assert target.first == ("nvidia-driver-pinning-580",)
        assert priority(driver_pins(target), "nvidia-driver-pinning-580", "580-1") == 500
    assert priority(driver_pins(target_of("debian-13", "580", None, "proprietary", "k")), "nvidia-kernel-dkms", "595.71.03-1") == -1


def test_debians_own_packages_are_pinned_to_their_branch() -> None:
    pins = driver_pins(target_of("debian-12", "535", None, "proprietary", "6.1.0-42-amd64"))
    assert priority(pins, "nvidia-kernel-dkms", "535.309.01-0+deb12u1") == 1001
    assert priority(pins, "libcuda1", "550.163.01-2") == -1
    assert priority(pins, "nvidia-opencl-icd", "535.309.01-0+deb12u1") == 1001
    assert priority(pins, "nvidia-open-kernel-dkms", "535.309.01-0+deb12u1") == -1
    assert priority(pins, "nvidia-persistenced", "535.171.04-1~deb12u1") is None


def test_debian_13_has_one_tool_of_a_later_branch_that_its_driver_needs() -> None:
    pins = driver_pins(target_of("debian-13", "550", None, "proprietary", "6.12.48+deb13-amd64"))
    assert priority(pins, "nvidia-kernel-dkms", "550.163.01-2") == 1001
    assert priority(pins, "nvidia-modprobe", "570.133.07-1") == 500
    # NVIDIA's own, where its repository stands beside Debian's, and the same version of anything else.
    assert priority(pins, "nvidia-modprobe", "595.71.03-1") == -1
    assert priority(pins, "libcuda1", "570.133.07-1") == -1


def test_open_modules_where_the_cards_need_them() -> None:
    target = target_of("ubuntu-24.04", "580", None, "open", KERNEL)
    assert target.packages(built=False)[0] == "nvidia-dkms-580-server-open"
    pins = driver_pins(target)
    assert priority(pins, "nvidia-dkms-580-server-open", "580.173.02-0ubuntu1") == 1001
    assert priority(pins, "nvidia-dkms-580-server", "580.173.02-0ubuntu1") == -1
    assert priority(pins, "linux-modules-nvidia-580-server-open-6.8.0-124-generic", "6.8.0-124.124") == 500


def test_kernel_metapackages_are_kept_away_and_kernels_are_not() -> None:
    for name in ("linux-generic", "linux-image-generic", "linux-headers-generic-hwe-24.04", "linux-image-amd64", "linux-virtual"):
        assert priority(kernel_pins(), name, "6.14.0-33.33") == -1, name
    for name in ("linux-image-6.8.0-124-generic", "linux-libc-dev", "linux-base", "linux-firmware"):
        assert priority(kernel_pins(), name, "1") is None


def test_globs_are_few_because_apt_pays_for_each_at_every_start() -> None:
    for target in (UBUNTU, target_of("debian-12", "580", None, "proprietary", "k")):
        globs = {name for pin in (*driver_pins(target), *kernel_pins()) for name in pin.packages if set(name) & set("*?[")}
        assert len(globs) <= 14, globs


@pytest.mark.parametrize(
    ("branch", "later", "not_later"),
    [
        ("580", ("581", "590", "595", "610", "999"), ("580", "575", "470")),
        ("599", ("600",), ("599", "598")),
        ("999", (), ("999", "580")),
    ],
)
def test_later_branches(branch: str, later: tuple[str, ...], not_later: tuple[str, ...]) -> None:
    expression = newer_branches(branch).strip("/")
    assert all(re.search(expression, f"{number}.10.01-1") for number in later)
    assert not any(re.search(expression, f"{number}.10.01-1") for number in (*not_later, "1.17", "20220217", "5.81"))


def test_preferences_are_stanzas_apart_from_each_other() -> None:
    text = preferences(driver_pins(UBUNTU), "what")
    assert text.startswith("# laoka: what. ")
    blocks = text.split("\n\n")[1:]
    assert len(blocks) == len(driver_pins(UBUNTU))
    assert all(
        [line.split(":")[0] for line in block.splitlines()] == ["Explanation", "Package", "Pin", "Pin-Priority"] for block in blocks
    )


def test_unattended_upgrades_leave_driver_and_kernel_and_do_not_reboot() -> None:
    text = upgrade_blacklist(UBUNTU)
    assert all(f'"{word}"' in text for word in ("nvidia", "libnvidia", "linux-image", "linux-modules"))
    assert 'Automatic-Reboot "false"' in text


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("nvidia-utils-580-server", True), ("libnvidia-compute-580", True), ("libcuda1", True), ("firmware-nvidia-gsp", True),
        ("linux-modules-nvidia-580-server-6.8.0-124-generic", True), ("linux-signatures-nvidia-6.8.0-124-generic", True),
        ("nvidia-container-toolkit", False), ("libnvidia-container1", False), ("linux-image-6.8.0-124-generic", False),
        ("linux-modules-6.8.0-124-generic", False), ("cuda-toolkit-12-8", False),
        ("nvidia-cuda-toolkit", False), ("nvidia-cuda-dev", False), ("nvidia-cuda-mps", True),
    ],
)  # fmt: skip
def test_what_belongs_to_the_driver(name: str, ours: bool) -> None:
    assert belongs(name) is ours


@pytest.mark.parametrize(
    ("version", "bare"),
    [
        ("580.173.02-0ubuntu0.24.04.1", "580.173.02"),
        ("1:580.142-1", "580.142"),
        ("535.309.01-0+deb12u1", "535.309.01"),
        ("580.142", "580.142"),
    ],
)
def test_upstream_versions(version: str, bare: str) -> None:
    assert upstream_version(version) == bare


@pytest.mark.parametrize(
    ("os_release", "branch", "source"),
    [
        ("ubuntu-22.04", "580", "ubuntu-server"), ("ubuntu-24.04", "580", "ubuntu-server"),
        ("ubuntu-26.04", "580", "ubuntu-server"), ("ubuntu-24.04", "570", "ubuntu-server"),
        ("debian-12", "580", "nvidia-debian"), ("debian-13", "580", "nvidia-debian"),
        ("debian-12", "535", "debian-12"), ("debian-13", "550", "debian-13"),
    ],
)  # fmt: skip
def test_sources_are_chosen_by_release_and_branch(os_release: str, branch: str, source: str) -> None:
    assert target_of(os_release, branch, None, "proprietary", KERNEL).source.id == source


def test_releases_and_names_are_rows_of_the_catalogue_and_no_code_asks_for_one() -> None:
    """The catalogue's rows are the only place where a release is told from another, or a package of an archive has its name."""
    code = [
        *(ROOT / "laoka/stack").glob("driver_*.py"), *(ROOT / "laoka/operations").glob("driver*"),
        *(path for role in ("kernel", "driver", "cuda") for path in (ROOT / "roles" / role).glob("*.py")),
    ]  # fmt: skip
    assert len(code) > 8
    names = {template.format(branch="580", kernel=KERNEL) for source in package_sources() for template in _templates(source)}
    asked = re.compile(r"""["'](ubuntu|debian|rhel|rocky|jammy|noble|bookworm|trixie)\b""")
    for path in code:
        text = path.read_text(encoding="utf-8")
        assert not asked.search(text), path
        used = {word for word in re.findall(r"""["']([a-z][a-z0-9.+-]+)["']""", text) if word in names}
        assert used <= {*TYPED_TOO, *OWN_VERSION, *DRIVER_NAMES, *PROPRIETARY}, (path, used)


def _templates(source: PackageSource) -> tuple[str, ...]:
    return (
        *source.first,
        *source.modules("proprietary", built=True),
        *source.modules("proprietary", built=False),
        *source.versioned,
    )


SOURCES = [source for source in package_sources() if source.system == "apt"]


@pytest.mark.parametrize(
    ("os_release", "source"),
    [(os_release, source) for source in SOURCES for os_release in source.releases],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_each_row_gives_its_release_its_own_names(os_release: str, source: PackageSource) -> None:
    branch = source.branches[0] if source.branches else "580"
    target = target_of(os_release, branch, None, "proprietary", KERNEL, source.id)
    assert target.first == tuple(name.format(branch=branch) for name in source.first)
    wanted = (*source.dkms, *source.userspace)
    assert target.packages(built=False) == tuple(name.format(branch=branch, kernel=KERNEL) for name in wanted)
    assert target.built_modules == tuple(name.format(branch=branch, kernel=KERNEL) for name in source.prebuilt)


@pytest.mark.parametrize(
    ("os_release", "branch", "source", "says"),
    [
        ("debian-12", "550", None, "no archive for debian-12 offers driver branch 550"),
        ("arch-1", "580", None, "Ubuntu 22.04 to 26.04 and Debian 12 and 13"),
        ("ubuntu-20.04", "580", None, "no driver packages are known for ubuntu-20.04"),
        ("ubuntu-24.04", "580", "nonsense", "there are: ubuntu-server"),
        ("debian-12", "580", "debian-12", "offers branches 535, not 580"),
    ],
)
def test_what_can_not_be_had_is_told(os_release: str, branch: str, source: str | None, says: str) -> None:
    with pytest.raises(TargetError, match=says):
        target_of(os_release, branch, None, "proprietary", KERNEL, source)


@pytest.mark.parametrize("os_release", ["rhel-8", "rhel-9", "rhel-10", "rocky-9.4", "almalinux-8.10", "centos-10"])
def test_the_rhel_family_is_known_by_name_and_refused_by_the_role(os_release: str) -> None:
    row = release(os_release)
    assert row is not None and package_source(row.id, "580") is not None
    with pytest.raises(
        TargetError, match=r"laoka installs drivers with apt only.*(nvidia-driver:580-dkms|kmod-nvidia-latest-dkms)"
    ):
        target_of(os_release, "580", None, "proprietary", "5.14.0-570.el9")


def test_the_resolver_knows_the_names_of_the_rhel_family() -> None:
    made = stack("4xv100-sxm2-32gb", "rhel-9", engine="revolta")
    assert made.driver_source == "nvidia-dnf" and "nvidia-driver:580-dkms" in made.driver_packages


def test_every_source_installs_proprietary_modules_for_a_v100() -> None:
    for source in package_sources():
        if source.system == "apt":
            branch = source.branches[0] if source.branches else "580"
            target = DriverTarget(source, branch, None, "proprietary", KERNEL)
            assert not any("-open" in name for built in (True, False) for name in target.packages(built=built))
            assert all(belongs(name) for name in target.packages(built=True))


def test_a_lock_gives_branch_version_and_source() -> None:
    table = stack_table(stack("2xv100-pcie-32gb", "ubuntu-24.04"))
    target = target_from_lock(table, "ubuntu-24.04", KERNEL)
    assert target is not None
    assert (target.source.id, target.branch, target.version, target.flavour) == (
        "ubuntu-server",
        "580",
        "580.173.02",
        "proprietary",
    )
    with pytest.raises(TargetError, match=r"the host is debian-12, its lock is for ubuntu-24\.04"):
        target_from_lock(table, "debian-12", KERNEL)
    assert target_from_lock({"os_release": "debian-12"}, "debian-12", KERNEL) is None


V100, BLACKWELL, P100 = "10de:1db6", "10de:2bb5", "10de:15f8"


@pytest.mark.parametrize(
    ("cards", "wish", "expected"),
    [
        ((V100,), None, ("580", None, "proprietary")),
        ((V100, P100), "580", ("580", None, "proprietary")),
        ((V100,), "580.159.03", ("580", "580.159.03", "proprietary")),
        ((V100,), "535", ("535", None, "proprietary")),
    ],
)
def test_without_a_lock_the_cards_and_the_wish_decide(
    cards: tuple[str, ...], wish: str | None, expected: tuple[object, ...]
) -> None:
    assert wished_driver([card_of(card) for card in cards], parse_driver(wish)) == expected


@pytest.mark.parametrize(
    ("cards", "wish", "says"),
    [
        ((V100,), "595", "does not drive Tesla V100.*: 580 is the last one"),
        ((V100,), "cuda-drivers", "names no branch"),
        ((V100,), "nvidia-driver-580-server-open", "they have no GSP"),
    ],
)
def test_a_wish_that_would_lose_the_card_is_refused(cards: tuple[str, ...], wish: str, says: str) -> None:
    with pytest.raises(TargetError, match=says):
        wished_driver([card_of(card) for card in cards], parse_driver(wish))


def test_kernel_packages_by_release() -> None:
    from laoka.catalog.drivers import kernel_packages

    row = kernel_packages("debian-12")
    assert row is not None and kernel_names(row, "6.1.0-42-amd64") == ("linux-image-6.1.0-42-amd64", "linux-headers-6.1.0-42-amd64")
