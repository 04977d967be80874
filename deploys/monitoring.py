"""Metrics and log limits. Run: pyinfra inventories/lab.py deploys/monitoring.py"""

from pyinfra.context import host

from roles.base.deploy import lock_host, unlock_host
from roles.firmware.deploy import firmware
from roles.monitoring.deploy import monitoring
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
lock_host()
monitoring()
unlock_host()
