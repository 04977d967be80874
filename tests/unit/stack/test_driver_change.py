"""The plan of a driver change, and what must be true before a reboot and after it, by values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.messages import LANGUAGES
from laoka.host.apt import Simulation, read_lock_holders, read_simulation, read_simulations, read_space
from laoka.host.driver import DkmsEntry, ModuleOnDisk
from laoka.host.kernel import read_grub_menu
from laoka.host.report import HostReport
from laoka.host.unread import Unread
from laoka.stack.driver_change import (
    Change,
    DriverState,
    Journal,
    Offer,
    boot_kernel,
    grub_entry,
    known_bad,
    moved,
    plan_change,
    state_of,
    unfinished,
    unready,
)
from laoka.stack.driver_target import DriverTarget, target_of
from tests.unit.checks.x99_host import host

KERNEL, NEXT = "6.8.0-124-generic", "6.14.0-33-generic"
OLD, NEW = "580.159.03", "580.173.02"
UBUNTU = "-0ubuntu0.24.04.1"
TARGET = target_of("ubuntu-24.04", "580", None, "proprietary", KERNEL)
EXACT = target_of("ubuntu-24.04", "580", NEW, "proprietary", KERNEL)
BUILT = f"linux-modules-nvidia-580-server-{KERNEL}"
LIBRARIES = ("nvidia-headless-no-dkms-580-server", "nvidia-utils-580-server")


def packages(version: str, *modules: str) -> dict[str, str]:
    found = dict.fromkeys((*LIBRARIES, "libnvidia-compute-580-server"), version + UBUNTU)
    return {**found, **{name: "6.8.0-124.124" if name.startswith("linux") else version + UBUNTU for name in modules}}


def served(version: str = NEW, **changes: Any) -> DriverState:
    """A host on which the driver runs as wanted, with modules that the archive built."""
    own = packages(version, BUILT)
    state = DriverState(
        running_kernel=KERNEL, next_kernel=KERNEL, loaded=version, loaded_open=False,
        on_disk={KERNEL: ModuleOnDisk(KERNEL, version, "proprietary", True, "Canonical Ltd. Kernel Module Signing")},
        userspace=(version,), packages=own, held=frozenset(own), broken=(), nouveau=False, dkms=(), secure_boot=False, gpus=2,
    )  # fmt: skip
    return replace(state, **changes)


def bare(**changes: Any) -> DriverState:
    return served(loaded=None, on_disk={}, userspace=(), packages={}, held=frozenset(), gpus=None, **changes)


def offer(version: str = NEW, *, built: bool = True) -> Offer:
    installs = tuple(packages(version).items())
    good = Simulation(installs)
    return Offer(good if built else Simulation(refused="Unable to locate package"), good)


def planned(
    state: DriverState, target: DriverTarget = TARGET, offered: Offer | None = None, journal: Journal | None = None
) -> Change:
    change = plan_change(state, target, offered or offer(), journal or Journal())
    assert change is not None
    return change


def keys(change: Change) -> list[str]:
    return [reason.key.removeprefix("driver.") for reason in change.reasons]


# ---- current -> wanted


def test_a_host_as_wanted_needs_nothing() -> None:
    assert plan_change(served(), TARGET, offer()) is None
    assert plan_change(served(), EXACT, offer()) is None


def test_a_newer_version_in_the_archive_moves_nothing() -> None:
    assert plan_change(served(OLD), TARGET, offer(NEW)) is None


def test_a_bare_host_gets_built_modules_and_no_reboot() -> None:
    change = planned(bare())
    assert (change.built, change.install, change.activation) == (True, (BUILT, *LIBRARIES), "load")
    assert (change.current, change.version, keys(change)) == (None, NEW, ["why_absent"])


def test_dkms_where_the_archive_built_none_for_the_kernel() -> None:
    change = planned(bare(), offered=offer(built=False))
    # DKMS can't build without the kernel's headers.
    assert (change.built, change.install) == (False, (f"linux-headers-{KERNEL}", "nvidia-dkms-580-server", *LIBRARIES))


NAMED = target_of("ubuntu-24.04", "580", None, "proprietary", NEXT, kernel_named=True)
IMAGE, MODULES, HEADERS, EXTRA = (f"linux-{part}-" for part in ("image", "modules", "headers", "modules-extra"))


def test_a_kernel_that_was_asked_for_comes_with_its_module_while_serving_goes_on() -> None:
    kernels = frozenset({IMAGE + KERNEL, MODULES + KERNEL})
    change = planned(served(kernels=kernels), NAMED, offer(built=False))
    assert change.kernel == (IMAGE + NEXT, MODULES + NEXT, HEADERS + NEXT)
    assert (keys(change), change.activation) == (["why_no_module", "why_no_kernel"], "reboot")
    assert change.quiet  # the libraries and the loaded module stay
    assert not planned(served(OLD, kernels=kernels), replace(NAMED, version=NEW), offer(built=False)).quiet


def test_a_new_kernel_gets_what_the_running_one_has_beyond_the_usual() -> None:
    kernels = frozenset({IMAGE + KERNEL, MODULES + KERNEL, EXTRA + KERNEL})
    assert EXTRA + NEXT in planned(served(kernels=kernels), NAMED).kernel


def test_dkms_modules_that_are_there_and_right_are_left_alone() -> None:
    own = packages(NEW, "nvidia-dkms-580-server")
    assert plan_change(served(packages=own, held=frozenset(own)), TARGET, offer()) is None


def test_an_exact_version_is_gone_to_from_either_side() -> None:
    change = planned(served(OLD), EXACT)
    assert (keys(change), change.activation, change.current, change.version) == (["why_version"], "reload", OLD, NEW)
    back = planned(served(NEW), target_of("ubuntu-24.04", "580", OLD, "proprietary", KERNEL), offer(OLD))
    assert (back.activation, back.version) == ("reload", OLD)


def test_another_kernel_is_pinned_and_has_its_module() -> None:
    target = target_of("ubuntu-24.04", "580", None, "proprietary", NEXT)
    own = packages(NEW, "nvidia-dkms-580-server")
    ready = served(
        packages=own, held=frozenset(own), on_disk={name: ModuleOnDisk(name, NEW, "proprietary") for name in (KERNEL, NEXT)}
    )
    change = planned(ready, target, offer(built=False))
    assert (keys(change), change.install, change.activation, change.reboots) == (["why_kernel"], (), "reboot", True)


@pytest.mark.parametrize(
    ("state", "key", "activation"),
    [
        (served(nouveau=True, loaded=None), "why_nouveau", "reboot"),
        (served(loaded=None), "why_not_loaded", "load"),
        (served(loaded=OLD), "why_pending", "reload"),
        (served(loaded_open=True), "why_pending", "reload"),
    ],
)
def test_packages_are_right_but_another_module_runs(state: DriverState, key: str, activation: str) -> None:
    change = planned(state)
    assert (keys(change), change.activation, change.install) == ([key], activation, ())


@pytest.mark.parametrize(
    ("extra", "removed"),
    [
        ({"nvidia-dkms-580-server-open": NEW + UBUNTU}, ("nvidia-dkms-580-server-open",)),
        ({"nvidia-utils-595": "595.71.03-1", "nvidia-dkms-595": "595.71.03-1"}, ("nvidia-dkms-595", "nvidia-utils-595")),
        ({"libnvidia-compute-535": "535.261.03-0ubuntu1"}, ("libnvidia-compute-535",)),
        ({f"linux-modules-nvidia-580-server-open-{KERNEL}": "6.8.0-124.124"}, (f"linux-modules-nvidia-580-server-open-{KERNEL}",)),
    ],
)  # fmt: skip
def test_packages_of_another_kind_or_branch_go(extra: dict[str, str], removed: tuple[str, ...]) -> None:
    own = {**packages(NEW, BUILT), **extra}
    change = planned(served(packages=own, held=frozenset(own)))
    assert (change.remove, "why_unwanted" in keys(change)) == (removed, True)


@pytest.mark.parametrize("name", ["nvidia-settings", "nvidia-prime", "nvidia-modprobe"])
def test_packages_with_a_version_of_their_own_stay(name: str) -> None:
    own = {**packages(NEW, BUILT), name: "510.47.03-0ubuntu1"}
    assert plan_change(served(packages=own, held=frozenset(own)), TARGET, offer()) is None


def test_modules_of_the_old_kernel_stay_for_the_way_back() -> None:
    own = {**packages(NEW, BUILT), "linux-modules-nvidia-580-server-6.8.0-110-generic": "6.8.0-110.110"}
    assert plan_change(served(packages=own, held=frozenset(own)), TARGET, offer()) is None


def test_what_is_not_on_hold_is_put_on_hold_and_nothing_else() -> None:
    change = planned(served(held=frozenset(LIBRARIES)))
    assert (keys(change), change.install, change.activation) == (["why_loose"], (), "none")
    assert change.hold == ("libnvidia-compute-580-server", BUILT)


def test_half_installed_packages_are_installed_again() -> None:
    change = planned(served(broken=("nvidia-dkms-580-server",)))
    assert "why_broken" in keys(change) and change.install


def test_what_an_earlier_run_left_is_ended() -> None:
    change = planned(served(), journal=Journal(True, ("qwen-serve.service",)))
    assert keys(change) == ["why_begun", "why_stopped"] and not change.install


def test_a_refusal_of_apt_is_kept_for_the_gate() -> None:
    change = planned(
        bare(), offered=Offer(Simulation(refused="no"), Simulation(refused="Unable to locate package nvidia-dkms-580-server"))
    )
    assert change.refused == "Unable to locate package nvidia-dkms-580-server" and change.version is None


def test_the_plan_reads_in_both_languages() -> None:
    own = {**packages(OLD, BUILT), "nvidia-open": "580.159.03-1"}
    for change in (planned(bare()), planned(served(OLD, packages=own), EXACT), planned(served(nouveau=True))):
        for lang in LANGUAGES:
            lines = [line.say(lang) for line in change.lines()]
            assert len(lines) >= 3 and all(lines)
    head = planned(served(OLD), EXACT).lines()[0].say("en")
    assert head == f"driver {OLD} -> {NEW} (proprietary, Ubuntu's own -server packages); kernel {KERNEL} -> {KERNEL}"


STATES = st.builds(
    served,
    loaded=st.sampled_from([None, OLD, NEW, "595.71.03"]),
    loaded_open=st.booleans(),
    running_kernel=st.sampled_from([KERNEL, NEXT]),
    nouveau=st.booleans(),
    packages=st.sampled_from([{}, packages(OLD, BUILT), packages(NEW, BUILT), packages(NEW, "nvidia-dkms-580-server-open")]),
    on_disk=st.sampled_from(
        [{}, {KERNEL: ModuleOnDisk(KERNEL, NEW)}, {KERNEL: ModuleOnDisk(KERNEL, None)}, {KERNEL: ModuleOnDisk(KERNEL, OLD)}]
    ),
)


@given(STATES, st.sampled_from([TARGET, EXACT]))
def test_no_plan_means_that_all_is_proven(state: DriverState, target: DriverTarget) -> None:
    """Fail closed: a state is left alone only when nothing speaks against its next boot, and the wanted module runs."""
    state = replace(state, held=frozenset(state.packages))
    change = plan_change(state, target, offer())
    if change is None:
        assert target.fits(state.loaded) and not state.loaded_open and state.running_kernel == target.kernel
        assert state.module(target.kernel) == state.loaded
    else:
        assert change.reasons
        assert change.reboots == (state.running_kernel != target.kernel or state.nouveau)


# ---- before a reboot


def unready_keys(state: DriverState, target: DriverTarget = TARGET) -> list[str]:
    return [item.key.removeprefix("driver.") for item in unready(state, target)]


def on_disk(version: str | None, flavour: Any = "proprietary", signer: str = "") -> dict[str, ModuleOnDisk]:
    return {KERNEL: ModuleOnDisk(KERNEL, version, flavour, bool(signer), signer)}


DKMS = packages(NEW, "nvidia-dkms-580-server")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (served(), []),
        (served(on_disk={}), ["no_module"]),
        (served(on_disk=on_disk(None)), ["no_module"]),
        (served(on_disk={NEXT: ModuleOnDisk(NEXT, NEW)}), ["no_module"]),
        (served(on_disk=on_disk("595.71.03"), userspace=("595.71.03",)), ["module_version"]),
        (served(on_disk=on_disk(NEW, "open")), ["module_flavour"]),
        (served(userspace=(OLD,)), ["library_version"]),
        (served(userspace=(OLD, NEW)), ["libraries_differ"]),
        (served(userspace=()), ["no_library"]),
        (served(broken=("nvidia-dkms-580-server",)), ["half_installed"]),
        # captures of dkms status: built and installed; only added; built for another kernel; an old line of the other form
        (served(packages=DKMS, dkms=(DkmsEntry("nvidia", NEW, KERNEL, "installed"),)), []),
        (served(packages=DKMS, dkms=(DkmsEntry("nvidia", NEW, None, "added"),)), ["dkms_not_installed"]),
        (served(packages=DKMS, dkms=(DkmsEntry("nvidia", NEW, NEXT, "installed"),)), ["dkms_not_installed"]),
        (served(packages=DKMS, dkms=(DkmsEntry("nvidia", NEW, KERNEL, "built"),)), ["dkms_not_installed"]),
        (served(packages=DKMS, dkms=(DkmsEntry("nvidia", OLD, KERNEL, "installed"),)), []),  # 580.* is wanted
        (
            served(packages=DKMS, dkms=(DkmsEntry("nvidia", NEW, KERNEL, "installed", "(WARNING! Diff to the installed)"),)),
            ["dkms_warning"],
        ),
        (served(dkms=(DkmsEntry("nvidia", OLD, None, "added"),)), []),  # the archive's built modules are what counts
    ],
)  # fmt: skip
def test_what_must_be_true_before_a_reboot(state: DriverState, expected: list[str]) -> None:
    assert unready_keys(state) == expected


@pytest.mark.parametrize(
    ("signer", "enrolled", "refused"),
    [
        ("Canonical Ltd. Kernel Module Signing", (), False),
        ("Debian Secure Boot CA", (), False),
        ("", (), True),
        ("DKMS module signing key", (), True),
        ("DKMS module signing key", ("DKMS module signing key",), False),
        ("x99 Secure Boot Module Signature key", ("another key",), True),
    ],
)
def test_secure_boot_wants_a_signer_whose_key_is_enrolled(signer: str, enrolled: tuple[str, ...], refused: bool) -> None:
    state = served(secure_boot=True, on_disk=on_disk(NEW, signer=signer), enrolled=enrolled)
    assert unready_keys(state) == (["secure_boot"] if refused else [])
    assert unready_keys(replace(state, secure_boot=False)) == []


def test_the_boot_loader_stays_with_the_running_kernel_until_the_module_is_proven() -> None:
    target = target_of("ubuntu-24.04", "580", None, "proprietary", NEXT)
    assert boot_kernel(served(), target) == KERNEL
    ready = served(on_disk={name: ModuleOnDisk(name, NEW, "proprietary") for name in (KERNEL, NEXT)})
    assert boot_kernel(ready, target) == NEXT


# ---- after it


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (served(), []),
        (served(running_kernel=NEXT), ["other_kernel", "triple"]),
        (served(loaded=None, gpus=None), ["not_loaded", "triple", "no_answer"]),
        (served(loaded=OLD), ["triple"]),
        (served(userspace=(OLD,)), ["triple"]),
        (served(userspace=()), ["triple"]),
        (served(loaded="595.71.03", on_disk=on_disk("595.71.03"), userspace=("595.71.03",)), ["loaded_version"]),
        (served(loaded_open=True), ["loaded_flavour"]),
        (served(gpus=1), ["gpu_count"]),
        (served(gpus=None), ["no_answer"]),
    ],
)
def test_what_must_be_true_after_it(state: DriverState, expected: list[str]) -> None:
    assert [item.key.removeprefix("driver.") for item in unfinished(state, TARGET, 2)] == expected


# ---- the rest


def test_drivers_that_are_known_not_to_build_on_a_kernel() -> None:
    assert known_bad("580.119.02", "6.17.9-76061709-generic") == "pop#3811"
    assert known_bad("580.173.02", KERNEL) is None and known_bad(None, KERNEL) is None


def test_what_apt_would_move() -> None:
    simulations = {
        "upgrade": Simulation((("bash", "5.2"), ("linux-libc-dev", "6.8"), ("linux-base", "4.9"))),
        "dist-upgrade": Simulation((("nvidia-utils-580-server", "580.173.02"),)),
        "install cuda": Simulation((("cuda", "13"),), ("libnvidia-compute-580-server",)),
        "install linux-generic": Simulation((("linux-image-6.14.0-33-generic", "6.14"),)),
        "install nvidia-driver-595": Simulation(refused="no candidate"),
    }
    assert [dict(item.values)["typed"] for item in moved(simulations, served(), TARGET)] == [
        "apt-get dist-upgrade", "apt-get install cuda", "apt-get install linux-generic",
    ]  # fmt: skip


def test_an_upgrade_that_apt_can_not_try_proves_nothing() -> None:
    held = Simulation(refused="Unmet dependencies. Try 'apt --fix-broken install'")
    told = moved({"upgrade": held, "dist-upgrade": Simulation(), "install cuda": held}, served(), TARGET)
    assert [(item.key, dict(item.values)["typed"]) for item in told] == [("driver.apt_untried", "apt-get upgrade")]


@pytest.mark.parametrize(
    ("name", "version", "removes", "moves"),
    [
        ("libnvidia-gl-580-server", NEW + UBUNTU, (), False),  # one more part of the driver that is there
        ("libnvidia-gl-580-server", OLD + UBUNTU, (), True),
        ("libnvidia-gl-580-server", NEW + UBUNTU, ("nvidia-utils-580-server",), True),
        ("nvidia-utils-580-server", NEW + UBUNTU, (), True),  # it is there, on hold
        ("nvidia-dkms-580-server-open", NEW + UBUNTU, (), True),
        ("nvidia-driver-595", "595.71.03", (), True),
        ("libnvidia-egl-wayland1", "1:1.1.10-1", (), False),
        ("linux-modules-nvidia-580-server-6.14.0-33-generic", "6.14.0-33.33", (), True),
    ],
)
def test_a_part_in_the_wanted_version_moves_nothing(name: str, version: str, removes: tuple[str, ...], moves: bool) -> None:
    found = moved({"install x": Simulation(((name, version),), removes)}, served(), EXACT)
    assert bool(found) is moves


GRUB = """\
menuentry 'Ubuntu' --class ubuntu $menuentry_id_option 'gnulinux-simple-UUID' {
submenu 'Advanced options for Ubuntu' $menuentry_id_option 'gnulinux-advanced-UUID' {
\tmenuentry 'Ubuntu, with Linux 6.14.0-33-generic' --class os $menuentry_id_option 'gnulinux-6.14.0-33-generic-advanced-UUID' {
\tmenuentry 'Ubuntu, with Linux 6.14.0-33-generic (recovery mode)' $menuentry_id_option 'gnulinux-6.14.0-33-generic-recovery-UUID' {
\tmenuentry 'Ubuntu, with Linux 6.8.0-124-generic' --class os $menuentry_id_option 'gnulinux-6.8.0-124-generic-advanced-UUID' {
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
"""
FLAT = """\
menuentry 'Debian, with Linux 6.1.0-42-amd64' $menuentry_id_option 'gnulinux-6.1.0-42-amd64-advanced-UUID' {
menuentry 'Debian, with Linux 6.1.0-42-amd64 (recovery mode)' $menuentry_id_option 'gnulinux-6.1.0-42-amd64-recovery-UUID' {
"""


@pytest.mark.parametrize(
    ("menu", "kernel", "entry"),
    [
        (GRUB, KERNEL, "gnulinux-advanced-UUID>gnulinux-6.8.0-124-generic-advanced-UUID"),
        (GRUB, NEXT, "gnulinux-advanced-UUID>gnulinux-6.14.0-33-generic-advanced-UUID"),
        (GRUB, "6.8.0-12-generic", None),
        (FLAT, "6.1.0-42-amd64", "gnulinux-6.1.0-42-amd64-advanced-UUID"),
    ],
)
def test_the_exact_entry_of_the_boot_menu(menu: str, kernel: str, entry: str | None) -> None:
    assert grub_entry(read_grub_menu(menu), kernel) == entry


def test_a_state_is_read_out_of_a_report() -> None:
    state = state_of(host())
    assert isinstance(state, DriverState)
    assert (state.running_kernel, state.loaded, state.gpus, state.nouveau) == (KERNEL, NEW, 2, False)
    assert state.module(KERNEL) == NEW


def test_leftovers_that_give_cards_to_virtual_machines_are_seen() -> None:
    ours, foreign = "options vfio-pci ids=10de:1db6,10de:10f2", "options vfio-pci ids=8086:1521"
    line = "BOOT_IMAGE=/boot/vmlinuz root=UUID=0aaa vfio-pci.ids=10de:1db4"
    state = state_of(host(cmdline=line, modprobe=f"/etc/modprobe.d/vm.conf:{ours}\n/etc/modprobe.d/nic.conf:{foreign}"))
    assert isinstance(state, DriverState)
    assert state.vfio == ("vfio-pci.ids=10de:1db4", f"/etc/modprobe.d/vm.conf: {ours}")


def test_what_could_not_be_read_is_no_state() -> None:
    assert isinstance(state_of(HostReport.from_files({"uname": "Linux x 6.8.0-124-generic"})), Unread)


# What apt prints: its own words, with prices of a real run shortened.
SIMULATED = """\
Reading package lists...
Inst libnvidia-compute-580-server [580.159.03-0ubuntu0.24.04.1] (580.173.02-0ubuntu0.24.04.1 Ubuntu:24.04/noble-updates [amd64])
Inst dkms (3.0.11-1ubuntu13 Ubuntu:24.04/noble [all])
Remv nvidia-utils-535 [535.183.01-0ubuntu1]
Conf dkms (3.0.11-1ubuntu13 Ubuntu:24.04/noble [all])
"""
REFUSED = """\
Some packages could not be installed.
The following packages have unmet dependencies:
 linux-modules-nvidia-580-server-6.8.0-124-generic : Depends: nvidia-kernel-common-580-server (<= 580.159.03-1)
E: Unable to correct problems, you have held broken packages.
"""


def test_simulations_are_read() -> None:
    found = read_simulation(SIMULATED, 0)
    assert found.version("libnvidia-compute-580-server") == "580.173.02-0ubuntu0.24.04.1" and found.version("x") is None
    assert (len(found.installs), found.removes, found.refused) == (2, ("nvidia-utils-535",), "")
    refused = read_simulation(REFUSED, 100)
    assert refused.refused.startswith("Unable to correct problems") and "<= 580.159.03-1" in refused.refused
    assert read_simulation("", 100).refused == "apt-get ended with status 100"
    both = read_simulations(f"@apt upgrade\n{SIMULATED}@end 0\n@apt install cuda\n{REFUSED}@end 100\n")
    assert set(both) == {"upgrade", "install cuda"} and both["install cuda"].installs == ()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("Need to get 98.4 MB of archives.\nAfter this operation, 1,024 kB of additional disk space will be used.\n", 99_424_000),
        ("Need to get 0 B/120 MB of archives.\nAfter this operation, 3 GB of additional disk space will be used.\n", 3_000_000_000),
        ("Need to get 5 MB of archives.\nAfter this operation, 7 MB disk space will be freed.\n", 5_000_000),
        ("E: nothing\n", None),
    ],
)
def test_the_room_that_apt_asks_for(text: str, size: int | None) -> None:
    assert read_space(text) == size


@given(st.text(max_size=300), st.integers(0, 255))
def test_no_words_of_apt_make_the_readers_fail(text: str, status: int) -> None:
    assert isinstance(read_simulation(text, status).refused, str)
    assert read_space(text) is None or read_space(text) >= 0  # type: ignore[operator]
    assert isinstance(read_lock_holders(text), tuple) and isinstance(read_simulations(text), dict)
