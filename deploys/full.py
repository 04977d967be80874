"""Bare host to answering endpoint: every role, in order. Run: pyinfra inventories/lab.py deploys/full.py"""

from pyinfra.context import host

from roles.agent.deploy import agent
from roles.audit.deploy import audit
from roles.base.deploy import base, unlock_host
from roles.cuda.deploy import cuda
from roles.dflash2.deploy import dflash2
from roles.driver.deploy import driver
from roles.engine.deploy import engine, engine_gate
from roles.firewall.deploy import firewall
from roles.firmware.deploy import firmware
from roles.gateway.deploy import gateway
from roles.kernel.deploy import kernel
from roles.model.deploy import model
from roles.monitoring.deploy import monitoring
from roles.power.deploy import power, power_gate
from roles.registry import ALL_SETTINGS
from roles.serve.deploy import serve
from roles.settings import check_host
from roles.watchdog.deploy import watchdog

check_host(host, ALL_SETTINGS)
firmware()
engine_gate()
power_gate()
base()
kernel()
driver()
cuda()
agent()
engine()
model()
dflash2()  # looks at what the engine has and what the model is
power()  # before the first load, and before a watchdog that would miss the cap
serve()
gateway()
firewall()
watchdog()
monitoring()
audit()
unlock_host()
