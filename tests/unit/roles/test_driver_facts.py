"""What a driver change asks a host for: the commands of the facts, run by a shell over stand-ins of the tools that they call."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from laoka.facts.driver import AptRoom, EnrolledKeys, Room

# The form of `mokutil --list-enrolled`: OpenSSL's text of each certificate, whose names OpenSSL 3 writes with spaces around "=".
ENROLLED = """\
[key 1]
SHA1 Fingerprint: 53:61:0c:f8:1f:bd:7e:0c:eb:67:91:3c:9e:f3:e7:94:a9:63:3e:cb
Certificate:
    Data:
        Version: 3 (0x2)
        Issuer: CN = Debian Secure Boot CA
        Subject: CN = Debian Secure Boot CA

[key 2]
        Issuer: C=GB, ST=Isle of Man, L=Douglas, O=Canonical Ltd., CN=Canonical Ltd. Master Certificate Authority
        Subject: C=GB, ST=Isle of Man, L=Douglas, O=Canonical Ltd., CN=Canonical Ltd. Master Certificate Authority

[key 3]
        Issuer: CN=x99 Secure Boot Module Signature key, emailAddress=root@x99
        Subject: CN=x99 Secure Boot Module Signature key, emailAddress=root@x99
"""


@pytest.mark.parametrize(
    ("tool", "keys"),
    [
        (
            f"cat <<'END'\n{ENROLLED}END\n",
            (
                "Debian Secure Boot CA",
                "Canonical Ltd. Master Certificate Authority",
                "x99 Secure Boot Module Signature key",
            ),
        ),
        ("echo EFI variables are not supported on this system >&2; exit 1", ()),
        ("echo MokListRT is empty", ()),
        (None, ()),  # no mokutil: no key is known, and nothing but the archive's own signers is trusted
    ],
)
def test_keys_that_the_firmware_knows(tmp_path: Path, tool: str | None, keys: tuple[str, ...]) -> None:
    if tool is not None:
        (tmp_path / "mokutil").write_text(f"#!/bin/sh\n{tool}\n")
        (tmp_path / "mokutil").chmod(0o755)
    for name in ("sed", "cat"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    fact = EnrolledKeys()
    done = subprocess.run(
        ["/bin/sh", "-c", fact.command()], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, fact.process(done.stdout.splitlines())) == (0, keys)


@pytest.mark.parametrize(("device_of_boot", "boot_free"), [("2049", None), ("2050", 187_000_000)])
def test_room_on_boot_counts_where_it_is_a_file_system_of_its_own(
    tmp_path: Path, device_of_boot: str, boot_free: int | None
) -> None:
    tools = {
        "stat": f"case $3 in /boot) echo {device_of_boot} ;; /) echo 2049 ;; esac",
        "df": "echo 'Filesystem 1-blocks Used Available Capacity Mounted on'; "
        "case $2 in /boot) echo '/dev/sda2 500000000 313000000 187000000 63% /boot' ;; "
        "/) echo '/dev/sda1 90000000000 10000000000 80000000000 12% /' ;; esac",
        "apt-get": "echo 'Need to get 98.4 MB of archives.'; "
        "echo 'After this operation, 1,024 kB of additional disk space will be used.'; exit 1",
    }
    for name, text in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    fact = AptRoom()
    done = subprocess.run(
        ["/bin/sh", "-c", fact.command(packages=["nvidia-headless-580-server"])], env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert fact.process(done.stdout.splitlines()) == Room(99_424_000, 80_000_000_000, boot_free)
