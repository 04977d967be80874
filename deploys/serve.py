"""The model server and its front door. Run: pyinfra inventories/lab.py deploys/serve.py"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.base.deploy import base
from roles.firmware.deploy import firmware
from roles.gateway.deploy import gateway
from roles.registry import ALL_SETTINGS
from roles.serve.deploy import serve
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
base()
agent()
serve()
gateway()
