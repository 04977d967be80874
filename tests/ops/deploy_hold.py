"""A deploy that holds its host until a file is there: what two operators at once look like."""

from pyinfra.operations import server

from roles.base.deploy import lock_host, unlock_host

lock_host()
server.shell(
    name="Hold", commands=["touch /tmp/holding; for i in $(seq 600); do [ -e /tmp/go ] && exit 0; sleep 0.1; done; exit 1"]
)
unlock_host()
