"""A deploy for test_dkms.py: the roles kernel and driver as deploys/driver.py has them, without what needs a card's own daemon."""

from pyinfra.context import host

from roles.base.deploy import base, unlock_host
from roles.driver.deploy import driver
from roles.kernel.deploy import kernel
from roles.registry import ALL_SETTINGS
from roles.settings import check_host

check_host(host, ALL_SETTINGS)
base()
kernel()
driver()
unlock_host()
