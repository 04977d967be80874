"""A probe of a real NVIDIA host (one H200, driver 580.159.04, Ubuntu 24.04, in a container of a VM), redacted and shortened.

It is no V100: it shows that the probe and the parsers hold on a real driver's sysfs, /proc and nvidia-smi.
"""

from __future__ import annotations

from pathlib import Path

from laoka import checks
from laoka.host.driver import LoadedModule
from laoka.host.report import HostReport

PROBE = Path(__file__).parents[2] / "data" / "hosts" / "h200_driver_580_ubuntu_2404.probe.txt"
GIB = 1 << 30


def test_what_the_host_is() -> None:
    report = HostReport.from_probe(PROBE.read_text(encoding="utf-8"))
    (gpu,) = report.gpus or ()
    assert (gpu.address, gpu.id_text, gpu.driver, gpu.answers) == ("0000:00:06.0", "10de:2335", "nvidia", True)
    bar1 = gpu.bar1
    assert bar1
    assert (bar1.index, bar1.size_bytes) == (2, 256 * GIB)  # a 64-bit BAR0 takes two registers
    assert report.driver.loaded == LoadedModule("580.159.04", "open")
    assert report.platform.kind == "container"
    assert report.system.os
    assert (report.system.os.id, report.system.os.version_id) == ("ubuntu", "24.04")
    assert report.system.glibc_version == "2.39"
    assert report.system.cpu
    assert (report.system.cpu.threads, "avx2" in report.system.cpu.flags) == (16, True)
    listing = report.nvidia.listing
    assert listing
    assert [(card.address, card.bar1_total_mib) for card in listing.gpus] == [("0000:00:06.0", 256 * 1024)]
    assert not report.probe.simulated
    assert report.probe.duration_ms is not None
    assert report.probe.duration_ms < 1000


def test_how_it_is_judged() -> None:
    report = HostReport.from_probe(PROBE.read_text(encoding="utf-8"))
    assert checks.gate(report, 1) == ()
    found = {(f.id, f.severity) for f in checks.run(report, expected_gpus=1)}
    for check in ("firmware.above-4g", "firmware.bar1-agrees", "cards.present", "cards.answer", "cards.listed", "driver.branch"):
        assert (check, "ok") in found, check
