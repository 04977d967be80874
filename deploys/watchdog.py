"""The watchdog. Run: pyinfra inventories/lab.py deploys/watchdog.py"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.base.deploy import base, unlock_host
from roles.firmware.deploy import firmware
from roles.registry import ALL_SETTINGS
from roles.settings import check_host
from roles.watchdog.deploy import watchdog

check_host(host, ALL_SETTINGS)
firmware()
base()
agent()
watchdog()
unlock_host()
