"""A deploy for test_cuda_power.py: the roles cuda and power as deploys/driver.py has them, without the driver's own."""

from pyinfra.context import host

from roles.base.deploy import base, unlock_host
from roles.cuda.deploy import cuda
from roles.power.deploy import power, power_gate
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
power_gate()
base()
cuda()
power()
unlock_host()
