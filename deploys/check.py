"""The firmware gate alone; changes nothing. Run: pyinfra inventories/lab.py deploys/check.py"""

from pyinfra.context import host

from roles.firmware.deploy import firmware
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
