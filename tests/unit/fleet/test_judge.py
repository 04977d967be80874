"""The audit's rules on one host: a host as its lock says has nothing to look at, and each way of leaving it is told."""

from __future__ import annotations

import json
from typing import Any

import pytest

from laoka.fleet.judge import RULES, judge
from laoka.host.sections import Section
from tests.unit.checks import x99_host
from tests.unit.fleet import deployed_host
from tests.unit.fleet.deployed_host import NOW_S, SERVICES, STACK, deploy, expected, host, incident, section, smi, watchdog

MOVED = "nvidia-dkms-580-server:\n  Installed: 580.159.03-0ubuntu1\n  Candidate: 580.173.02-0ubuntu1\n"
TIMERS_OFF = 'APT::Periodic::Unattended-Upgrade "0";'
KERNEL_MOVES = "linux-image-generic:\n  Installed: 6.8.0-124.124\n  Candidate: 6.8.0-130.130\n"


def found(report_changes: dict[str, Any], expected_changes: dict[str, Any]) -> set[tuple[str, str, str]]:
    """(id, severity, case) of what has to be looked at."""
    findings = judge(host(**report_changes), expected(**expected_changes))
    return {(f.id, f.severity, f.case) for f in findings if f.severity in ("warn", "unknown", "fail")}


def test_a_host_as_its_lock_says_has_nothing_to_look_at() -> None:
    assert found({}, {}) == set()


def test_every_rule_says_something_about_it() -> None:
    ids = {finding.id for finding in judge(host(), expected())}
    assert set(RULES) - {"audit.cuda"} <= ids  # no toolkit is asked for here


@pytest.mark.parametrize(
    ("changes", "wanted", "finding"),
    [
        ({}, {"stack": None}, ("audit.locked", "fail", "missing")),
        ({}, {"stack": {**STACK, "driver_version": "580.159.03"}}, ("audit.driver", "fail", "other")),
        ({}, {"stack": {**STACK, "module_flavour": "open"}}, ("audit.flavour", "fail", "other")),
        ({"apt_policy": MOVED, "holds": "", "apt_config": TIMERS_OFF}, {}, ("audit.apt-tonight", "warn", "would")),
        ({"apt_policy": MOVED, "holds": ""}, {}, ("audit.apt-tonight", "warn", "would")),  # the blacklist names nvidia
        ({"apt_policy": KERNEL_MOVES, "holds": ""}, {}, ("audit.apt-tonight", "fail", "moves")),
        ({"apt_policy": None}, {}, ("audit.apt-tonight", "unknown", "unread")),
        ({}, {"kernel": "6.8.0-110-generic"}, ("audit.kernel", "fail", "running")),
        ({"grub": "/etc/default/grub:GRUB_DEFAULT=1>1"}, {}, ("audit.kernel", "fail", "next-boot")),
        ({}, {"kernel": None, "stack": {**STACK, "kernel_series": "6.17"}}, ("audit.kernel", "warn", "series")),
        ({}, {"cuda_toolkit": "12-8"}, ("audit.cuda", "fail", "missing")),
        ({"nvidia_smi_xml": smi("250.00 W")}, {}, ("audit.caps", "fail", "other")),
        ({"nvidia_smi_xml": None}, {}, ("audit.caps", "unknown", "unread")),
        ({"pci_attributes": x99_host.pci_attributes(device="0x1db4")}, {}, ("audit.cards", "fail", "other-kind")),
        ({"laoka": section(links={"/opt/laoka/engines/current": ""})}, {}, ("audit.engine", "fail", "none")),
        ({"laoka": section({"/opt/laoka/engines/current/laoka-complete": None})}, {}, ("audit.engine", "fail", "unfinished")),
        ({}, {"stack": {**STACK, "engine_version": "1.6.0"}}, ("audit.engine", "fail", "other")),
        ({}, {"stack": {**STACK, "wheel_sha256": "cd" * 32}}, ("audit.engine", "fail", "other-wheel")),
        (
            {
                "laoka": section(
                    {"/opt/laoka/engines/current/laoka-engine.json": {"kernels": {"kind": "sm70", "ok": False, "faults": ["x"]}}}
                )
            },
            {},
            ("audit.kernels", "fail", "not-proven"),
        ),
        ({"laoka": section({"/opt/laoka/engines/current/laoka-engine.json": None})}, {}, ("audit.kernels", "fail", "not-proven")),
        (
            {"laoka": section({"/var/lib/laoka/speculative.json": {"method": None, "reason": "no memory"}})},
            {},
            ("audit.speculative", "warn", "off"),
        ),
        ({"laoka": section(links={"/srv/laoka/models/current": ""})}, {}, ("audit.model", "fail", "none")),
        ({}, {"model_revision": "9" * 40}, ("audit.model", "fail", "other-revision")),
        ({}, {"model_id": "someone/else"}, ("audit.model", "fail", "other")),
        ({}, {"stack": {**STACK, "drafter_revision": "9" * 40}}, ("audit.drafter", "fail", "other-revision")),
        ({}, {"serve_flags": {"max-model-len": 1024}}, ("audit.flags", "warn", "differ")),
        ({}, {"serve_instances": {"a": {"port": 8001}}}, ("audit.flags", "fail", "none")),
        ({"laoka": section(unit_text="[Unit] # by hand")}, {}, ("audit.units", "warn", "changed")),
        ({"probe": f"uid=1000\nepoch_s={NOW_S}\nuptime_s=1"}, {}, ("audit.units", "unknown", "unread")),
        ({"services": SERVICES.replace("qwen-serve", "other")}, {}, ("audit.serving", "fail", "no-unit")),
        (
            {"laoka": section({"/run/qwen-serve/state.json": {"state": "failed", "kind": "oom"}})},
            {},
            ("audit.serving", "fail", "down"),
        ),
        ({"services": SERVICES.replace("qwen-watchdog", "other")}, {}, ("audit.watchdog", "fail", "none")),
        ({"laoka": section({"/run/laoka/watchdog.json": None})}, {}, ("audit.watchdog", "fail", "silent")),
        (
            {"laoka": section({"/run/laoka/watchdog.json": watchdog(written_unix_s=NOW_S - 900)})},
            {},
            ("audit.watchdog", "fail", "silent"),
        ),
        (
            {"laoka": section({"/run/laoka/watchdog.json": watchdog(incidents={"open": [incident()], "recent": []})})},
            {},
            ("audit.watchdog", "fail", "incident"),
        ),
        (
            {"laoka": section({"/run/laoka/watchdog.json": watchdog(sensors=[{"name": "nvml", "verdict": "unknown"}])})},
            {},
            ("audit.watchdog", "warn", "blind"),
        ),
        (
            {"laoka": section({"/run/laoka/watchdog.json": watchdog(alerts={"channels": 0, "failing": {}})})},
            {},
            ("audit.alerts", "warn", "no-channel"),
        ),
        ({"laoka": section({"/var/lib/laoka/watchdog/alert-test.json": None})}, {}, ("audit.alerts", "warn", "never")),
        (
            {"laoka": section({"/var/lib/laoka/watchdog/alert-test.json": {"unix_s": NOW_S, "delivered": 0, "failed": 1}})},
            {},
            ("audit.alerts", "fail", "failed"),
        ),
        (
            {
                "laoka": section(
                    {"/var/lib/laoka/watchdog/alert-test.json": {"unix_s": NOW_S - 91 * 86400, "delivered": 1, "failed": 0}}
                )
            },
            {},
            ("audit.alerts", "warn", "old"),
        ),
        (
            {
                "laoka": section(
                    {
                        "/var/lib/laoka/deploys/lock": json.dumps(
                            deploy(outcome="running", ended_unix_s=None, began_unix_s=NOW_S - 300)
                        )
                    }
                )
            },
            {},
            ("audit.deploy", "warn", "interrupted"),
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_each_way_of_leaving_the_lock_is_told(
    changes: dict[str, Any], wanted: dict[str, Any], finding: tuple[str, str, str]
) -> None:
    assert finding in found(changes, wanted)


def test_a_card_that_was_swapped_and_one_that_moved() -> None:
    other = [{"bdf": "0000:02:00.0", "device_id": "10de:1db6", "serial": "999"}]
    assert ("audit.cards", "fail", "swapped") in found({}, {"expected_gpus": other})
    gone = [{"bdf": "0000:09:00.0", "device_id": "10de:1db6", "serial": "1500000000000"}]
    assert ("audit.cards", "fail", "moved") in found({}, {"expected_gpus": gone})
    assert ("audit.cards", "fail", "missing") in found({}, {"expected_gpus": [{"bdf": "0000:09:00.0", "device_id": "10de:1db6"}]})


def test_a_drill_is_no_incident() -> None:
    text = section({"/run/laoka/watchdog.json": watchdog(incidents={"open": [incident(drill=True)], "recent": []})})
    assert found({"laoka": text}, {}) == set()


def test_a_host_without_laoka_lacks_engine_model_flags_and_watchdog() -> None:
    told = found({"laoka": None}, {})
    assert {("audit.engine", "fail", "none"), ("audit.model", "fail", "none"), ("audit.flags", "fail", "none")} <= told
    assert ("audit.watchdog", "fail", "none") in told


def test_what_could_not_be_read_is_never_fine() -> None:
    broken = Section("nvidia-proc", 1, "", "cat: permission denied")
    assert ("audit.driver", "unknown", "unread") in found({"nvidia_proc": broken, "modules": None, "nvidia_smi_xml": None}, {})


def test_in_a_capture_what_is_hidden_is_not_compared() -> None:
    from laoka.host.redact import redact
    from laoka.host.report import build

    cleaned, _ = redact(deployed_host.given())
    told = {(f.id, f.case) for f in judge(build(cleaned), expected()) if f.severity in ("warn", "unknown", "fail")}
    assert told == set()
