"""The model server and its front door, changed one host at a time. Run: pyinfra inventories/lab.py deploys/serve.py

A host that serves is drained, restarted, asked for a completion and brought back before the next one; one that fails is put back on
what ran before, and stops the rollout. What did not change is not restarted; a limit of the gateway is read again without a cut.
"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.base.deploy import base, unlock_host
from roles.dflash2.deploy import dflash2
from roles.firewall.deploy import firewall
from roles.firmware.deploy import firmware
from roles.gateway.deploy import gateway
from roles.registry import ALL_SETTINGS
from roles.serve.deploy import serve
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
base()
agent()
dflash2()
serve()
gateway()
firewall()
unlock_host()
