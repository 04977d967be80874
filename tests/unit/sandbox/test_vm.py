"""The pure parts of the sandbox's virtual machines: first sector, SMBIOS structure, the QEMU command."""

from __future__ import annotations

import struct
from pathlib import Path

from laoka.sandbox import ssh, vm


def test_first_sector_holds_boot_code_and_one_bootable_linux_partition_to_the_end() -> None:
    sector = vm.boot_sector(b"\xeb" * 512, disk_sectors=1 << 24)
    assert len(sector) == 512 and sector[510:] == b"\x55\xaa"
    assert sector[:440] == b"\xeb" * 440
    active, _, kind, _, first, count = struct.unpack("<B3sB3sII", sector[446:462])
    assert (active, kind, first, count) == (0x80, 0x83, 2048, (1 << 24) - 2048)
    assert sector[462:510] == bytes(48)


def test_smbios_structure_says_nothing_of_a_virtual_machine() -> None:
    # DMTF DSP0134, 7.1: byte 0x13 is the second extension byte of the characteristics, its bit 4 says "virtual machine".
    structure = vm.smbios_bios()
    assert structure[:2] == bytes([0, 24])
    assert structure[0x13] & 0x10 == 0
    assert structure[24:].split(b"\0")[:3] == [b"laoka sandbox", b"1", b"01/01/2020"]


def test_command_bounds_memory_and_listens_on_loopback_only(tmp_path: Path) -> None:
    image = vm.Image(tmp_path, tmp_path, vm.Recipe(memory_mib=1024))
    argv = vm.command(image, "guest", tmp_path)
    assert f"--data={(1024 + vm.OVERHEAD_MIB) << 20}" in argv
    assert argv[argv.index("-m") + 1] == "1024"
    network = next(word for word in argv if word.startswith("user,"))
    assert "restrict=on" in network and "hostfwd=tcp:127.0.0.1:0-:22" in network
    assert "restrict=off" in " ".join(vm.command(image, "guest", tmp_path, internet=True))


def test_ssh_uses_one_key_and_one_known_hosts_file_and_nothing_of_the_users(tmp_path: Path) -> None:
    options = ssh.options(tmp_path / "key", tmp_path / "known")
    assert options[:4] == ["-F", "none", "-i", str(tmp_path / "key")]
    assert f"UserKnownHostsFile={tmp_path / 'known'}" in options and "BatchMode=yes" in options
