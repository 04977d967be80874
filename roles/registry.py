"""Every role's settings in one list: what an inventory may say."""

from __future__ import annotations

from roles.audit.deploy import AuditSettings
from roles.base.deploy import BaseSettings
from roles.cuda.deploy import CudaSettings
from roles.dflash2.deploy import SpeculativeSettings
from roles.driver.settings import DriverSettings
from roles.engine.deploy import EngineSettings
from roles.firewall.deploy import FirewallSettings
from roles.firmware.deploy import FirmwareSettings
from roles.gateway.deploy import GatewaySettings
from roles.model.deploy import ModelSettings
from roles.monitoring.deploy import MonitoringSettings
from roles.plan import PlanSettings
from roles.power.deploy import PowerSettings
from roles.serve.deploy import ServeSettings
from roles.settings import RoleSettings
from roles.watchdog.deploy import WatchdogSettings

ALL_SETTINGS: tuple[type[RoleSettings], ...] = (
    BaseSettings, FirmwareSettings, DriverSettings, CudaSettings, EngineSettings, SpeculativeSettings,
    ModelSettings, ServeSettings, GatewaySettings, FirewallSettings, WatchdogSettings, MonitoringSettings, AuditSettings,
    PowerSettings, PlanSettings,
)  # fmt: skip
