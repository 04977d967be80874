"""A deploy that holds its host until a file is there: what two operators at once look like. With --data boot_anew=1 it then boots
the host, as a change of the driver does, and ends in the new boot.
"""

from collections.abc import Generator

from pyinfra.api.command import PyinfraCommand
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import server

from laoka.operations.driver import reboot
from roles.base.deploy import lock_host, unlock_host


@operation()
def boot() -> Generator[str | PyinfraCommand, None, None]:
    yield from reboot(600, "en")


lock_host()
server.shell(
    name="Hold", commands=["touch /tmp/holding; for i in $(seq 3000); do [ -e /tmp/go ] && exit 0; sleep 0.1; done; exit 1"]
)
if host.data.get("boot_anew"):
    boot(name="Boot it anew")
unlock_host()
