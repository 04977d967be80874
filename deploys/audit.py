"""The nightly audit of each host by itself. Run: pyinfra inventories/lab.py deploys/audit.py"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.audit.deploy import audit
from roles.base.deploy import base, unlock_host
from roles.firmware.deploy import firmware
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
base()
agent()
audit()
unlock_host()
