"""Nothing that tells who and where survives in a capture, whatever field it stands in; the verdict stays the same."""

from __future__ import annotations

import json
import sys
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "checks"))
import x99_host as x99

from laoka import checks
from laoka.cli.capture import bundle_of
from laoka.host.bundle import read_bundle
from laoka.host.redact import redact
from laoka.host.report import HostReport, build
from laoka.host.sections import Section, Sections, render

# What must not survive, with the words around it as they stand in real output.
SECRETS = {
    "IPv4 address": ("203.0.113.77", "{}"),
    "private IPv4 address": ("10.20.30.40", "nfs: server {} not responding"),
    "IPv6 address": ("2001:db8:77::5", "addr {} up"),
    "long IPv6 address": ("2001:db8:1:2:3:4:5:6", "addr {} up"),
    "MAC address": ("de:ad:be:ef:00:01", "eth0: {} link up"),
    "UUID": ("6f1d2c3b-aaaa-4bbb-8ccc-0123456789ab", "root=UUID={} ro"),
    "GPU UUID": ("9e8d7c6b-1111-4222-8333-abcdefabcdef", "NVRM: GPU at PCI:0000:02:00: GPU-{}"),
    "machine id": ("0123456789abcdef0123456789abcdef", "machine-id {}"),
    "GPU serial": ("1563999000123", "NVRM: GPU Board Serial Number: {}"),
    "serial in XML": ("1563999000124", "<serial>{}</serial>"),
    "serial in -q": ("1563999000125", "    Serial Number                         : {}"),
    "DMI serial": ("PF0XYZ77", "\tSerial Number: {}"),
    "asset tag": ("FIRMA-4711", "\tAsset Tag: {}"),
    "disk serial": ("Samsung_SSD_990_S6Z1NJ0W", "root=/dev/disk/by-id/nvme-{} ro"),
    "host name": ("kuroneko", "1796000000.1 {} kernel: hello"),
    "domain": ("gpu7.internal.example.org", "deb http://{}/debian bookworm main"),
    "user in a path": ("xiaoming", "/home/{}/.venv/lib/python3.12/site-packages/torch-2.10.0.dist-info"),
    "user of a session": ("meiling", "1796000000.1 box systemd-logind[1]: New session 4 of user {}."),
    "mail address": ("zhang.san@example.org", "built by {}"),
    "user in a URL": ("deployer", "https://{}:x@example.org/"),
    "password in a URL": ("hunter2secret", "https://me:{}@example.org/"),
    "password": ("correcthorse", "password={}"),
    "bearer token": ("abc123def456", "Authorization: Bearer {}"),
    "named key": ("zzzz-9999", 'api_key: "{}"'),
    "Hugging Face token": ("hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345", "env {}"),
    "OpenAI style key": ("sk-proj-0123456789abcdefghij", "env {}"),
    "GitHub token": ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "x {} y"),
    "AWS key": ("AKIAIOSFODNN7EXAMPLE", "x {} y"),
    "web token": ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcdefghijk", "x {} y"),
    "random token": ("a8Fj2kLq0ZxCvB4nM7wErT5yUiOp1sDf", "x {} y"),
    "public SSH key": ("AAAAC3NzaC1lZDI1NTE5AAAAIGZha2U", "ssh-ed25519 {} me@home"),
    "private key": ("MIIEpAIBAAKCAQEA7fakefakefake", "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----"),
}


@pytest.mark.parametrize("field", sorted(x99.HEALTHY))
def test_no_secret_survives_in_any_field(field: str) -> None:
    planted = "\n".join(around.format(secret) for secret, around in SECRETS.values())
    whole = x99.sections()
    section = whole.by_name[field]
    dirty = Section(field, 0, f"{section.stdout}\n{planted}", planted)
    cleaned, counts = redact(Sections({**whole.by_name, field: dirty}, {"lspci": planted}))
    text = render(cleaned)
    left = [kind for kind, (secret, _) in SECRETS.items() if secret in text]
    assert left == []
    assert sum(counts.values()) >= len(SECRETS) - 6  # some secrets are of one kind and count once each


def test_a_pseudonym_is_the_same_everywhere() -> None:
    whole = Sections({
        "uname": Section("uname", 0, "Linux kuroneko 6.8.0 x86_64"),
        "journal-kernel": Section("journal-kernel", 0, "1.7e9\n1796000000.1 kuroneko kernel: x\n1796000001.1 kuroneko kernel: y"),
        "cmdline": Section("cmdline", 0, "ip=203.0.113.77 root=UUID=6f1d2c3b-aaaa-4bbb-8ccc-0123456789ab hostname=KURONEKO"),
        "grub-menu": Section("grub-menu", 0, "gnulinux-6.8.0-1-advanced-6f1d2c3b-aaaa-4bbb-8ccc-0123456789ab"),
    })  # fmt: skip
    cleaned, counts = redact(whole)
    assert cleaned.by_name["uname"].stdout == "Linux host-1 6.8.0 x86_64"
    assert cleaned.by_name["journal-kernel"].stdout.count("host-1 kernel: ") == 2
    assert cleaned.by_name["cmdline"].stdout == "ip=192.0.2.1 root=UUID=00000000-0000-4000-8000-000000000001 hostname=host-1"
    assert cleaned.by_name["grub-menu"].stdout.endswith("00000000-0000-4000-8000-000000000001")
    assert counts == {"host": 1, "ip": 1, "uuid": 1}


def test_redacting_twice_changes_nothing_more() -> None:
    once, _ = redact(x99.sections())
    assert redact(once)[0] == once


@pytest.mark.parametrize("name", ["ubuntu", "gpu", "nvidia", "debian"])
def test_a_host_called_like_a_common_word_keeps_its_report(name: str) -> None:
    whole = x99.sections(uname=f"Linux {name} {x99.KERNEL} #1 SMP x86_64 GNU/Linux")
    cleaned, _ = redact(whole)
    assert f" {name} " not in cleaned.by_name["uname"].stdout
    before, after = build(whole), build(cleaned)
    assert (after.system.os, after.driver, after.packages) == (before.system.os, before.driver, before.packages)


@pytest.mark.parametrize(
    "changes", [{}, {"holds": ""}, {"pci_config": next(iter(x99.CARDS)) + " ff" * 64}, {"iomem": x99.IOMEM_OFF}]
)
def test_a_capture_is_judged_as_the_host_is(changes: dict[str, str]) -> None:
    live = x99.sections(**changes)
    data, _ = bundle_of(live)
    again = HostReport.from_probe(read_bundle(data))
    judged = [
        [(f.id, f.severity, f.case, f.subject) for f in checks.run(report, expected_gpus=2)] for report in (build(live), again)
    ]
    assert judged[0] == judged[1]


def test_the_manifest_describes_the_capture(tmp_path: Path) -> None:
    path = tmp_path / "c.tar.gz"
    path.write_bytes(bundle_of(x99.sections())[0])
    with tarfile.open(path) as archive:
        assert archive.getnames() == ["manifest.json", "probe.txt"]
        stream = archive.extractfile("manifest.json")
        assert stream is not None
        manifest = json.load(stream)
    assert manifest["format"] == "laoka-capture"
    assert manifest["sections"] == sorted(x99.HEALTHY)
    assert manifest["simulated"] is False
    assert manifest["replaced"]["host"] >= 1
    assert "box" not in json.dumps(manifest)


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=300))
def test_no_text_makes_redaction_fail(text: str) -> None:
    redact(Sections({"dmesg": Section("dmesg", 0, text, text)}))
