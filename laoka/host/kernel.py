"""Kernels of a host: the running one, those installed, and the one that GRUB will boot next."""

from __future__ import annotations

import re
from dataclasses import dataclass

from laoka.host.sections import Sections
from laoka.host.unread import Maybe, Unread


@dataclass(frozen=True)
class BootFile:
    """A kernel image, an initramfs or a modprobe file with its time of change."""

    path: str
    changed_epoch_s: int
    size_bytes: int


@dataclass(frozen=True)
class MenuEntry:
    """An entry of grub.cfg; `kernel` None where its id names none (the simple first entry)."""

    title: str
    id: str
    kernel: str | None
    depth: int


@dataclass(frozen=True)
class Kernel:
    """`next_boot`: the kernel of the next boot as GRUB's files say. `grub_default`: GRUB_DEFAULT as it is set."""

    release: Maybe[str]
    cmdline: Maybe[tuple[str, ...]]
    installed: Maybe[tuple[str, ...]]
    with_headers: Maybe[tuple[str, ...]]
    boot_files: Maybe[tuple[BootFile, ...]]
    grub_default: Maybe[str | None]
    grub_saved_entry: Maybe[str | None]
    grub_once_entry: Maybe[str | None]
    menu: Maybe[tuple[MenuEntry, ...]]

    @property
    def next_boot(self) -> Maybe[str]:
        """The release that the next boot will run."""
        if isinstance(self.menu, Unread):
            return self.menu
        if isinstance(self.grub_default, Unread):
            return self.grub_default
        wanted = self.grub_once_entry if isinstance(self.grub_once_entry, str) else None
        if wanted is None:
            wanted = self.grub_default or "0"
            if wanted == "saved":
                wanted = self.grub_saved_entry if isinstance(self.grub_saved_entry, str) else "0"
        return _chosen(self.menu, wanted)


def read_kernel(sections: Sections) -> Kernel:
    """From the sections uname, cmdline, kernels, headers, boot-files, grub, grubenv and grub-menu."""
    uname, cmdline = sections.output("uname"), sections.output("cmdline")
    kernels, headers, files = sections.output("kernels"), sections.output("headers"), sections.output("boot-files")
    grub, menu = sections.output("grub"), sections.output("grub-menu")
    environment = sections.section("grubenv")
    if not isinstance(environment, Unread) and environment.status != 0:
        # No grubenv is no saved entry, if the folder could be read at all.
        saved: Maybe[str] = "" if "No such file" in environment.stderr else Unread("grubenv could not be read")
    else:
        saved = environment if isinstance(environment, Unread) else environment.stdout
    return Kernel(
        release=uname if isinstance(uname, Unread) else _release(uname),
        cmdline=cmdline if isinstance(cmdline, Unread) else _cmdline(cmdline),
        installed=kernels if isinstance(kernels, Unread) else tuple(sorted(kernels.split(), key=version_key)),
        with_headers=headers if isinstance(headers, Unread) else tuple(headers.split()),
        boot_files=files if isinstance(files, Unread) else _boot_files(files),
        grub_default=_grub_default(grub),
        grub_saved_entry=saved if isinstance(saved, Unread) else _variable(saved, "saved_entry"),
        grub_once_entry=saved if isinstance(saved, Unread) else _variable(saved, "next_entry"),
        menu=menu if isinstance(menu, Unread) else read_grub_menu(menu),
    )


def version_key(release: str) -> tuple[tuple[int, str], ...]:
    """A sort key for kernel releases: numbers by value, the rest by letter."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.findall(r"\d+|[a-z]+", release))


def _release(uname: str) -> Maybe[str]:
    words = uname.split()
    return words[2] if len(words) > 2 else Unread("uname printed no release")


def _cmdline(text: str) -> tuple[str, ...]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(("#", "$", "-bash"))]
    return tuple(lines[0].split()) if lines else ()


def _boot_files(text: str) -> tuple[BootFile, ...]:
    return tuple(
        BootFile(found[3], int(found[1]), int(found[2]))
        for line in text.splitlines()
        if (found := re.match(r"(\d+) (\d+) (/.+)$", line))
    )


def _grub_default(text: Maybe[str]) -> Maybe[str | None]:
    """GRUB_DEFAULT. The last setting wins: /etc/default/grub.d/*.cfg is read after /etc/default/grub."""
    if isinstance(text, Unread):
        return text
    if not text.strip():
        return Unread("no settings of GRUB in /etc/default")
    found = re.findall(r"^[^:]+:\s*GRUB_DEFAULT=(.*)$", text, re.MULTILINE)
    return found[-1].strip().strip("\"'") if found else None


def _variable(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}=(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else None


_ENTRY = re.compile(r"(?P<indent>\s*)(?P<kind>menuentry|submenu) (?P<q>['\"])(?P<title>.*?)(?P=q)(?P<rest>.*)$")


def read_grub_menu(text: str) -> tuple[MenuEntry, ...]:
    """Entries and submenus of grub.cfg in their order; depth 1: inside a submenu."""
    entries = []
    for line in text.splitlines():
        found = _ENTRY.match(line)
        if not found:
            continue
        ids = re.search(r"menuentry_id_option '([^']*)'", found["rest"])
        name = ids[1] if ids else ""
        kernel = re.search(r"gnulinux-(\d\S*?)-(?:advanced|recovery)-", name) or re.search(r"with Linux (\S+)", found["title"])
        entries.append(
            MenuEntry(
                found["title"], name, kernel[1] if kernel and found["kind"] == "menuentry" else None, 1 if found["indent"] else 0
            )
        )
    return tuple(entries)


def _chosen(menu: tuple[MenuEntry, ...], wanted: str) -> Maybe[str]:
    """The kernel of a GRUB choice: an id, a title, a number, or two of them joined by `>` for an entry of a submenu."""
    first = next((entry.kernel for entry in menu if entry.kernel), None)
    last = wanted.rsplit(">", 1)[-1]
    for entry in menu:
        if last in (entry.id, entry.title) and entry.kernel:
            return entry.kernel
    inside = [entry for entry in menu if entry.depth == 1]
    outside = [entry for entry in menu if entry.depth == 0]
    if last.isdecimal():
        group = inside if ">" in wanted else outside
        number = int(last)
        if number < len(group) and group[number].kernel:
            return group[number].kernel or ""
        if number == 0 and first:
            return first  # the simple first entry boots the newest kernel, which heads the submenu
    elif any(last in (entry.id, entry.title) for entry in outside) and first:
        return first
    return Unread(f"GRUB's choice {wanted!r} is not in its menu")
