"""Kernel, driver, CUDA and power, one host at a time. Run: pyinfra inventories/lab.py deploys/driver.py"""

from pyinfra.context import host

from roles.base.deploy import base, unlock_host
from roles.cuda.deploy import cuda
from roles.driver.deploy import driver
from roles.firmware.deploy import firmware
from roles.kernel.deploy import kernel
from roles.power.deploy import power, power_gate
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
firmware()
power_gate()
base()
kernel()
driver()
cuda()
power()
unlock_host()
