"""The engine and what it can do about speculative decoding. Run: pyinfra inventories/lab.py deploys/engine.py"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.base.deploy import base, unlock_host
from roles.dflash2.deploy import dflash2
from roles.engine.deploy import engine, engine_gate
from roles.firmware.deploy import firmware
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
engine_gate(serves=False)
base()
agent()
engine()
dflash2()
unlock_host()
