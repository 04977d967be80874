"""The model's files. Run: pyinfra inventories/lab.py deploys/model.py"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.base.deploy import base, unlock_host
from roles.firmware.deploy import firmware
from roles.model.deploy import model
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
base()
agent()
model()
unlock_host()
