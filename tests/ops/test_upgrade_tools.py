"""The tool that would undo a pin, the real one of Debian's archive: unattended-upgrades.

The driver's packages and the kernel are stand-ins (test_driver.py).
"""

from __future__ import annotations

import pytest

from laoka.sandbox import hosts
from laoka.sandbox.lab import HostFolder
from tests.ops.drivers import OLD, Pair, driver_packages, install_from_debian, say

pytestmark = pytest.mark.long
DATA: dict[str, object] = {"driver": OLD}


ALL_ALLOWED = """\
// Whatever this archive has may come, and there are no pins.
Unattended-Upgrade::Origins-Pattern { "origin=laoka-sandbox"; };
Dir::Etc::Preferences "/dev/null";
Dir::Etc::PreferencesParts "/dev/null";
"""


def tried(host: HostFolder, environment: str = "") -> tuple[set[str], str]:
    """What unattended-upgrades would upgrade, and all that it says."""
    done = hosts.execute(host, f"{environment} unattended-upgrade --dry-run --debug 2>&1", deadline_s=120)
    assert done.status == 0, done.stdout[-2000:]
    lines = [line.partition("Packages that will be upgraded:")[2] for line in done.stdout.splitlines()]
    return {name for line in lines for name in line.split()}, done.stdout


def test_unattended_upgrades_leaves_the_driver_alone_by_its_own_blacklist_too(old_pair: Pair) -> None:
    host = old_pair[1]
    install_from_debian(host, "unattended-upgrades")
    hosts.execute(host, "cat > /srv/all-allowed", stdin=ALL_ALLOWED, check=True)
    before, held = driver_packages(host), say(host, "apt-mark showhold").split()
    blacklist = "/etc/apt/apt.conf.d/52laoka-blacklist"
    say(host, f"apt-mark -qq unhold {' '.join(held)}")
    try:
        listed, said = tried(host, "APT_CONFIG=/srv/all-allowed")
        say(host, f"mv {blacklist} /srv/")
        unlisted, _ = tried(host, "APT_CONFIG=/srv/all-allowed")
    finally:
        say(host, f"mv /srv/52laoka-blacklist {blacklist}; apt-mark -qq hold {' '.join(held)}")
    # Without the list, pins and holds it takes the driver further; the list alone is enough to keep it.
    assert {"nvidia-utils-580-server", "libnvidia-compute-580-server"} <= unlisted
    assert listed == set(), said
    assert tried(host)[0] == set()  # with all three, as the deploy left them
    assert driver_packages(host) == before
