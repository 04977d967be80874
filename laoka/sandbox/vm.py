"""Throw-away virtual machines with a Debian kernel of their own: for PCI, the kernel log, modules and GRUB, which hosts here lack.

QEMU in software (TCG): no /dev/kvm is needed, and none is used. The first call makes the image (about 2 minutes), boots it
once and takes the snapshot `clean`, in which sshd answers; every later start and `restore` go back to it in about 2 seconds.
How a test uses one:

    image = vm.image(state, print)                         # made once; `state` is the sandbox's folder (Lab.state)
    with vm.running(image, "driver") as guest:             # a copy of `clean`; gone at the end, whatever happens
        vm.execute(guest, "uname -r", check=True)          # as root over ssh
        vm.copy_in(guest, Path("some.deb"), "/root/")
        vm.load_fakepci(guest, cards=2, window_mib=0)      # two simulated V100s on a board without Above 4G Decoding
        vm.set_fakepci(guest, lost=1)                      # card 0 falls off the bus: 0000:81:00.0 answers all ones
        vm.log_kernel(guest, "NVRM: Xid (PCI:0000:81:00): 79, GPU has fallen off the bus.")   # a record of the kernel's own
        vm.unload_fakepci(guest)                           # the next load may have other parameters
        vm.reboot(guest)                                   # through GRUB: `grub-reboot`, `grub-set-default` count
        vm.save(guest, "built"); vm.restore(guest, "built")     # snapshots of one's own; `clean` is there from the start
        HostReport.from_probe(text_over_ssh(vm.ssh_target(guest)))

Guests see no network but this machine's ssh, unless started with `internet=True`. Besides root there is the user `friend`
without rights (`vm.ssh_target(guest, user="friend")`). Two kernels are installed: Debian 12's, which boots by default, and
OLDER_KERNEL of Debian 11 (`grub-reboot`, see `boot_kernel`). Another image, for example with a driver's source packages,
is a `Recipe` of its own.

What the guest takes for its board is made up (DMI says so), and it is not told that it is a virtual machine:
systemd-detect-virt says `none`, so that laoka's checks judge windows and links as they would on a board. The cards are
simulated: laoka/sandbox/fakepci.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from laoka.files import write_atomic
from laoka.host.collect import SshTarget
from laoka.host.kernel import read_grub_menu
from laoka.process import Completed, run
from laoka.sandbox import processes, ssh, tree
from laoka.sandbox.lab import SandboxError, machine_lock
from laoka.sandbox.processes import ProcessRecord

# Debian's names. qemu-utils brings qemu-img, util-linux unshare, prlimit and setpriv.
TOOLS = {
    "qemu-system-x86_64": "qemu-system-x86", "qemu-img": "qemu-utils", "debootstrap": "debootstrap", "mkfs.ext4": "e2fsprogs",
    "unshare": "util-linux", "prlimit": "util-linux", "setpriv": "util-linux", "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
}  # fmt: skip
PACKAGES = (
    "linux-image-cloud-amd64", "linux-headers-cloud-amd64", "initramfs-tools", "grub-pc-bin", "grub2-common", "gcc", "make",
    "pciutils", "openssh-server", "libelf1",
)  # fmt: skip
# The last kernel of Debian 11 as released: it words a BAR without room in the older way. Debian 11 gets no more of them.
OLDER_SUITE, OLDER_KERNEL, OLDER_BASE = "bullseye", "5.10.0-32-cloud-amd64", "5.10"
DOWNLOAD_MB = 145  # measured: 126 MB of packages, the rest is apt's lists
REVISION = 1  # raise it when the recipe below changes
DISK_GB = 8
# Named one by one: what a newer mkfs.ext4 adds by itself, the GRUB and the older kernel of the image can't read.
EXT4_FEATURES = "none,has_journal,ext_attr,dir_index,filetype,extent,64bit,flex_bg,sparse_super,large_file,huge_file,extra_isize"
USER = "friend"
CLEAN = "clean"
FAKEPCI_BUS = 0x80  # root bus of the simulated cards: card N (from 0) is 0000:81:00.0 and on, its port 0000:80:0(N+1).0
BUILD_DEADLINE_S = 900
BOOT_DEADLINE_S = 400  # 20 s on an idle machine; ten times that was seen on one with a load of 14
MONITOR_DEADLINE_S = 300
# QEMU's own part beside the guest's memory: translated code (tb-size), buffers, thread stacks. A hard limit: prlimit.
OVERHEAD_MIB, TRANSLATED_CODE_MIB = 1536, 128


@dataclass(frozen=True)
class Recipe:
    """What an image is made of.

    `packages` are added to PACKAGES; `components` of the Debian archive are used beside main (`non-free`); `script` is run by
    sh as root in the tree at the end, without services and with the network; `memory_mib` is the guest's, fixed in its snapshots.
    """

    packages: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    script: str = ""
    memory_mib: int = 768


@dataclass(frozen=True)
class Image:
    """A made image: `disk.raw` (never written again), `clean.qcow2` with the snapshot, the ssh key, the layer with its packages."""

    folder: Path
    base: Path
    recipe: Recipe

    @property
    def disk(self) -> Path:
        return self.folder / "disk.raw"

    @property
    def snapshot(self) -> Path:
        return self.folder / "clean.qcow2"

    @property
    def key(self) -> Path:
        return self.folder / "id_ed25519"

    @property
    def layer(self) -> Path:
        """What the image has beyond the sandbox's Debian tree; modules are built against its headers."""
        return self.folder / "layer"


@dataclass(frozen=True)
class Vm:
    """A running guest: its name, its folder, the loopback port of its sshd, its QEMU process."""

    name: str
    image: Image
    folder: Path
    port: int
    process: ProcessRecord

    @property
    def monitor(self) -> Path:
        return self.folder / "monitor"

    @property
    def known_hosts(self) -> Path:
        return self.folder / "known_hosts"

    @property
    def control(self) -> Path:
        """The socket of the ssh connection that root's commands share: each of its own would take seconds."""
        return self.folder / "ssh"

    @property
    def console(self) -> Path:
        """What the guest wrote to its serial console, GRUB and kernel messages included."""
        return self.folder / "console.log"


def check_machine() -> None:
    """Refuse with one line what this can't do without. Errors: SandboxError."""
    if os.geteuid() != 0:
        raise SandboxError("the sandbox's virtual machines are made from a Debian tree, which needs root: run it with sudo")
    missing = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if missing:
        raise SandboxError(f"the sandbox's virtual machines need tools that are missing: apt-get install {' '.join(missing)}")


# ---- making an image ------------------------------------------------------------------------------------------------


def image(state: Path, say: Callable[[str], None], recipe: Recipe | None = None) -> Image:
    """Have the image of `recipe` (default: the common one); make it when it is not there.

    Arguments: `say` gets a line before each slow step. Errors: SandboxError. Made beside its place and renamed at the end.
    """
    check_machine()
    recipe = recipe or Recipe()
    with machine_lock(state):
        base = tree.make(state, say)
        target = _path(state, base, recipe)
        if (target / "clean.qcow2").exists():
            return Image(target, base, recipe)
        for old in target.parent.glob(".new-*"):
            shutil.rmtree(old)  # left by a run that was killed
        made = Image(target.parent / f".new-{os.getpid()}", base, recipe)
        made.folder.mkdir(parents=True)
        try:
            say(f"making an image for virtual machines (about {DOWNLOAD_MB} MB of downloads, about 2 minutes)")
            _make_disk(made)
            say("booting it for the first time")
            _take_snapshot(made)
            shutil.rmtree(target, ignore_errors=True)
            made.folder.rename(target)
        except BaseException:
            shutil.rmtree(made.folder, ignore_errors=True)
            raise
        final = Image(target, base, recipe)
        # The name of the disk below is part of the snapshot's file, and it has just changed.
        run(["qemu-img", "rebase", "-u", "-F", "raw", "-b", str(final.disk), str(final.snapshot)], deadline_s=30, check=True)
        return final


def _path(state: Path, base: Path, recipe: Recipe) -> Path:
    # A snapshot is read only by the QEMU that wrote it.
    qemu = run(["qemu-system-x86_64", "--version"], deadline_s=20, check=True).stdout
    parts = (REVISION, base.name, PACKAGES, OLDER_KERNEL, recipe, qemu, _BUILD, _DISK, _BUILD_FILES, _GUEST_FILES)
    return state / "vm-images" / hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


# Run with the mounts of `_in_tree`. policy-rc.d: no service starts while packages are installed.
_BUILD = r"""
set -eu
export DEBIAN_FRONTEND=noninteractive
printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d && chmod 755 /usr/sbin/policy-rc.d
get() { apt-get -q -o DPkg::Lock::Timeout=60 -o Acquire::Retries=3 "$@"; }
cp /etc/apt/sources.list /root/sources.list
[ -z "$COMPONENTS" ] || sed -i "s/ main$/ main $COMPONENTS/" /etc/apt/sources.list
get update
get -y --no-install-recommends install $PACKAGES
# The older kernel: its packages alone. Its headers want an older compiler, which a small module can do without.
mirror=$(awk '$1 == "deb" { print $2; exit }' /etc/apt/sources.list)
echo "deb $mirror $OLDER_SUITE main" >/etc/apt/sources.list
get update
mkdir /root/older && cd /root/older
get download linux-image-$OLDER_KERNEL linux-headers-$OLDER_KERNEL \
    linux-headers-${OLDER_KERNEL%-cloud-amd64}-common linux-kbuild-$OLDER_BASE
# Not dpkg-deb -x: it would put a folder in the place of the link /lib.
for deb in linux-headers-* linux-kbuild-*; do dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C /; done
dpkg -i linux-image-*
cd / && rm -rf /root/older
mv /root/sources.list /etc/apt/sources.list
# The tree's stand-in of GRUB's disk program is for hosts on an overlay; here is a real disk.
rm /usr/sbin/grub-probe && dpkg-divert --quiet --local --rename --remove /usr/sbin/grub-probe
eval "$SCRIPT"
useradd --create-home --shell /bin/bash "$USER_NAME"
for home in /root /home/$USER_NAME; do
    install -d -m 700 $home/.ssh && install -m 600 /etc/laoka-key.pub $home/.ssh/authorized_keys
done
chown -R $USER_NAME: /home/$USER_NAME/.ssh
# Units of the sandbox's hosts that would hide this guest's real PCI tree.
systemctl -q disable $UNWANTED
(cd /etc/systemd/system && rm $UNWANTED)
# What only makes boots and logins slower, in software by seconds.
systemctl -q mask e2scrub_reap.service e2scrub_all.timer fstrim.timer dpkg-db-backup.timer systemd-random-seed.service
sed -i '/pam_systemd.so/d' /etc/pam.d/common-session
rm -f /etc/ssh/ssh_host_* && ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
mkdir -p /boot/grub/i386-pc
cp /usr/lib/grub/i386-pc/*.mod /usr/lib/grub/i386-pc/*.lst /boot/grub/i386-pc/
grub-mkimage -O i386-pc -p '(hd0,msdos1)/boot/grub' -o /boot/grub/i386-pc/core.img biosdisk part_msdos ext2
cp /usr/lib/grub/i386-pc/boot.img /boot/grub/i386-pc/
# For the first boot; then update-grub writes the real one.
release=$(ls /lib/modules | grep -v "^$OLDER_BASE" | head -n 1)
printf 'linux /boot/vmlinuz-%s root=/dev/vda1 ro console=ttyS0 net.ifnames=0\ninitrd /boot/initrd.img-%s\nboot\n' \
    $release $release >/boot/grub/grub.cfg
apt-get clean
rm -rf /usr/sbin/policy-rc.d /var/lib/apt/lists/*
"""

_DISK = r"""
set -eu
truncate -s ${DISK_GB}G "$DISK"
mkfs.ext4 -q -F -L root -m 0 -O $FEATURES -E offset=$OFFSET,lazy_itable_init=1,nodiscard -d "$TREE" \
    "$DISK" $((DISK_GB * 1024 * 1024 - OFFSET / 1024))k
"""
_SECTOR_BYTES, _FILE_SYSTEM_SECTOR = 512, 2048

_BUILD_FILES = {
    # The guest's disk is all that the first file system needs: a tenth of the usual size, made and unpacked in software.
    "etc/initramfs-tools/conf.d/laoka": "MODULES=list\n",
    "etc/initramfs-tools/modules": "virtio_pci\nvirtio_blk\next4\n",
    # The tree is thrown away when the machine stops in the middle.
    "etc/dpkg/dpkg.cfg.d/laoka": "force-unsafe-io\n",
}
_GUEST_FILES = {
    "etc/hostname": "laoka-vm\n",
    "etc/hosts": "127.0.0.1 localhost laoka-vm\n::1 localhost\n",
    "etc/fstab": "/dev/vda1 / ext4 defaults,noatime,errors=remount-ro 0 1\n",
    "etc/resolv.conf": "nameserver 10.0.2.3\n",
    # The addresses of QEMU's user network.
    "etc/systemd/network/20-eth0.network": "[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n",
    "etc/default/grub": 'GRUB_DEFAULT=saved\nGRUB_TIMEOUT=0\nGRUB_DISTRIBUTOR=Debian\nGRUB_TERMINAL="console serial"\n'
    'GRUB_CMDLINE_LINUX="console=ttyS0 net.ifnames=0"\nGRUB_CMDLINE_LINUX_DEFAULT="quiet"\nGRUB_DISABLE_OS_PROBER=true\n'
    "GRUB_DISABLE_LINUX_UUID=true\n",
}


def _make_disk(made: Image) -> None:
    made.layer.mkdir()
    run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "laoka sandbox", "-f", str(made.key)], deadline_s=20, check=True)
    write_atomic(made.layer / "etc/laoka-key.pub", made.key.with_suffix(".pub").read_text())
    for name, content in _BUILD_FILES.items():
        write_atomic(made.layer / name, content)
    variables = {
        "PACKAGES": " ".join((*PACKAGES, *made.recipe.packages)),
        "COMPONENTS": " ".join(made.recipe.components),
        "SCRIPT": made.recipe.script,
        "OLDER_SUITE": OLDER_SUITE,
        "OLDER_KERNEL": OLDER_KERNEL,
        "OLDER_BASE": OLDER_BASE,
        "USER_NAME": USER,
        "UNWANTED": " ".join(tree.SIMULATED_MOUNTS),
    }
    _in_tree(made, _BUILD, variables, "the image's packages can't be installed")
    for name, content in _GUEST_FILES.items():
        (made.layer / name).unlink(missing_ok=True)
        write_atomic(made.layer / name, content)
    # mkfs runs beside the tree, not in it: its mounts are there, its programs are not.
    offset = str(_FILE_SYSTEM_SECTOR * _SECTOR_BYTES)
    values = {"DISK_GB": str(DISK_GB), "DISK": str(made.disk), "FEATURES": EXT4_FEATURES, "OFFSET": offset}
    _with_tree(made, _DISK, values, "the image's disk can't be made")
    grub = made.layer / "boot/grub/i386-pc"
    with made.disk.open("r+b") as stream:
        stream.write(boot_sector((grub / "boot.img").read_bytes(), DISK_GB * 1024**3 // _SECTOR_BYTES))
        stream.write((grub / "core.img").read_bytes())  # from sector 1 on, where GRUB's first sector looks for it


def boot_sector(boot_code: bytes, disk_sectors: int) -> bytes:
    """A disk's first sector: GRUB's boot.img and a table with one bootable Linux partition up to the end of the disk."""
    partition = struct.pack(
        "<B3sB3sII", 0x80, b"\xfe\xff\xff", 0x83, b"\xfe\xff\xff", _FILE_SYSTEM_SECTOR, disk_sectors - _FILE_SYSTEM_SECTOR
    )
    return boot_code[:440] + bytes(6) + partition + bytes(48) + b"\x55\xaa"


def _in_tree(made: Image, script: str, variables: dict[str, str], failure: str, binds: tuple[tuple[Path, str], ...] = ()) -> None:
    """Run a script inside the image's tree as root. `binds` are folders of this machine put at places in it."""
    prepare = "mount -t proc proc $TREE/proc; mount -t tmpfs tmpfs $TREE/tmp; cp /etc/resolv.conf $TREE/etc/resolv.conf\n"
    for source, place in binds:
        prepare += f"mkdir -p $TREE{place}; mount --bind {shlex.quote(str(source))} $TREE{place}\n"
    _with_tree(made, f"{prepare}exec chroot $TREE sh -c {shlex.quote(script)}", variables, failure)


def _with_tree(made: Image, script: str, variables: dict[str, str], failure: str) -> None:
    """Run a script that finds the image's tree, the layer over the base, at $TREE.

    In a mount namespace of its own: what it mounts ends with it, also after a crash. $TREE is on a tmpfs seen only there.
    """
    scratch = made.folder / "scratch"
    (scratch / "work").mkdir(parents=True, exist_ok=True)
    (scratch / "tree").mkdir(exist_ok=True)
    layers = f"lowerdir={made.base},upperdir={made.layer},workdir={scratch / 'work'}"
    mounted = (
        f"set -eu; TREE={shlex.quote(str(scratch / 'tree'))}; mount -t overlay overlay -o {shlex.quote(layers)} $TREE\n{script}"
    )
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private", "sh", "-c", mounted]
    env = {**variables, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    done = run(argv, deadline_s=BUILD_DEADLINE_S, env=env)
    shutil.rmtree(scratch, ignore_errors=True)
    if not done.ok:
        log = made.folder.parent / "build.log"
        write_atomic(log, f"{done.stdout}\n{done.stderr}")
        raise SandboxError(f"{failure}: {done.last_line()} (all of its output: {log})")


def _take_snapshot(made: Image) -> None:
    """Boot the disk once, let GRUB write its own menu, and keep the running guest as the snapshot `clean`."""
    folder = made.folder / "first-boot"
    folder.mkdir()
    disk = folder / "disk.qcow2"
    run(["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(made.disk), str(disk)], deadline_s=30, check=True)
    guest = _start(made, "first-boot", folder, ())
    try:
        _wait(guest, BOOT_DEADLINE_S)
        execute(guest, "update-grub 2>&1 && sync && echo 3 >/proc/sys/vm/drop_caches", deadline_s=300, check=True)
        execute(guest, "systemctl is-system-running --wait", deadline_s=300)
        _disconnect(guest)
        save(guest, CLEAN)
        _monitor(guest, "quit")
    finally:
        _disconnect(guest)
        processes.end(guest.process)
    disk.rename(made.snapshot)
    shutil.rmtree(folder)


# ---- running ---------------------------------------------------------------------------------------------------------


@contextmanager
def running(made: Image, name: str, *, internet: bool = False) -> Iterator[Vm]:
    """A guest that ends with the block. Arguments and errors as for `start`."""
    guest = start(made, name, internet=internet)
    try:
        yield guest
    finally:
        stop(guest)


def start(made: Image, name: str, *, internet: bool = False) -> Vm:
    """Start a guest from the snapshot `clean` and wait until it answers; one of this name that an earlier run left is ended.

    `internet` lets it reach other machines. It ends with the calling process, if `stop` does not end it before.
    Errors: SandboxError.
    """
    check_machine()
    folder = made.folder.parents[1] / "vms" / name
    _end_leftover(folder)
    folder.mkdir(parents=True)
    shutil.copyfile(made.snapshot, folder / "disk.qcow2")
    options = ("-loadvm", CLEAN)
    guest = _start(made, name, folder, options, internet=internet)
    try:
        _wait(guest, BOOT_DEADLINE_S)
        _set_clock(guest)
    except BaseException:
        stop(guest)
        raise
    return guest


def stop(guest: Vm) -> None:
    """End the guest at once and remove its folder."""
    _end_leftover(guest.folder)


def _end_leftover(folder: Path) -> None:
    for name in ("ssh.json", "vm.json"):
        _end_recorded(folder / name)
    shutil.rmtree(folder, ignore_errors=True)


def _end_recorded(record: Path) -> None:
    with suppress(OSError, ValueError, TypeError):
        processes.end(ProcessRecord(**json.loads(record.read_text())))
    record.unlink(missing_ok=True)


def command(made: Image, name: str, folder: Path, *, internet: bool = False) -> list[str]:
    """The command that runs a guest whose disk and `smbios-bios` are in `folder`."""
    # Made up, and it says so. Known names of hypervisors are left out on purpose (see the first lines).
    board = "manufacturer=laoka sandbox,product=simulated X99 board"
    return [
        "setpriv", "--pdeathsig", "KILL", "--",
        "prlimit", f"--data={(made.recipe.memory_mib + OVERHEAD_MIB) << 20}", "--",
        "qemu-system-x86_64", "-name", name, "-machine", "q35",
        "-accel", f"tcg,thread=multi,tb-size={TRANSLATED_CODE_MIB}", "-cpu", "max,-hypervisor", "-smp", "2",
        "-m", str(made.recipe.memory_mib), "-display", "none", "-nodefaults",
        "-serial", f"file:{folder / 'console.log'}", "-qmp", f"unix:{folder / 'monitor'},server=on,wait=off",
        "-smbios", f"file={folder / 'smbios-bios'}", "-smbios", f"type=1,{board}",
        "-smbios", f"type=2,{board}", "-smbios", "type=3,manufacturer=laoka sandbox",
        "-drive", f"file={folder / 'disk.qcow2'},if=virtio,format=qcow2,cache=unsafe",
        "-netdev", f"user,id=n0,restrict={'off' if internet else 'on'},hostfwd=tcp:127.0.0.1:0-:22",
        "-device", "virtio-net-pci,netdev=n0,romfile=", "-device", "virtio-rng-pci",
    ]  # fmt: skip


def smbios_bios() -> bytes:
    """SMBIOS structure 0 (DSP0134 7.1). QEMU's own says `system is a virtual machine` in its second extension byte."""
    ours = struct.pack("<BBH BBH BB Q BBBBBB", 0, 24, 0, 1, 2, 0xE800, 3, 0, 1 << 3, 0, 0x04, 1, 0, 0xFF, 0xFF)
    return ours + b"laoka sandbox\0" + b"1\0" + b"01/01/2020\0\0"


def _start(made: Image, name: str, folder: Path, options: tuple[str, ...], *, internet: bool = False) -> Vm:
    argv = [*command(made, name, folder, internet=internet), *options]
    (folder / "smbios-bios").write_bytes(smbios_bios())
    process = processes.start(argv, folder / "qemu.log")
    write_atomic(folder / "vm.json", json.dumps(asdict(process)))
    guest = Vm(name, made, folder, 0, process)
    try:
        return Vm(name, made, folder, _forwarded_port(guest), process)
    except BaseException:
        processes.end(process)
        raise


def _forwarded_port(guest: Vm) -> int:
    """The loopback port that QEMU chose for the guest's sshd."""
    words = next((line.split() for line in _monitor(guest, "info usernet").splitlines() if "HOST_FORWARD" in line), [])
    # `TCP[HOST_FORWARD] 13 127.0.0.1 45123 10.0.2.15 22 0 0`
    if len(words) < 4 or not words[3].isdecimal():
        raise SandboxError(f"virtual machine {guest.name}: QEMU forwards no port to its sshd")
    return int(words[3])


def _wait(guest: Vm, deadline_s: float) -> None:
    if not ssh.wait("127.0.0.1", guest.port, deadline_s, greeting_s=10, running=lambda: processes.alive(guest.process)):
        raise SandboxError(f"virtual machine {guest.name}: no sshd after {deadline_s:.0f} s; see {guest.console}")
    _connect(guest)


def _connect(guest: Vm) -> None:
    """Open the shared ssh connection anew: the one before ended with the boot or the snapshot that it belonged to."""
    _disconnect(guest)
    argv = ["ssh", *_ssh_options(guest), "-N", "-M", "-S", str(guest.control), "-p", str(guest.port), "root@127.0.0.1"]
    record = processes.start(["setpriv", "--pdeathsig", "KILL", "--", *argv], guest.folder / "ssh.log")
    write_atomic(guest.folder / "ssh.json", json.dumps(asdict(record)))
    end = time.monotonic() + BOOT_DEADLINE_S
    while not guest.control.exists():
        if not processes.alive(record) or time.monotonic() > end:
            log = (guest.folder / "ssh.log").read_text(errors="replace").strip()
            raise SandboxError(f"virtual machine {guest.name}: no ssh connection: {log[-300:] or 'no words'}")
        time.sleep(0.05)


def _disconnect(guest: Vm) -> None:
    _end_recorded(guest.folder / "ssh.json")
    guest.control.unlink(missing_ok=True)


def _set_clock(guest: Vm) -> None:
    """A restored guest goes on at the time of its snapshot."""
    execute(guest, f"date -u -s @{time.time():.0f}", deadline_s=60, check=True)


def _monitor(guest: Vm, line: str) -> str:
    """Give QEMU's monitor one line and return what it says. Errors: SandboxError."""
    end = time.monotonic() + MONITOR_DEADLINE_S
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(MONITOR_DEADLINE_S)
        while True:
            try:
                connection.connect(str(guest.monitor))
                break
            except OSError:
                if not processes.alive(guest.process) or time.monotonic() > end:
                    log = (guest.folder / "qemu.log").read_text(errors="replace").strip()
                    raise SandboxError(f"virtual machine {guest.name}: QEMU ended: {log[-300:] or 'no words'}") from None
                time.sleep(0.05)
        stream = connection.makefile("rw")
        for request in ("qmp_capabilities", "human-monitor-command"):
            arguments = {"command-line": line} if request.startswith("human") else {}
            stream.write(json.dumps({"execute": request, "arguments": arguments}) + "\n")
            stream.flush()
            answer: dict[str, object] = {}
            while "return" not in answer and "error" not in answer:
                text = stream.readline()
                if not text:
                    return ""  # `quit` closes the connection
                answer = json.loads(text)
    if "error" in answer:
        raise SandboxError(f"virtual machine {guest.name}: {line}: {answer['error']}")
    return str(answer["return"])


# ---- what a test does with a guest -----------------------------------------------------------------------------------


def ssh_target(guest: Vm, user: str = "root") -> SshTarget:
    """The guest as laoka's own collectors reach it."""
    if not guest.known_hosts.exists():
        key = (guest.image.layer / "etc/ssh/ssh_host_ed25519_key.pub").read_text()
        write_atomic(guest.known_hosts, f"[127.0.0.1]:{guest.port} {key}")
    return SshTarget("127.0.0.1", guest.port, user, str(guest.image.key), str(guest.known_hosts))


def execute(
    guest: Vm, command: str, *, deadline_s: float = 120, check: bool = False, stdin: str = "", user: str = "root"
) -> Completed:
    """Run a shell command in the guest. Errors: ProcessError when `check` and it failed."""
    shared = ["-S", str(guest.control)] if user == "root" else []  # without the socket, ssh connects by itself
    argv = ["ssh", *_ssh_options(guest), *shared, "-p", str(guest.port), f"{user}@127.0.0.1", command]
    return run(argv, deadline_s=deadline_s, check=check, stdin=stdin)


def copy_in(guest: Vm, source: Path, target: str, *, deadline_s: float = 300) -> None:
    """Copy a file or a folder of this machine to `target` in the guest. Errors: ProcessError."""
    argv = [
        "scp",
        "-q",
        "-r",
        *_ssh_options(guest),
        "-o",
        f"ControlPath={guest.control}",
        "-P",
        str(guest.port),
        str(source),
        f"root@127.0.0.1:{target}",
    ]
    run(argv, deadline_s=deadline_s, check=True)


def _ssh_options(guest: Vm) -> list[str]:
    ssh_target(guest)  # writes the known hosts
    return ssh.options(guest.image.key, guest.known_hosts)


def save(guest: Vm, snapshot: str) -> None:
    """Keep the guest as it is now, memory included. Errors: SandboxError."""
    said = _monitor(guest, f"savevm {snapshot}")
    if said.strip():
        raise SandboxError(f"virtual machine {guest.name}: savevm {snapshot}: {said.strip()}")


def restore(guest: Vm, snapshot: str = CLEAN) -> None:
    """Take the guest back to a snapshot, memory and disk, and set its clock. Errors: SandboxError when there is none."""
    _disconnect(guest)
    said = _monitor(guest, f"loadvm {snapshot}")
    if said.strip():
        raise SandboxError(f"virtual machine {guest.name}: loadvm {snapshot}: {said.strip()}")
    _wait(guest, BOOT_DEADLINE_S)
    _set_clock(guest)


def reboot(guest: Vm) -> None:
    """Restart the guest's system through its GRUB and wait until sshd answers on the new boot. Errors: SandboxError."""
    before = _boot_id(guest)
    execute(guest, "systemctl reboot", deadline_s=30)
    wait_for_boot(guest, before)


def wait_for_boot(guest: Vm, before: str) -> None:
    """Wait until sshd answers on another boot than `before` (an id of /proc/sys/kernel/random/boot_id). Errors: SandboxError."""
    _disconnect(guest)
    end = time.monotonic() + BOOT_DEADLINE_S
    while _boot_id(guest) in ("", before):
        if time.monotonic() > end or not processes.alive(guest.process):
            raise SandboxError(f"virtual machine {guest.name}: not back {BOOT_DEADLINE_S} s after a reboot; see {guest.console}")
        time.sleep(0.2)
    _connect(guest)


def boot_kernel(guest: Vm, release: str) -> None:
    """Reboot once into an installed kernel by `grub-reboot`. Errors: SandboxError when GRUB's menu has no such kernel."""
    menu = read_grub_menu(execute(guest, "cat /boot/grub/grub.cfg", check=True).stdout)
    folder = next((entry.id for entry in menu if entry.kernel is None and "advanced" in entry.id), "")
    entry = next((entry.id for entry in menu if entry.kernel == release and "-advanced-" in entry.id), None)
    if entry is None:
        raise SandboxError(f"virtual machine {guest.name}: GRUB's menu has no kernel {release}")
    execute(guest, f"grub-reboot {shlex.quote(f'{folder}>{entry}')}", check=True)
    reboot(guest)


def _boot_id(guest: Vm) -> str:
    """The kernel's id of this boot; empty while no sshd answers."""
    if not ssh.wait("127.0.0.1", guest.port, 10, greeting_s=10):
        return ""
    return execute(guest, "cat /proc/sys/kernel/random/boot_id", deadline_s=30).stdout.strip()


# ---- simulated cards -------------------------------------------------------------------------------------------------


def load_fakepci(guest: Vm, **parameters: int | tuple[int, ...]) -> None:
    """Load the simulated cards; the guest's kernel finds and places them now.

    Arguments: the module's own parameters, as fakepci.c tells them: `cards`, `device` (0x1db6 or 0x1db4), `window_mib`, `domain`,
    `bus`, `slot_width`, and those of `set_fakepci`. Errors: SandboxError when it can't be built,
    ProcessError when it can't be loaded.
    """
    release = execute(guest, "uname -r", check=True).stdout.strip()
    copy_in(guest, fakepci(guest.image, release), "/root/fakepci.ko")
    words = [f"{name}={_parameter(value)}" for name, value in parameters.items()]
    execute(guest, shlex.join(["insmod", "/root/fakepci.ko", *words]), check=True)


def unload_fakepci(guest: Vm) -> None:
    """Take the simulated cards and their host bridge away. Errors: ProcessError."""
    execute(guest, "rmmod fakepci", check=True)


def set_fakepci(guest: Vm, **parameters: int | tuple[int, ...]) -> None:
    """Change the cards while they are there: masks `lost`, `heals`, `removed`; `speed`, `width` (one value for each of 8 cards).

    A card that is put back (`removed` cleared) is found by `echo 1 >/sys/bus/pci/rescan`. Errors: ProcessError.
    """
    lines = [f"echo {_parameter(value)} >/sys/module/fakepci/parameters/{name}" for name, value in parameters.items()]
    execute(guest, "; ".join(["set -e", *lines]), check=True)


def log_kernel(guest: Vm, line: str) -> None:
    """Have the kernel itself log a line (fakepci must be loaded): a record of its own facility, unlike one written to /dev/kmsg."""
    execute(guest, f"printf '%s\\n' {shlex.quote(line)} >/sys/module/fakepci/parameters/say", check=True)


def _parameter(value: int | tuple[int, ...]) -> str:
    return str(value) if isinstance(value, int) else ",".join(str(item) for item in value)


def fakepci(made: Image, release: str) -> Path:
    """The module built for one of the image's kernels; built again only when its source changed. Errors: SandboxError."""
    source = Path(str(resources.files("laoka.sandbox") / "fakepci"))
    files = [source / name for name in ("Makefile", "fakepci.c")]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    target = made.folder / "modules" / digest / release / "fakepci.ko"
    if target.exists():
        return target
    if not (made.layer / "lib/modules" / release).is_dir() and not (made.layer / "usr/lib/modules" / release).is_dir():
        raise SandboxError(f"the image has no kernel {release}, so fakepci can't be built for it")
    work = target.parent / f".new-{os.getpid()}"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    for path in files:
        shutil.copyfile(path, work / path.name)
    # CC: the older kernel's headers name a compiler that is not there.
    build = f"exec make -s -C /mnt/fakepci KDIR=/lib/modules/{release}/build CC=gcc"
    _in_tree(made, build, {}, "fakepci does not compile", ((work, "/mnt/fakepci"),))
    (work / "fakepci.ko").rename(target)
    shutil.rmtree(work)
    return target
