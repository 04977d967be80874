"""The CUDA toolkit, where the engine compiles kernels on the host; otherwise nothing, and why."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.operations.steps import apt_hold, apt_install
from roles.settings import RoleSettings


class CudaSettings(RoleSettings):
    """Settings of the CUDA toolkit."""

    cuda_toolkit: str | None = None
    """Toolkit to install, such as 12-8 for package cuda-toolkit-12-8; None installs none. CUDA 13 does not know a V100."""


@deploy("CUDA")
def cuda() -> None:
    """Install exactly one toolkit package (never `cuda`, which brings a driver) and say where it lies."""
    settings = CudaSettings.of(host)
    if settings.cuda_toolkit is None:
        host.noop("no CUDA toolkit: none is asked for (cuda_toolkit in the inventory)")
        return
    package = f"cuda-toolkit-{settings.cuda_toolkit}"
    home = f"/usr/local/cuda-{settings.cuda_toolkit.replace('-', '.')}"
    apt_install(name=f"Install {package}", packages=[package])
    apt_hold(name="Hold the toolkit", packages=[package], certain=[package])
    files.put(
        name="CUDA_HOME for shells",
        src=StringIO(f"export CUDA_HOME={home}\nexport PATH=$CUDA_HOME/bin:$PATH\n"),
        dest="/etc/profile.d/laoka-cuda.sh",
    )
