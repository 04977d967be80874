"""The watchdog: notices a dropped card, keeps an incident, tells people. It observes; it does not recover anything yet."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import tomli_w
from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import http_test, run_unit
from roles.agent.deploy import HOME, PYTHON
from roles.base.deploy import BaseSettings
from roles.power.deploy import PowerSettings
from roles.serve.deploy import ServeSettings
from roles.settings import InventoryError, RoleSettings

TEMPLATES = Path(__file__).resolve().parents[2] / "templates" / "watchdog"
UNIT = "qwen-watchdog.service"
CONFIG = "/etc/laoka/watchdog.toml"
ALERT_URLS = "/etc/laoka/alert-urls"
METRICS_ADDRESS = "127.0.0.1:9835"
SIMULATED_KERNEL_LOG = "/srv/laoka-sandbox/kmsg"


class WatchdogSettings(RoleSettings):
    """Settings of the watchdog."""

    alert_urls_file: str | None = None
    """File on your machine with apprise addresses, one a line; it is copied to the hosts for root only. None: no alerts."""
    completion_interval_s: float = 60
    """How often the watchdog asks the model server for a completion, in seconds."""


def agent_config(
    base: BaseSettings, serving: ServeSettings, power: PowerSettings, own: WatchdogSettings, name: str
) -> dict[str, Any]:
    """The watchdog's settings on one host, as its TOML file says them."""
    config: dict[str, Any] = {
        "host": name,
        "lang": base.lang,
        "simulated": base.simulated,
        "metrics_address": METRICS_ADDRESS,
        "alert_urls_file": ALERT_URLS,
        "nvml": "required" if base.expected_gpus else "off",
        "completion_url": f"http://127.0.0.1:{serving.serve_port}",
        "completion_model": serving.served_model_name,
        "completion_interval_s": float(own.completion_interval_s),
        "judge_text": serving.serve_judge_text,
        "gpu": [gpu.model_dump() for gpu in base.expected_gpus],
    }
    if base.simulated:
        config["kernel_log"] = SIMULATED_KERNEL_LOG
    if power.power_limit_w is not None:
        config["power_limit_w"] = float(power.power_limit_w)
    return config


@deploy("Watchdog")
def watchdog() -> None:
    """Settings, addresses, unit; it runs with what is on disk now, and its metrics answer."""
    own = WatchdogSettings.of(host)
    config = agent_config(BaseSettings.of(host), ServeSettings.of(host), PowerSettings.of(host), own, host.name)
    head = "# laoka: settings of the watchdog. Do not edit: laoka rewrites it and restarts qwen-watchdog.\n"
    files.put(name="Settings", src=StringIO(head + tomli_w.dumps(config)), dest=CONFIG, mode="644")
    urls: StringIO | str = StringIO("# no alerts: alert_urls_file is not set in the inventory\n")
    if own.alert_urls_file:
        urls = str(Path(own.alert_urls_file).expanduser())
        if not Path(urls).is_file():
            raise InventoryError(f"host {host.name}: alert_urls_file {urls} is not there: write one address a line into it")
    files.put(name="Where alerts go", src=urls, dest=ALERT_URLS, mode="600")
    files.template(
        name="Unit", src=str(TEMPLATES / f"{UNIT}.j2"), dest=f"/etc/systemd/system/{UNIT}", mode="644",
        python=PYTHON, config_path=CONFIG, alert_urls_path=ALERT_URLS,
    )  # fmt: skip
    run_unit(
        name="The watchdog runs, and sees the cards",
        unit=UNIT,
        config=[f"/etc/systemd/system/{UNIT}", CONFIG, ALERT_URLS, f"{HOME}/current"],
        test=http_test(f"http://{METRICS_ADDRESS}/metrics", "laoka_gpus_seen"),
        _timeout=120,
    )
