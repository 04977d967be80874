"""A deploy for test_steps.py: every operation of laoka.operations.steps once."""

from io import StringIO

from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import (
    apt_hold,
    apt_install,
    apt_update_when_stale,
    checked_file,
    http_test,
    refuse,
    reread_units,
    run_unit,
    switch_link,
    until_stamped,
)

UNIT = """\
[Service]
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 8123 --directory /srv
ExecReload=/bin/sh -c "echo reloaded >> /srv/reloads"
[Install]
WantedBy=multi-user.target
"""

refuse(name="refuse nothing", lines=[])
files.put(name="source", src=StringIO("# empty\n"), dest="/etc/apt/sources.list.d/test.list")
wait_s = int(host.data.get("apt_lock_wait_s", 300))
apt_update_when_stale(name="update", lock_wait_s=wait_s, lang="en")
apt_install(name="install", packages=["hello"], lock_wait_s=wait_s, lang="en")
apt_hold(name="hold", packages=["hell*"], certain=["hello"], lock_wait_s=wait_s, lang="en")
until_stamped(name="stamped", stamp="/srv/stamp", text="v1", commands=["echo ran >> /srv/ran"])
files.directory(name="target", path="/srv/a-1")
switch_link(name="switch", path="/srv/current", target="a-1")
files.put(name="unit file", src=StringIO(UNIT), dest="/etc/systemd/system/small.service")
files.put(name="limits", src=StringIO("limit 1\n"), dest="/srv/limits")
run_unit(
    name="run",
    unit="small.service",
    config=["/etc/systemd/system/small.service", "/srv/current"],
    reload=["/srv/limits"],
    test=http_test("http://127.0.0.1:8123/", "stamp"),
)
reread_units(name="reread", units=["small.service", "small@*.service"])
checked_file(name="checked", source="/srv/limits", path="/srv/limits.taken", check="grep -q limit /srv/limits")
