"""The healthy X99 host of the checks' tests after a deploy: what the probe's section laoka shows of it, to be made ill."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from laoka.fleet.expected import Expected, expected_of
from laoka.host.report import HostReport
from laoka.host.sections import Sections
from tests.unit.checks import x99_host
from tests.unit.checks.x99_host import DRIVER, KERNEL

NOW_S = 1796100000  # the probe's clock in x99_host
WHEEL = "ab" * 32
REVISION, DRAFTER_REVISION = "1" * 40, "2" * 40
MODEL = "QUASAR-QAT/Qwen3.8-27B-QUASAR-NVFP4"
FLAGS = {"max-model-len": 65536, "tensor-parallel-size": 2, "kv-cache-dtype": "fp8_e5m2"}
UNIT = "/etc/systemd/system/qwen-serve.service"
SERVICES = "".join(
    f"Id={name}.service\nLoadState=loaded\nActiveState=active\nUnitFileState=enabled\nNRestarts=0\n\n"
    for name in ("nvidia-persistenced", "qwen-serve", "qwen-watchdog")
)

STACK: dict[str, Any] = {
    "driver_branch": "580", "driver_version": DRIVER, "module_flavour": "proprietary", "kernel_series": "6.8",
    "engine": "1cat-vllm", "engine_version": "1.5.1", "wheel_sha256": WHEEL, "speculative_method": "dflash",
    "model_repo": MODEL, "model_revision": REVISION,
    "drafter_repo": "z-lab/drafter", "drafter_revision": DRAFTER_REVISION, "serve_flags": {"max-model-len": 32768, **FLAGS},
}  # fmt: skip
DATA: dict[str, Any] = {
    "expected_gpus": [
        {"bdf": "0000:02:00.0", "device_id": "10de:1db6", "uuid": "GPU-00000000-0000-0000-0000-000000000006", "slot": "PCIE1"},
        {"bdf": "0000:03:00.0", "device_id": "10de:1db6"},
    ],
    "kernel": KERNEL,
    "power_limit_w": 175,
}


def expected(host: str = "box", stack: dict[str, Any] | None = STACK, **data: Any) -> Expected:
    return expected_of(host, {**DATA, **data}, stack, has_lock=True)


def incident(**changes: Any) -> dict[str, Any]:
    return {
        "id": "i1", "class": "card_gone", "severity": "critical", "card": "0000:03:00.0", "opened_unix_s": NOW_S - 3600,
        "closed_unix_s": None, "drill": False, "next": "look at the cable", **changes,
    }  # fmt: skip


def watchdog(**changes: Any) -> dict[str, Any]:
    return {
        "written_unix_s": NOW_S - 1, "sensors": [{"name": "pci", "verdict": "ok"}], "incidents": {"open": [], "recent": []},
        "alerts": {"channels": 1, "failing": {}}, **changes,
    }  # fmt: skip


def deploy(**changes: Any) -> dict[str, Any]:
    return {
        "run": "r1", "who": "ann@desk", "what": "deploys/full.py", "inventory": "inventories/lab.py", "lock": "abc123",
        "laoka": "0.1.0-aa",
        "began_unix_s": NOW_S - 7200, "ended_unix_s": NOW_S - 7000, "outcome": "done", "changed": ["Unit"], **changes,
    }  # fmt: skip


def section(files: dict[str, Any] | None = None, links: dict[str, str] | None = None, unit_text: str = "[Unit]") -> str:
    """The section's text. Arguments: `files` by path replace or add (None removes); values that are no text become JSON."""
    engine = "/opt/laoka/engines/1cat-vllm-1.5.1"
    all_links = {
        "/opt/laoka/agent/current": "/opt/laoka/agent/0.1.0-aa", "/opt/laoka/engines/current": engine,
        "/srv/laoka/models/current": f"/srv/laoka/models/{MODEL.replace('/', '--')}/{REVISION}",
        "/srv/laoka/models/drafter": f"/srv/laoka/models/z-lab--drafter/{DRAFTER_REVISION}", **(links or {}),
    }  # fmt: skip
    started = hashlib.sha256(b"[Unit]").hexdigest()
    noted = hashlib.sha256(f"{UNIT} {started}  -\n/opt/laoka/engines/current {engine}\n".encode()).hexdigest()
    content: dict[str, Any] = {
        "/opt/laoka/engines/current/laoka-complete": f"1cat-vllm 1.5.1 {WHEEL}",
        "/opt/laoka/engines/current/laoka-engine.json": {"kernels": {"kind": "sm70", "version": "1.5.1", "ok": True, "faults": []}},
        "/var/lib/laoka/speculative.json": {"method": "dflash", "reason": "on"},
        "/etc/qwen-serve/vllm.yaml": "# laoka\nmodel: \"/srv/laoka/models/current\"\n"
        + "".join(f"{key}: {json.dumps(value)}\n" for key, value in FLAGS.items()),
        "/run/qwen-serve/state.json": {"state": "ready"},
        "/run/laoka/watchdog.json": watchdog(),
        "/var/lib/laoka/watchdog/alert-test.json": {"unix_s": NOW_S - 86400, "delivered": 1, "failed": 0},
        "/var/lib/laoka/stamps/qwen-serve.service.config": f"{noted}\n{UNIT}\n/opt/laoka/engines/current",
        "/var/lib/laoka/deploys/ledger": json.dumps(deploy()),
        **(files or {}),
    }  # fmt: skip
    lines = []
    for path, text in content.items():
        if text is not None:
            body = text if isinstance(text, str) else json.dumps(text, indent=1)
            lines += [f"{path}:{line}" for line in body.rstrip("\n").split("\n")]
    lines += [f"@link {path} {target}" for path, target in all_links.items() if target]
    lines.append(f"@hash {hashlib.sha256(unit_text.encode()).hexdigest()}  {UNIT}")
    return "\n".join(lines)


def smi(limit: str = "175.00 W", **changes: str) -> str:
    return x99_host.smi(*(x99_host.smi_gpu(address, limit=limit, **changes) for address in x99_host.CARDS))


def given(**changes: Any) -> Sections:
    """The deployed host's sections with some changed."""
    return x99_host.sections(**{"laoka": section(), "services": SERVICES, "nvidia_smi_xml": smi(), **changes})


def host(**changes: Any) -> HostReport:
    """The deployed host's report."""
    return x99_host.host(**{"laoka": section(), "services": SERVICES, "nvidia_smi_xml": smi(), **changes})
