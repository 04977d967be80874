"""What firmware, boot loader and kernel do when a throw-away host boots, simulated: which kernel runs, which module is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from laoka.files import write_atomic
from laoka.host.kernel import read_kernel, version_key
from laoka.host.sections import from_files
from laoka.process import run
from laoka.sandbox.simulated import MODULE_TOOL

FIRST_KERNEL = "6.8.0-124-generic"
"""What a host runs before one of its own kernels was installed."""
GRUB_UUID = "5a1d0000-0000-4000-8000-000000000001"

# grub-mkconfig asks this program about disks; a host's overlay has none. Everything else of GRUB is real.
GRUB_PROBE = f"""#!/bin/sh
# grub-probe of laoka's sandbox: one disk with one ext4 partition.
for word in "$@"; do
    case $word in --target=*) what=${{word#--target=}} ;; -t) next=1 ;; *) [ "${{next:-}}" != 1 ] || what=$word; next= ;; esac
done
case ${{what:-fs}} in
device) echo /dev/sda1 ;;
fs) echo ext2 ;;
fs_uuid) echo {GRUB_UUID} ;;
drive) echo "(hd0,msdos1)" ;;
partmap) echo msdos ;;
hints_string) echo --hint-bios=hd0,msdos1 ;;
compatibility_hint) echo hd0,msdos1 ;;
esac
"""
UNAME = """#!/bin/sh
# uname of laoka's sandbox: the release of the simulated kernel in place of that of the machine around it.
real=$(/bin/uname -r) release=$(cat /srv/laoka-sandbox/kernel 2>/dev/null || echo "$(/bin/uname -r)")
/bin/uname "$@" | sed "s/$(printf %s "$real" | sed 's/[.+]/\\\\&/g')/$release/"
"""
MOKUTIL = """#!/bin/sh
# mokutil of laoka's sandbox: Secure Boot is on when the simulated board says so; the sandbox's own key is enrolled.
case ${1:-} in
--sb-state) [ -e /srv/laoka-sandbox/secure-boot ] && echo "SecureBoot enabled" || echo "SecureBoot disabled" ;;
--list-enrolled) echo "        Subject: CN=laoka sandbox stand-in signing key" ;;
*) exit 1 ;;
esac
"""
KERNEL_HOOK = """#!/bin/sh
# Debian's own hook leaves the boot menu alone in a container; a sandbox host stands for a whole machine.
mkdir -p /boot/grub && update-grub >/dev/null 2>&1
"""
PROGRAMS = {"usr/local/bin/uname": UNAME, "usr/local/bin/mokutil": MOKUTIL, "etc/kernel/postinst.d/zzz-laoka-sandbox": KERNEL_HOOK,
            "etc/kernel/postrm.d/zzz-laoka-sandbox": KERNEL_HOOK}  # fmt: skip


def install(root: Path) -> None:
    """Put the programs into a host that stand for its board and its kernel."""
    for name, text in PROGRAMS.items():
        write_atomic(root / name, text, 0o755)
    for name in ("modprobe", "rmmod"):
        write_atomic(root / "usr/local/sbin" / name, MODULE_TOOL.read_text(), 0o755)


def boot(root: Path, card: Path) -> None:
    """What happens before a host's init starts: the boot loader's choice becomes the kernel that runs, and its module is loaded."""
    write_atomic(card / "kernel", f"{_chosen(root) or _now(card)}\n")
    environment = root / "boot/grub/grubenv"
    if environment.exists() and "\nnext_entry=" in environment.read_text():
        run(["chroot", str(root), "grub-editenv", "/boot/grub/grubenv", "unset", "next_entry"], deadline_s=20, check=True)
    run(["sh", str(MODULE_TOOL), "boot"], deadline_s=20, env={"CARD": str(card), "ROOT": str(root)}, check=True)


def _now(card: Path) -> str:
    try:
        return (card / "kernel").read_text().strip()
    except FileNotFoundError:
        return FIRST_KERNEL


def _chosen(root: Path) -> str | None:
    """The kernel that the host's boot loader takes: by its menu and settings, else the newest one; None when it has none."""
    images = sorted((path.name.removeprefix("vmlinuz-") for path in (root / "boot").glob("vmlinuz-*")), key=version_key)
    texts = {}
    for name, file in {"grub-menu": "boot/grub/grub.cfg", "grubenv": "boot/grub/grubenv"}.items():
        if (root / file).exists():
            texts[name] = (root / file).read_text(errors="replace")
    # What the menu was made with counts, not what /etc/default says by now.
    set_to = re.findall(r'set default="(.*)"', texts.get("grub-menu", ""))[-1:]
    texts["grub"] = "".join(f"grub.cfg:GRUB_DEFAULT={'saved' if 'saved_entry' in value else value}\n" for value in set_to)
    chosen = read_kernel(from_files(texts)).next_boot
    if isinstance(chosen, str) and chosen in images:
        return chosen
    return images[-1] if images else None
