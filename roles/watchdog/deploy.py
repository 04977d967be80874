"""The watchdog: notices a dropped card, keeps an incident, tells people, and recovers what the inventory allows."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field
from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import http_test, run_unit
from laoka.serving import starts
from roles.agent.deploy import HOME, PYTHON
from roles.base.deploy import BaseSettings
from roles.power.deploy import PowerSettings
from roles.secrets import secret_file
from roles.serve.deploy import Served, ServeSettings, served
from roles.settings import InventoryError, RoleSettings
from roles.watchdog import channels
from roles.watchdog.channels import AlertChannel

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "watchdog"
UNIT = "qwen-watchdog.service"
CONFIG = "/etc/laoka/watchdog.toml"
ALERT_URLS = "/etc/laoka/alert-urls"
METRICS_ADDRESS = "127.0.0.1:9835"
FENCE_ENV = "/var/lib/laoka/watchdog/fence.env"
FENCE_DROP_IN = "/etc/systemd/system/qwen-serve.service.d/laoka-fence.conf"
SIMULATED_KERNEL_LOG = "/srv/laoka-sandbox/kmsg"


class WatchdogSettings(RoleSettings):
    """Settings of the watchdog."""

    alert_urls_file: str | None = None
    """File on your machine (or env:NAME, sops:FILE) with apprise addresses, one a line; root's alone on hosts. None: no alerts."""
    alert_channels: tuple[AlertChannel, ...] = ()
    """Alert channels, such as {"service": "wecom", "key": "@~/secrets/wecom", "severities": ["critical"]}; see docs/alerts.md."""
    heartbeat_url: str | None = None
    """Address that the watchdog asks every minute while it lives (a dead man's switch); @FILE for one that stands in a file."""
    quiet_hours: str = Field("", pattern=r"^(([01]\d|2[0-3]):[0-5]\d-([01]\d|2[0-3]):[0-5]\d)?$")
    """The host's local time in which only critical alerts are sent, as 22:30-07:00; the others come in one summary afterwards."""
    completion_interval_s: float = 60
    """How often the watchdog asks the model server for a completion, in seconds."""
    watchdog_recovery: Literal["observe", "engine-only", "full"] = "engine-only"
    """What the watchdog may do by itself: nothing; restart the engine and apply the power cap; or also reset and rescan cards."""
    watchdog_reboot: bool = False
    """Whether policy full may also reboot the host."""
    watchdog_reboots_per_day: int = 1
    """Reboots and power cycles by the watchdog in 24 hours of its running time."""
    power_cycle_command: tuple[str, ...] = ()
    """Program and arguments that cut this host's power for a while, such as ("ipmitool", "chassis", "power", "cycle")."""
    cuda_smoke_test: tuple[str, ...] = ()
    """Program and arguments of a CUDA test on the host; a recovered card has to pass it. Empty: there is none."""
    watchdog_burst_quiet_s: float = 180.0
    """How long a burst of kernel-log records must be over before the next one is an incident of its own."""


def agent_config(
    base: BaseSettings, serving: ServeSettings, power: PowerSettings, own: WatchdogSettings, name: str, asked: Served
) -> dict[str, Any]:
    """The watchdog's settings on one host, as its TOML file says them.

    Arguments: `asked` is the server that has to answer it: the only one, or the first of several (each has its own supervisor too).
    """
    config: dict[str, Any] = {
        "host": name,
        "lang": base.lang,
        "simulated": base.simulated,
        "metrics_address": METRICS_ADDRESS,
        "alert_urls_file": ALERT_URLS,
        "nvml": "required" if base.expected_gpus else "off",
        "completion_url": asked.url,
        "completion_model": serving.served_model_name,
        "completion_api_key_file": asked.key,
        "completion_interval_s": float(own.completion_interval_s),
        "judge_text": serving.serve_judge_text,
        "quiet_hours": own.quiet_hours,
        "recovery": own.watchdog_recovery,
        "reboot": own.watchdog_reboot,
        "reboots_per_day": own.watchdog_reboots_per_day,
        "burst_quiet_s": own.watchdog_burst_quiet_s,
        "power_cycle_command": list(own.power_cycle_command),
        "smoke_test": list(own.cuda_smoke_test),
        "tensor_parallel": int(asked.flags.get("tensor-parallel-size", 1)),
        "engine_start_deadline_s": float(serving.serve_start_deadline_s or starts.MOST_S),
        "gpu": [gpu.model_dump() for gpu in base.expected_gpus],
    }
    if base.simulated:
        config["kernel_log"] = SIMULATED_KERNEL_LOG
    if power.power_limit_w is not None:
        config["power_limit_w"] = float(power.power_limit_w)
    return config


def alert_urls(own: WatchdogSettings, name: str) -> str:
    """The file of addresses of one host: the operator's own file, then the inventory's channels. Errors: InventoryError."""
    found = ""
    if own.alert_urls_file:
        try:
            found = secret_file(own.alert_urls_file) + "\n"
        except ValueError as error:
            raise InventoryError(f"host {name}: alert_urls_file {error}, with one address a line") from None
    try:
        found += channels.lines(own.alert_channels, own.heartbeat_url)
    except ValueError as error:
        raise InventoryError(f"host {name}: alert_channels: {error}") from None
    return found or "# no alerts: neither alert_urls_file nor alert_channels is set in the inventory\n"


@deploy("Watchdog")
def watchdog() -> None:
    """Settings, addresses, unit; it runs with what is on disk now, and its metrics answer."""
    own = WatchdogSettings.of(host)
    config = agent_config(BaseSettings.of(host), ServeSettings.of(host), PowerSettings.of(host), own, host.name, served(host)[0])
    head = "# laoka: settings of the watchdog. Do not edit: laoka rewrites it and restarts qwen-watchdog.\n"
    files.put(name="Settings", src=StringIO(head + tomli_w.dumps(config)), dest=CONFIG, mode="644")
    urls = StringIO(alert_urls(own, host.name))
    files.put(name="Where alerts go", src=urls, dest=ALERT_URLS, mode="600")
    files.put(
        name="The engine does not see a card that was given up",
        src=StringIO(f"# laoka: written by the watchdog when it gives a card up.\n[Service]\nEnvironmentFile=-{FENCE_ENV}\n"),
        dest=FENCE_DROP_IN,
        mode="644",
    )
    files.template(
        name="Unit", src=str(TEMPLATES / f"{UNIT}.j2"), dest=f"/etc/systemd/system/{UNIT}", mode="644",
        python=PYTHON, config_path=CONFIG, alert_urls_path=ALERT_URLS,
        full=own.watchdog_recovery == "full",
    )  # fmt: skip
    run_unit(
        name="The watchdog runs, and sees the cards",
        unit=UNIT,
        config=[f"/etc/systemd/system/{UNIT}", CONFIG, ALERT_URLS, FENCE_DROP_IN, f"{HOME}/current"],
        test=http_test(f"http://{METRICS_ADDRESS}/metrics", "laoka_gpus_seen"),
        _timeout=120,
    )
