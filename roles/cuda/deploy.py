"""The CUDA toolkit, where the engine compiles kernels on the host, and nothing beside it; otherwise none at all, and why."""

from __future__ import annotations

from io import StringIO

from pyinfra.api.deploy import deploy
from pyinfra.context import host
from pyinfra.operations import files

from laoka.catalog.messages import language
from laoka.operations.cuda import clear_toolkits, nvcc_says
from laoka.operations.steps import apt_hold, apt_install, reread_units
from laoka.stack.cuda_toolkits import dashed
from roles.base.deploy import BaseSettings
from roles.plan import locked_stack
from roles.settings import InventoryError, RoleSettings

SHELLS = "/etc/profile.d/laoka-cuda.sh"
# Of the one model server, and of each of several on a host (qwen-serve@NAME): drop-ins of a unit that is not there do nothing.
ENGINES = ("qwen-serve.service", "qwen-serve@*.service")
UNITS = tuple(f"/etc/systemd/system/{unit}.service.d/laoka-cuda.conf" for unit in ("qwen-serve", "qwen-serve@"))


class CudaSettings(RoleSettings):
    """Settings of the CUDA toolkit."""

    cuda_toolkit: str | None = None
    """Toolkit, such as 12-8 for package cuda-toolkit-12-8, or none; None takes what the lock's engine needs."""
    cuda_remove: bool = False
    """True: an accidental CUDA 13, a second or a distribution's toolkit is removed; it is only told otherwise."""


def wanted_toolkit() -> str | None:
    """The toolkit of this host, "12-8", or None: by its inventory, else by its lock. Errors: InventoryError for CUDA 13."""
    own = CudaSettings.of(host).cuda_toolkit
    wanted = own if own is not None else locked_stack(host).get("cuda_toolkit")
    if wanted is None or str(wanted).lower() == "none":
        return None
    if not dashed(str(wanted)).startswith("12-"):
        raise InventoryError(f"host {host.name}: cuda_toolkit {wanted}: a V100 needs CUDA 12, such as 12-8; CUDA 13 has no V100")
    return dashed(str(wanted))


@deploy("CUDA")
def cuda() -> None:
    """Install exactly one toolkit package (never `cuda`, which brings a driver), say where it lies, and clear what is beside it."""
    settings, base = CudaSettings.of(host), BaseSettings.of(host)
    lang = language(base.lang)
    wanted = wanted_toolkit()
    wait_s = base.apt_lock_wait_s
    clear_toolkits(name="No other CUDA toolkit", wanted=wanted, remove=settings.cuda_remove, lock_wait_s=wait_s, lang=lang)
    if wanted is None:
        host.noop("no CUDA toolkit: the engine needs none, and none is asked for (cuda_toolkit in the inventory)")
        files.file(name=f"No CUDA_HOME in {SHELLS}", path=SHELLS, present=False)
        gone = [files.file(name=f"No CUDA_HOME in {path}", path=path, present=False) for path in UNITS]
        reread_units(name="systemd knows of it", units=[*ENGINES], changes=any(item.will_change for item in gone))
        return
    package = f"cuda-toolkit-{wanted}"
    home = f"/usr/local/cuda-{wanted.replace('-', '.')}"
    apt_install(name=f"Install {package}", packages=[package], lock_wait_s=wait_s, lang=lang)
    apt_hold(name="Hold the toolkit", packages=[package], certain=[package], lock_wait_s=wait_s, lang=lang)
    files.put(
        name="CUDA_HOME for shells",
        src=StringIO(f"export CUDA_HOME={home}\nexport PATH=$CUDA_HOME/bin:$PATH\n"),
        dest=SHELLS,
    )
    head = "# laoka: where the engine finds the CUDA toolkit. Do not edit: laoka rewrites it.\n"
    told = [
        files.put(
            name=f"CUDA_HOME for the engine: {path}",
            src=StringIO(f"{head}[Service]\nEnvironment=CUDA_HOME={home}\n"),
            dest=path,
            create_remote_dir=True,
        )
        for path in UNITS
    ]
    reread_units(name="systemd knows of it", units=[*ENGINES], changes=any(item.will_change for item in told))
    nvcc_says(
        name=f"nvcc is of CUDA {wanted.replace('-', '.')}", path=f"{home}/bin/nvcc", release=wanted.replace("-", "."), lang=lang
    )
