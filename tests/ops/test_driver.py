"""The driver on real hosts with real apt: plan, pins, change with proof, way back, reboots, and what goes wrong on the way.

The packages are stand-ins with the real names, versions and dependencies; the kernel that "runs" and the loaded module are
simulated. apt, dpkg, GRUB's menu, systemd and sshd are real, and Debian's; the hosts say that they are Ubuntu 24.04 and 22.04. The
tests stand in the order of a story and share two hosts.
"""

from __future__ import annotations

import http.server
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import pytest

from laoka.sandbox import faults, hosts, packages
from laoka.sandbox.lab import HostFolder
from tests.hosts import INVENTORY, ROOT, Deployed, environment, laoka, pyinfra_argv
from tests.ops.drivers import (
    CHANGE,
    GATE,
    KERNEL,
    NEW,
    NEXT,
    OLD,
    RELEASES,
    Pair,
    arguments,
    boot_id,
    deploy,
    driver_packages,
    killed_at,
    loaded,
    lock_held,
    make_bare,
    name_release,
    no_requests,
    read_all,
    read_to,
    say,
    under_way,
    while_requests_end,
)

pytestmark = pytest.mark.ops


@pytest.fixture
def pair(driver_pair: Pair) -> Pair:
    return driver_pair


def test_the_dry_run_tells_the_plan_and_predicts_the_first_run(
    driver_hosts: Pair, first_runs: tuple[Deployed, Deployed, Deployed]
) -> None:
    dry, first, _ = first_runs
    for host in driver_hosts:
        assert dry.planned(host.name) == first.changed(host.name)
        assert f"[{host.name}] driver none -> {OLD} (proprietary, Ubuntu's own -server packages)" in dry.stderr
    assert "why: no NVIDIA driver is installed" in dry.stderr
    assert "reboot: not needed; the module is loaded into the running kernel" in dry.stderr


def test_the_first_run_pins_all_of_it(pair: Pair) -> None:
    host = pair[0]
    assert loaded(host) == OLD
    assert say(host, "nvidia-smi --query-gpu=driver_version,count --format=csv,noheader") == f"{OLD}, 1"
    held = say(host, "apt-mark showhold").split()
    assert {"nvidia-dkms-580-server", "libnvidia-compute-580-server", f"linux-image-{KERNEL}", f"linux-headers-{KERNEL}"} <= set(
        held
    )
    entry = say(host, ". /etc/default/grub.d/zz-laoka-kernel.cfg; echo $GRUB_DEFAULT")
    assert entry.endswith(f">gnulinux-{KERNEL}-advanced-5a1d0000-0000-4000-8000-000000000001")
    assert f'set default="{entry}"' in say(host, "cat /boot/grub/grub.cfg")
    assert say(host, "grub-editenv - list") == f"saved_entry={entry}"
    assert "blacklist nouveau" in say(host, "cat /etc/modprobe.d/laoka-nouveau.conf")
    assert '"nvidia"' in say(host, "apt-config dump Unattended-Upgrade::Package-Blacklist")
    assert not say(host, "dpkg-query -W 'cuda*' 2>/dev/null; true")  # this engine compiles nothing on its host


def test_the_second_run_changes_nothing(driver_hosts: Pair, first_runs: tuple[Deployed, Deployed, Deployed]) -> None:
    second = first_runs[2]
    assert second.status == 0 and all(second.changed(host.name) == [] for host in driver_hosts)
    assert "the pins hold: " in second.stderr


def test_pins_that_do_not_hold_fail_the_run(pair: Pair) -> None:
    """Somebody's own settings, read before laoka's, let the newest driver in and switch holds off (either alone does not do it)."""
    host = pair[0]
    rogue = "/etc/apt/preferences.d/00aaa"
    stanza = "Pin: version 595.*\nPin-Priority: 1002\n"
    hosts.execute(host, f"cat > {rogue}", stdin=f"Package: nvidia-* libnvidia-*\n{stanza}", check=True)
    say(host, "echo 'APT::Ignore-Hold \"true\";' > /etc/apt/apt.conf.d/99rogue")
    try:
        done = deploy(host, "-y", data={"driver": OLD})
        assert (done.status, done.stopped_at) == (1, "Driver | Nothing that somebody may type moves driver or kernel")
        assert "`apt-get install nvidia-driver-595` would touch" in done.stderr
    finally:
        say(host, f"rm {rogue} /etc/apt/apt.conf.d/99rogue")


BLIND = f"""\
#!/bin/sh
# A driver of which this version lists no card.
grep -q ' {NEW} ' /proc/driver/nvidia/version 2>/dev/null && {{ echo "No devices were found"; exit 6; }}
exec /usr/bin/nvidia-smi "$@"
"""


def test_a_new_driver_that_lists_no_card_is_taken_back(pair: Pair) -> None:
    """It is installed, proven and loaded; only then it shows that it does not have the card."""
    host = pair[0]
    before = driver_packages(host)
    hosts.execute(host, "cat > /usr/local/bin/nvidia-smi && chmod +x /usr/local/bin/nvidia-smi", stdin=BLIND, check=True)
    try:
        done = deploy(host, "-y")
    finally:
        say(host, "rm /usr/local/bin/nvidia-smi")
    assert (done.status, done.stopped_at) == (1, CHANGE)
    assert "the driver change failed: nvidia-smi lists no card" in done.stderr, done.stderr[-2000:]
    assert f"it is back on {OLD}, and runs as before" in done.stderr
    assert driver_packages(host) == before
    assert (loaded(host), say(host, "systemctl is-active qwen-serve")) == (OLD, "active")


def test_an_upgrade_waits_for_requests_and_for_apts_lock_stops_changes_and_starts_again(pair: Pair) -> None:
    """A request ends a second after the drain began; by then somebody has apt's lock, and lets it go when the run says so."""
    host = pair[0]
    times: dict[str, float] = {}

    def now(what: str) -> None:
        times[what] = float(say(host, "date +%s.%N"))

    with while_requests_end(host, {}) as run:
        time.sleep(1)  # a request that takes its time
        with lock_held(host):
            now("requests ended")
            no_requests(host)
            told = read_to(run, "apt is busy: process ")
            now("lock free")
        status, rest = read_all(run)
    assert status == 0, rest[-2000:]
    assert f"driver {OLD} -> {NEW}" in told and "reboot: only if the old module does not let go" in told
    events = [line.split() for line in say(host, "tail -n 2 /srv/engine.log").splitlines()]
    assert [event for _, event in events] == ["stopped", "started"]
    line = f"sed -n 's/ upgrade nvidia-utils-580-server:.* {OLD}.* {NEW}.*//p' /var/log/dpkg.log | tail -n 1"
    unpacked = float(say(host, f'date -d "$({line})" +%s'))
    stopped, started = (float(when) for when, _ in events)
    assert times["requests ended"] < stopped < times["lock free"] < unpacked + 1 and unpacked < started  # dpkg notes whole seconds
    assert (loaded(host), say(host, "systemctl is-active qwen-serve")) == (NEW, "active")
    # The archive's own signed modules took the place of those of DKMS.
    assert say(host, f"dpkg-query -W -f '${{db:Status-Status}}' linux-modules-nvidia-580-server-{KERNEL}") == "installed"


def test_the_pins_hold_also_when_the_wanted_names_become_traps(pair: Pair) -> None:
    """An archive in which the packages of this branch are transitional ones for the next."""
    host = pair[0]
    leftover = "/etc/modprobe.d/passthrough.conf"
    say(host, f"echo 'options vfio-pci ids=10de:1db6' > {leftover}")
    places = {"sandbox": hosts.PACKAGES_IN_HOST, "trap": f"{hosts.PACKAGES_IN_HOST}/trap"}
    sources = {name: packages.apt_source(place) for name, place in places.items()}
    try:
        done = deploy(host, "-y", data={"apt_sources": json.dumps(sources)})
        assert done.changed(host.name) == ["Base | apt source trap", "Base | apt lists are fresh"]
        assert done.status == 0 and "the pins hold: " in done.stderr
        told = f"hides them from the driver: {leftover}: options vfio-pci ids=10de:1db6"
        assert told in done.stderr  # what somebody left is told, and left to them
        bare = "-o Dir::Etc::Preferences=/dev/null -o Dir::Etc::PreferencesParts=/dev/null -o APT::Ignore-Hold=true"
        assert "Inst nvidia-dkms-595-server" in say(host, f"apt-get -s {bare} dist-upgrade")  # without them it springs
    finally:
        say(host, f"rm -f /etc/apt/laoka.sources.d/laoka-trap.list {leftover}")


@contextmanager
def builds_fail(host: HostFolder, line: str) -> Iterator[None]:
    """DKMS builds no module of this driver version, or for this kernel."""
    (host.card / "dkms-fails").write_text(f"{line}\n")
    try:
        yield
    finally:
        faults.apply(host, "dkms-fails", clear=True)


def test_a_kernel_whose_module_does_not_build_is_not_booted_and_serving_never_stops(pair: Pair) -> None:
    host = pair[0]
    kept = (
        "systemctl show -p MainPID qwen-serve; uname -r; grub-editenv - list; grep GRUB_DEFAULT /etc/default/grub.d/zz*; ls /boot"
    )
    before = driver_packages(host), boot_id(host), say(host, kept)
    with builds_fail(host, NEXT):
        done = deploy(host, "-y", data={"kernel": NEXT})
    assert (done.status, done.stopped_at) == (1, CHANGE)
    assert f"no nvidia module is on disk for kernel {NEXT}" in done.stderr
    assert f"Error! Bad return status for module build on kernel: {NEXT}" in done.stderr
    assert "no reboot was made" in done.stderr and f"it is back on {NEW}, and runs as before" in done.stderr
    assert before == (driver_packages(host), boot_id(host), say(host, kept))
    assert KERNEL in before[2] and NEXT not in before[2]


def test_a_failed_upgrade_goes_back_to_the_packages_kept_on_the_host(pair: Pair) -> None:
    """The other way: to the older version, whose DKMS package does not build."""
    host = pair[0]
    before = driver_packages(host)
    kept = say(host, "for f in /var/lib/laoka/driver/debs/*.deb; do dpkg-deb -W --showformat='${Package}=${Version}\\n' $f; done")
    ours = say(host, "dpkg-query -W -f '${db:Status-Status} ${Package}=${Version}\\n' '*nvidia*' | sed -n 's/^installed //p'")
    assert ours and set(ours.split()) <= set(kept.split())
    with builds_fail(host, OLD):
        done = deploy(host, "-y", data={"driver": OLD})
    assert (done.status, done.stopped_at) == (1, CHANGE)
    assert f"going back to {NEW}" in done.stderr and f"it is back on {NEW}, and runs as before" in done.stderr
    assert driver_packages(host) == before
    assert (loaded(host), say(host, "systemctl is-active qwen-serve")) == (NEW, "active")
    assert "back on" in say(host, "tail -n 1 /var/lib/laoka/driver/log")


def test_without_yes_and_without_the_inventorys_permission_nothing_is_changed(pair: Pair) -> None:
    """Somebody who goes on at pyinfra's own question has not permitted a reboot: that takes --yes, or `reboot` in the inventory."""
    host = pair[0]
    before = driver_packages(host), boot_id(host)
    done = subprocess.run(
        pyinfra_argv(*arguments(host, data={"kernel": NEXT})), cwd=ROOT, env=environment(host.lab), input="\n",
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert "Press enter to execute" in done.stderr and "--> Beginning operation run" in done.stderr
    assert "the change needs a reboot, and none is allowed" in done.stderr and "nothing was changed" in done.stderr
    assert done.returncode == 1
    assert (driver_packages(host), boot_id(host)) == before


def test_secure_boot_stops_what_the_kernel_would_refuse(pair: Pair) -> None:
    host = pair[0]
    boot = boot_id(host)
    faults.apply(host, "secure-boot", clear=False)
    try:
        done = deploy(host, "-y", data={"kernel": NEXT})
    finally:
        faults.apply(host, "secure-boot", clear=True)
    assert f"Secure Boot is on, and the module for kernel {NEXT} is signed by nobody" in done.stderr
    assert (done.stopped_at, boot_id(host), loaded(host)) == (CHANGE, boot, NEW)


def test_a_host_that_does_not_come_back_stops_the_rollout(pair: Pair) -> None:
    for host in pair:
        faults.apply(host, "no-return", clear=False)
    try:
        done = deploy(pair[0], "-y", only=False, data={"kernel": NEXT, "reboot_deadline_s": 10})
    finally:
        for host in pair:
            faults.apply(host, "no-return", clear=True)
    assert "did not come back within 10 s" in done.stderr
    gone = [host for host in pair if not hosts.is_up(host)]
    (alone,) = (host for host in pair if host not in gone)
    assert len(gone) == 1 and f"the rollout stopped at {gone[0].name}" in done.stderr
    assert say(alone, "uname -r") == KERNEL and say(alone, "systemctl is-active qwen-serve") == "active"


def test_both_come_to_the_new_kernel_one_after_the_other(pair: Pair) -> None:
    hosts.up(pair[0].lab, 2, print)  # somebody switches the lost one on again
    dry = deploy(pair[0], "--dry", only=False, data={"kernel": NEXT})
    assert "reboot: needed" in dry.stderr  # on the one that was left as it was
    done = deploy(pair[0], "-y", only=False, data={"kernel": NEXT})
    assert done.status == 0, done.stderr[-2000:]
    for host in pair:
        assert dry.planned(host.name) == done.changed(host.name)
        assert (say(host, "uname -r"), loaded(host), say(host, "systemctl is-active qwen-serve")) == (NEXT, NEW, "active")
        # The old kernel stays, held, to go back to: with its module and in the boot menu; autoremove does not take it either.
        assert {f"linux-image-{KERNEL}", f"linux-image-{NEXT}"} <= set(say(host, "apt-mark showhold").split())
        assert say(host, f"modinfo -k {KERNEL} -F version nvidia") == NEW
        assert f"gnulinux-{KERNEL}-advanced-" in say(host, "cat /boot/grub/grub.cfg")
        gone = say(host, "apt-get -s -o APT::Ignore-Hold=true autoremove")
        assert not [line for line in gone.splitlines() if line.startswith("Remv") and ("nvidia" in line or KERNEL in line)]


def test_a_module_that_is_held_needs_the_reboot_and_without_permission_the_way_back(pair: Pair) -> None:
    host = pair[0]
    faults.apply(host, "module-held", clear=False)
    try:
        done = deploy(host, "-y", data={"kernel": NEXT, "driver": OLD, "reboot": "never"})
        assert "the old module does not let go" in done.stderr and f"it is back on {NEW}" in done.stderr
        assert (loaded(host), say(host, "systemctl is-active qwen-serve")) == (NEW, "active")
        boot = boot_id(host)
        done = deploy(host, "-y", data={"kernel": NEXT, "driver": OLD, "reboot": "allowed"})
    finally:
        faults.apply(host, "module-held", clear=True)
    assert done.status == 0, done.stderr[-2000:]
    assert loaded(host) == OLD and boot_id(host) != boot


# ---- chaos


def test_a_lock_that_is_held_is_waited_for_and_told(pair: Pair) -> None:
    host = pair[1]
    words = "-y", *arguments(host, data={"kernel": NEXT})
    with lock_held(host) as holder, under_way(host, *words) as run:
        told = read_to(run, "apt is busy: process ")
        holder.terminate()
        status, rest = read_all(run)
    assert status == 0, told + rest
    assert "Nothing that somebody may type" in rest  # it went on to its end after the lock was free


def test_a_lock_that_is_never_free_fails_clearly(pair: Pair) -> None:
    host = pair[1]
    with lock_held(host):
        done = deploy(host, "-y", data={"kernel": NEXT, "apt_lock_wait_s": 2})
    assert (done.status, done.stopped_at) == (1, GATE.format(NEW).replace(KERNEL, NEXT))
    assert "apt was busy for 2 s: process " in done.stderr and "/var/lib/dpkg/lock-frontend; let it end" in done.stderr


def test_a_lock_that_comes_in_the_middle_and_stays_ends_the_change_and_the_host_serves(pair: Pair) -> None:
    host = pair[1]
    before = driver_packages(host), loaded(host)
    with while_requests_end(host, {"kernel": NEXT, "driver": OLD, "apt_lock_wait_s": 4}) as run, lock_held(host):
        no_requests(host)
        status, said = read_all(run)
        assert (say(host, "systemctl is-active qwen-serve"), driver_packages(host), loaded(host)) == ("active", *before), said
    assert status == 1
    assert "apt is busy: process " in said and "apt was busy for 4 s: process " in said
    assert f"it is back on {NEW}, and runs as before" in said


def test_a_disk_that_gets_full_in_the_middle_ends_the_change_and_the_host_serves(pair: Pair) -> None:
    host = pair[1]
    before = driver_packages(host), loaded(host)
    with while_requests_end(host, {"kernel": NEXT, "driver": OLD}) as run:
        faults.apply(host, "disk-full", clear=False)
        try:
            no_requests(host)
            status, said = read_all(run)
            assert (say(host, "systemctl is-active qwen-serve"), driver_packages(host), loaded(host)) == ("active", *before), said
        finally:
            faults.apply(host, "disk-full", clear=True)
    assert status == 1
    assert "No space left on device" in said or "no space is left on the disk" in said, said[-2500:]
    assert f"it is back on {NEW}, and runs as before" in said, said[-2500:]


def test_a_full_disk_is_told_before_anything_stops(pair: Pair) -> None:
    host = pair[1]
    before = say(host, "systemctl show -p MainPID qwen-serve"), driver_packages(host)
    faults.apply(host, "disk-full", clear=False)
    try:
        done = deploy(host, "-y", data={"kernel": NEXT, "driver": OLD})
    finally:
        faults.apply(host, "disk-full", clear=True)
    assert done.status == 1
    assert ("the change needs" in done.stderr and "make room first" in done.stderr) or "No space left on device" in done.stderr
    assert (say(host, "systemctl show -p MainPID qwen-serve"), driver_packages(host)) == before


def test_a_small_boot_file_system_is_told_before_anything_stops(pair: Pair) -> None:
    host = pair[1]
    before = say(host, "systemctl show -p MainPID qwen-serve"), driver_packages(host)
    mounted = "mount -t tmpfs -o size=150m none /mnt && cp -a /boot/. /mnt && mount --bind /mnt /boot"
    say(host, mounted)
    try:
        done = deploy(host, "-y", data={"kernel": NEXT, "driver": OLD})
    finally:
        say(host, "umount /boot /mnt")
    assert (done.status, done.stopped_at) == (1, GATE.format(OLD).replace(KERNEL, NEXT))
    assert " MB are free on /boot, the change needs 200 MB: make room first" in done.stderr
    assert (say(host, "systemctl show -p MainPID qwen-serve"), driver_packages(host)) == before


class Mirror(http.server.SimpleHTTPRequestHandler):
    """The stand-ins over http; while `down` is set, every transfer of a package breaks off in its middle.

    It is a proxy too: what is asked for by a whole URL comes out of the same folder, and `proxied` has the URL.
    """

    down = threading.Event()
    proxied: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        if self.path.startswith("http://"):
            self.proxied.append(self.path)
            self.path = urlsplit(self.path).path
        path = Path(self.translate_path(self.path))
        if not (self.down.is_set() and path.suffix == ".deb"):
            return super().do_GET()
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True
        return None

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_a_mirror_that_breaks_off_leaves_all_as_it_was_and_by_a_proxy_the_change_is_made(pair: Pair) -> None:
    host = pair[1]
    folder = packages.folder(host.lab.state)
    server = http.server.ThreadingHTTPServer((host.lab.gateway, 0), partial(Mirror, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    source = {"sandbox": f"deb [trusted=yes] http://{host.lab.gateway}:{server.server_port} ./"}
    before = say(host, "systemctl show -p MainPID qwen-serve"), driver_packages(host)
    say(host, "rm -rf /var/lib/laoka/driver/debs")  # the older version is kept there; here it has to be fetched
    data: dict[str, object] = {"kernel": NEXT, "driver": OLD, "apt_sources": json.dumps(source)}
    try:
        Mirror.down.set()
        done = deploy(host, "-y", data=data)
        assert "the packages could not all be fetched, so nothing was changed and it goes on serving" in done.stderr
        assert (say(host, "systemctl show -p MainPID qwen-serve"), driver_packages(host)) == before
        Mirror.down.clear()
        # The mirror that the inventory names now has a name that only the proxy knows.
        data["apt_sources"] = json.dumps({"sandbox": "deb [trusted=yes] http://archive.invalid ./"})
        data["http_proxy"] = f"http://{host.lab.gateway}:{server.server_port}"
        done = deploy(host, "-y", data=data)
        assert (done.status, loaded(host)) == (0, OLD), done.stderr[-2000:]
        came = [url for url in Mirror.proxied if url.endswith(".deb")]
        assert came and all(url.startswith("http://archive.invalid/") for url in came)
        assert any("nvidia-utils-580-server" in url for url in came)
    finally:
        server.shutdown()


@pytest.mark.long
def test_a_run_that_is_killed_inside_the_change_is_ended_by_the_next(pair: Pair) -> None:
    """Killed before its second, third, ... command, each run one further than the one before."""
    host = pair[1]
    data: dict[str, object] = {"kernel": NEXT, "driver": NEW}
    ended = [killed_at(host, f"{CHANGE}#{number}", data=data).returncode for number in range(2, 6)]
    assert ended == [-9] * 4
    done = deploy(host, "-y", data={"kernel": NEXT})
    assert (done.failed(host.name), loaded(host), say(host, "systemctl is-active qwen-serve")) == ([], NEW, "active")
    assert say(host, "ls /var/lib/laoka/driver").split() == ["debs", "log", "previous", "stage.log", "steps.sh"]


@pytest.mark.long
def test_a_run_killed_between_operations_converges_from_a_bare_state(pair: Pair, first_runs: tuple[Deployed, ...]) -> None:
    """Killed before every second operation that changes something, each run two further than the one before."""
    host = pair[1]
    make_bare(host)
    for name in first_runs[0].planned(host.name)[1::2]:
        ended = killed_at(host, f"{name}#1", data={"kernel": NEXT, "driver": NEW})
        assert ended.returncode == -9, f"{name}\n{ended.stderr[-2500:]}"
    done = deploy(host, "-y", data={"kernel": NEXT})
    assert (done.failed(host.name), loaded(host)) == ([], NEW)
    assert deploy(host, "-y", data={"kernel": NEXT}).changed(host.name) == []


# ---- other sources


def test_a_folder_of_debs_is_enough(pair: Pair) -> None:
    host = pair[1]
    other = NEW if loaded(host) == OLD else OLD
    say(host, f"mkdir -p /srv/usb && cd {hosts.PACKAGES_IN_HOST}/pool && cp *{other}* dkms_* /srv/usb/")
    data: dict[str, object] = {"kernel": NEXT, "driver": other, "apt_sources": "{}", "deb_folders": '["/srv/usb"]'}
    say(host, "rm /etc/apt/laoka.sources.d/*")
    done = deploy(host, "-y", data=data)
    assert (done.status, loaded(host)) == (0, other), done.stderr[-2000:]


def test_nvidias_names_for_debian_with_the_pinning_package_first(pair: Pair) -> None:
    host = pair[1]
    done = deploy(host, "-y", data={"kernel": NEXT, "driver_source": "nvidia-debian"})
    assert (done.status, loaded(host)) == (0, NEW), done.stderr[-2000:]
    versions = say(host, "dpkg-query -W -f '${Package} ${Version}\\n' nvidia-driver-pinning-580 nvidia-driver-cuda")
    assert versions.splitlines() == [f"nvidia-driver-cuda {NEW}-1", "nvidia-driver-pinning-580 580-1"]
    order = say(host, "sed -n 's/.* install \\(nvidia-[^:]*\\):.*/\\1/p' /var/log/dpkg.log").split()
    assert order.index("nvidia-driver-pinning-580") < order.index("nvidia-kernel-dkms")
    assert not say(host, "dpkg-query -W -f '${db:Status-Status} ${Package}\\n' '*-580-server' 2>/dev/null | grep ^installed; true")


def test_the_lock_decides_and_one_for_another_release_is_refused(pair: Pair, tmp_path: Path) -> None:
    host, lock = pair[0], tmp_path / "stack.lock.toml"
    made = laoka(host.lab, "lock", INVENTORY, "--output", str(lock))
    assert made.returncode == 0, made.stderr
    assert f'driver_version = "{NEW}"' in lock.read_text() and 'driver_source = "ubuntu-server"' in lock.read_text()
    done = deploy(host, "-y", data={"kernel": NEXT, "lock_file": lock})
    assert (done.status, done.stopped_at) == (1, "Driver | Gate: a driver that can be had here")
    assert f"{host.name} refused, nothing was changed: the host is ubuntu-24.04, its lock is for debian-12" in done.stderr
    name_release(host, "debian-12")
    done = deploy(host, "--dry", data={"kernel": NEXT, "lock_file": lock})
    assert f"-> {NEW} (proprietary, Ubuntu's own -server packages)" in done.stderr


@pytest.mark.parametrize(
    ("release", "driver", "told"),
    [
        ("ubuntu-26.04", NEW, "Ubuntu's own -server packages"),
        ("debian-12", '"535"', "Debian 12's own non-free packages"),
        ("debian-13", '"550"', "Debian 13's own non-free packages"),
        ("debian-13", NEW, "NVIDIA's repository for Debian"),
    ],
)
def test_the_release_and_the_branch_decide_where_the_driver_comes_from(pair: Pair, release: str, driver: str, told: str) -> None:
    host = pair[0]
    name_release(host, release)
    try:
        done = deploy(host, "--dry", data={"kernel": NEXT, "driver": driver})
    finally:
        name_release(host, RELEASES[0])
    assert told in done.stderr, done.stderr[-2000:]


def test_the_rhel_family_is_refused_in_one_line(pair: Pair) -> None:
    host = pair[0]
    name_release(host, "rocky-9.4")
    try:
        done = deploy(host, "-y")
    finally:
        name_release(host, RELEASES[0])
    assert done.status == 1 and "laoka installs drivers with apt only" in done.stderr
    assert "nvidia-driver:580-dkms" in done.stderr
