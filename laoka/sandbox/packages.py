"""A local apt repository of stand-in packages with the names and dependencies of NVIDIA's and Ubuntu's, for the sandbox.

The stand-ins contain no NVIDIA software: a simulated NVML and nvidia-smi (laoka.sandbox.simulated), a few text files, and
scripts that touch only the simulated card. Names, versions and the shape of the dependencies follow the Ubuntu archive and
NVIDIA's CUDA repository, with their traps: the `-open` twins, the branches above 580 that no longer drive a V100, the
renamed packages of branch 590 and newer, `cuda` and `cuda-drivers`, kernel metapackages that move on. Version 610.43.02 is made up.

Two flat repositories come out: the folder itself, and `trap/` with transitional 580-server packages that pull branch 595.
"""

from __future__ import annotations

import hashlib
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from laoka.files import write_atomic
from laoka.process import run
from laoka.sandbox.lab import SandboxError
from laoka.sandbox.simulated import MODULE_SOURCE, NVML_SOURCE, PERSISTENCED_SOURCE, SMI_SOURCE

DRIVERS_580 = ("580.159.03", "580.173.02")
DRIVER_595 = "595.71.03"
DRIVER_610 = "610.43.02"
UBUNTU = "-0ubuntu0.24.04.1"
# Kernel release -> version of the metapackage that pulls it.
KERNELS = {"6.8.0-124": "6.8.0-124.124", "6.14.0-33": "6.14.0-33.33~24.04.1"}
# The one that the archive has built modules for; for the other one DKMS has to do.
BUILT_FOR = "6.8.0-124"
CUDA_TOOLKITS = {"12-8": ("12.8.1-1", "12.8.93"), "13-0": ("13.0.2-1", "13.0.88")}
TOOLS = {"gcc": "gcc libc6-dev", "dpkg-deb": "dpkg", "apt-ftparchive": "apt-utils"}
NOTICE = "Stand-in package of laoka's sandbox. It contains no NVIDIA software and no kernel.\n"
MAINTAINER = "laoka sandbox <sandbox@localhost>"


@dataclass(frozen=True)
class PackedFile:
    """A file in a package: its content and permission bits, or where it links to."""

    content: bytes = b""
    mode: int = 0o644
    link: str = ""


@dataclass(frozen=True)
class Package:
    """One stand-in: control fields, files by absolute path, maintainer scripts by name (postinst, prerm, triggers)."""

    name: str
    version: str
    summary: str
    depends: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    files: Mapping[str, PackedFile] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)

    def file_name(self, architecture: str) -> str:
        return f"{self.name}_{self.version}_{architecture}.deb"


@dataclass(frozen=True)
class Binaries:
    """What was compiled: the simulated NVML by driver version, nvidia-persistenced, and the module that no kernel loads."""

    nvml: Mapping[str, bytes]
    persistenced: bytes
    modules: Mapping[tuple[str, str], bytes]
    """nvidia.ko by driver version and flavour: "" for the proprietary one, "open"."""


def control_text(package: Package, architecture: str) -> str:
    """The control file of a stand-in."""
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": architecture,
        "Maintainer": MAINTAINER,
        "Section": "misc",
        "Priority": "optional",
        "Depends": ", ".join(package.depends),
        "Provides": ", ".join(package.provides),
        "Conflicts": ", ".join(package.conflicts),
        "Replaces": ", ".join(package.conflicts),
        "Description": f"stand-in of laoka's sandbox, contains no NVIDIA software: {package.summary}",
    }
    return "".join(f"{name}: {value}\n" for name, value in fields.items() if value)


# ---- the packages ---------------------------------------------------------------------------------------------------

_UNIT = """\
# nvidia-persistenced of laoka's sandbox: sets persistence mode on the simulated card. As Ubuntu's unit, it leaves the mode
# alone unless a drop-in says otherwise.
[Unit]
Description=NVIDIA Persistence Daemon (stand-in of laoka's sandbox)
ConditionPathExists=/srv/laoka-sandbox/simulated

[Service]
Type=simple
ExecStart=/usr/bin/nvidia-persistenced --user nvidia-persistenced --no-persistence-mode --verbose

[Install]
WantedBy=multi-user.target
"""

# What a DKMS package does on its host, builds left out: the module comes ready in the package.
_DKMS_POSTINST = """\
#!/bin/sh
# Stand-in of laoka's sandbox: puts a module where DKMS would have built one, for every kernel whose headers are here. A line of
# dkms-fails, a kernel or a driver version, makes the build fail; an empty file all of them.
set -e
version=@VERSION@ fails=/srv/laoka-sandbox/dkms-fails ended=0
status=/var/lib/dkms-standin/status
mkdir -p /var/lib/dkms-standin
: > "$status.new"
for headers in /usr/src/linux-headers-*-generic; do
    [ -d "$headers" ] || continue
    kernel=${headers#/usr/src/linux-headers-}
    if [ -e $fails ] && { [ ! -s $fails ] || grep -qxF -e "$kernel" -e "$version" $fails; }; then
        echo "Error! Bad return status for module build on kernel: $kernel ($(uname -m))" >&2
        echo "Consult /var/lib/dkms/nvidia/$version/build/make.log for more information." >&2
        ended=10
        continue
    fi
    mkdir -p "/lib/modules/$kernel/updates/dkms"
    cp /usr/src/nvidia-$version/nvidia.ko "/lib/modules/$kernel/updates/dkms/nvidia.ko.new"
    mv "/lib/modules/$kernel/updates/dkms/nvidia.ko.new" "/lib/modules/$kernel/updates/dkms/nvidia.ko"
    depmod "$kernel"
    echo "nvidia/$version, $kernel, $(uname -m): installed" >> "$status.new"
done
[ -s "$status.new" ] || echo "nvidia/$version: added" > "$status.new"
mv "$status.new" "$status"
exit $ended
"""

_DKMS_PRERM = """\
#!/bin/sh
# Stand-in of laoka's sandbox: takes back what its postinst put there, as `dkms remove --all` does.
set -e
rm -rf /var/lib/dkms-standin
for module in /lib/modules/*/updates/dkms/nvidia.ko; do
    [ -f "$module" ] || continue
    rm -f "$module"
    kernel=${module#/lib/modules/}
    depmod "${kernel%%/*}" || true
done
"""

_DKMS = """\
#!/bin/sh
# dkms of laoka's sandbox: tells what the stand-in module packages noted; it can build nothing.
if [ "${1:-status}" = status ]; then
    cat /var/lib/dkms-standin/status 2>/dev/null || true
else
    echo "dkms: stand-in of laoka's sandbox: it can't $1" >&2
    exit 1
fi
"""

_DEPMOD = """\
#!/bin/sh
# Stand-in of laoka's sandbox.
set -e
depmod @KERNEL@
"""

# As the real package: the hooks in /etc/kernel see the new kernel (one of them makes the boot menu).
_KERNEL_SCRIPT = """\
#!/bin/sh
# Stand-in of laoka's sandbox: a kernel that nothing boots, in the boot menu all the same.
set -e
[ ! -d /lib/modules/@KERNEL@ ] || depmod @KERNEL@
[ ! -d /etc/kernel/@HOOKS@.d ] || DEB_MAINT_PARAMS="$*" run-parts --arg=@KERNEL@ --arg=/boot/vmlinuz-@KERNEL@ /etc/kernel/@HOOKS@.d
"""

_NVCC = """\
#!/bin/sh
# nvcc of laoka's sandbox: says its version and compiles nothing.
if [ "$1" = --version ] || [ "$1" = -V ]; then
    echo "nvcc: stand-in of laoka's sandbox, contains no NVIDIA software"
    echo "Cuda compilation tools, release @RELEASE@, V@BUILD@"
else
    echo "nvcc: stand-in of laoka's sandbox: it can't compile" >&2
    exit 1
fi
"""

# NVIDIA's pinning package raises every driver package of one branch above all others.
_PINNING = """\
# Stand-in of laoka's sandbox for NVIDIA's pinning package.
Package: *nvidia* cuda-drivers*
Pin: version 580.*
Pin-Priority: 1000
"""


def _dkms_package(name: str, version: str, words: str, driver: str, binaries: Binaries, depends: tuple[str, ...] = ()) -> Package:
    """A DKMS package; whether its module is the open one is told by its name."""
    flavour = "open" if "open" in name else ""
    return Package(
        name,
        version,
        f"DKMS package of {words}; builds nothing",
        ("dkms", *depends),
        ("nvidia-dkms-kernel",),
        ("nvidia-dkms-kernel",),
        {f"/usr/src/nvidia-{driver}/nvidia.ko": PackedFile(binaries.modules[driver, flavour])},
        # Installed kernels may change later, as DKMS then builds again.
        {
            "postinst": _DKMS_POSTINST.replace("@VERSION@", driver),
            "prerm": _DKMS_PRERM,
            "triggers": "interest-noawait /usr/src\n",
        },
    )


def signed(module: bytes, signer: str = "laoka sandbox stand-in signing key") -> bytes:
    """A module with a signature appended as kernels of old had it: modinfo shows its signer, and nobody can check it."""
    key_id, signature = bytes(20), bytes(64)
    # struct module_signature: algorithm RSA, hash SHA-256, identifier X.509, lengths; then the magic words.
    info = struct.pack(">BBBBB3xI", 1, 4, 1, len(signer), len(key_id), len(signature))
    return module + signer.encode() + key_id + signature + info + b"~Module signature appended~\n"


def _userspace(driver: str, suffix: str, binaries: Binaries, multiarch: str) -> tuple[Package, Package, Package]:
    """Library, nvidia-smi and nvidia-persistenced of one driver version under Ubuntu's names; `suffix` ends them."""
    names = (f"libnvidia-compute{suffix}", f"nvidia-utils{suffix}", f"nvidia-compute-utils{suffix}")
    return _libraries(names, driver, driver + UBUNTU, binaries, multiarch)


def _libraries(
    names: tuple[str, str, str], driver: str, version: str, binaries: Binaries, multiarch: str
) -> tuple[Package, Package, Package]:
    """Library, nvidia-smi and nvidia-persistenced under any names."""
    library, tool, daemon = names
    same = f"{library} (= {version})"
    folder = f"/usr/lib/{multiarch}".rstrip("/")
    return (
        Package(
            library,
            version,
            "simulated libnvidia-ml.so.1",
            ("libc6",),
            ("libnvidia-compute-provider",),
            ("libnvidia-compute-provider", "libnvidia-ml1"),
            {
                f"{folder}/libnvidia-ml.so.{driver}": PackedFile(binaries.nvml[driver]),
                f"{folder}/libnvidia-ml.so.1": PackedFile(link=f"libnvidia-ml.so.{driver}"),
            },
            {"triggers": "activate-noawait ldconfig\n"},
        ),
        Package(
            tool,
            version,
            "simulated nvidia-smi",
            (same, "python3"),
            ("nvidia-utils-provider",),
            ("nvidia-utils-provider", "nvidia-smi"),
            {"/usr/bin/nvidia-smi": PackedFile(smi_text().encode(), 0o755)},
        ),
        Package(
            daemon,
            version,
            "nvidia-persistenced for the simulated card",
            (same,),
            ("nvidia-compute-utils",),
            ("nvidia-compute-utils", "nvidia-persistenced"),
            {
                "/usr/bin/nvidia-persistenced": PackedFile(binaries.persistenced, 0o755),
                "/lib/systemd/system/nvidia-persistenced.service": PackedFile(_UNIT.encode()),
            },
        ),
    )


def _server_branch(driver: str, binaries: Binaries, multiarch: str) -> tuple[Package, ...]:
    """Ubuntu's 580-server packages of one driver version, with the open twins."""
    version = driver + UBUNTU
    same = f"(= {version})"
    firmware = f"nvidia-firmware-580-server-{driver}"
    packages = [
        *_userspace(driver, "-580-server", binaries, multiarch),
        Package(firmware, version, "firmware of the driver"),
        Package(
            "nvidia-kernel-common-580-server",
            version,
            "shared files of the kernel module",
            (f"{firmware} {same}",),
            ("nvidia-kernel-common",),
            ("nvidia-kernel-common",),
        ),
    ]
    for twin, words in (("", "proprietary"), ("-open", "open, not for a V100")):
        source, dkms = f"nvidia-kernel-source-580-server{twin}", f"nvidia-dkms-580-server{twin}"
        no_dkms = f"nvidia-headless-no-dkms-580-server{twin}"
        packages += [
            Package(source, version, f"sources of the {words} module", (), ("nvidia-kernel-source",), ("nvidia-kernel-source",)),
            _dkms_package(
                dkms,
                version,
                f"the {words} module",
                driver,
                binaries,
                (f"{source} {same}", f"nvidia-kernel-common-580-server {same}"),
            ),
            *_built_modules(driver, twin, binaries),
            Package(
                no_dkms,
                version,
                f"driver without display, {words}, without DKMS",
                (
                    f"nvidia-kernel-common-580-server {same}",
                    f"{source} {same}",
                    f"libnvidia-compute-580-server {same}",
                    f"nvidia-compute-utils-580-server {same}",
                ),
            ),
            Package(
                f"nvidia-headless-580-server{twin}",
                version,
                f"driver without display, {words}",
                (f"{no_dkms} {same}", f"{dkms} {same}"),
            ),
        ]
    return tuple(packages)


def _built_modules(driver: str, twin: str, binaries: Binaries) -> tuple[Package, ...]:
    """Modules that the archive built and signed for one kernel. They have the kernel's version; an upload follows each driver.

    Their dependency on the driver's common files, from its version to the one before the next, ties them together.
    """
    meta = KERNELS[BUILT_FOR].split("~")[0]
    version, kernel = meta if driver == DRIVERS_580[0] else f"{meta}+{DRIVERS_580.index(driver)}", f"{BUILT_FOR}-generic"
    objects, signatures = f"linux-objects-nvidia-580-server{twin}-{kernel}", f"linux-signatures-nvidia-{kernel}"
    common = "nvidia-kernel-common-580-server"
    scripts = {name: _DEPMOD.replace("@KERNEL@", kernel) for name in ("postinst", "postrm")}
    packages = (
        Package(objects, version, f"objects of the nvidia modules for {kernel}"),
        Package(
            f"linux-modules-nvidia-580-server{twin}-{kernel}",
            version,
            f"nvidia modules for {kernel}, signed in name only",
            (
                f"linux-image-{kernel}",
                f"{objects} (= {version})",
                f"{signatures} (= {version})",
                f"{common} (>= {driver})",
                f"{common} (<= {driver}-1)",
            ),
            ("nvidia-prebuilt-kernel",),
            ("nvidia-prebuilt-kernel",),
            {
                f"/lib/modules/{kernel}/kernel/nvidia-580srv{twin}/nvidia.ko": PackedFile(
                    signed(binaries.modules[driver, twin.removeprefix("-")])
                )
            },
            scripts,
        ),
    )
    return packages if twin else (*packages, Package(signatures, version, f"signatures of the nvidia modules for {kernel}"))


def _newer_module(driver: str, suffix: str, binaries: Binaries) -> Package:
    """DKMS package of a branch that no longer drives a V100; `suffix` ends its name."""
    words = f"{'an open' if suffix.endswith('-open') else 'a proprietary'} module that ignores a V100"
    return _dkms_package(f"nvidia-dkms{suffix}", driver + UBUNTU, words, driver, binaries)


def _renamed(driver: str, binaries: Binaries, multiarch: str) -> tuple[Package, ...]:
    """NVIDIA's packages of branch 590 and newer: no branch in their names, so they follow the newest one."""
    library, _, _ = _userspace(driver, "", binaries, multiarch)
    return (library, _newer_module(driver, "", binaries), _newer_module(driver, "-open", binaries))


def _vendor_580(driver: str, binaries: Binaries, multiarch: str) -> tuple[Package, ...]:
    """Branch 580 under the names of NVIDIA's repository for Ubuntu."""
    module = _dkms_package("nvidia-dkms-580", driver + UBUNTU, "the proprietary module", driver, binaries)
    return (*_userspace(driver, "-580", binaries, multiarch), module)


def _vendor_debian(driver: str, binaries: Binaries, multiarch: str) -> tuple[Package, ...]:
    """NVIDIA's packages for Debian: no branch in any name, so that only its pinning package keeps one."""
    version = f"{driver}-1"
    same = f"(= {version})"
    libraries = _libraries(("libnvidia-ml1", "nvidia-smi", "nvidia-persistenced"), driver, version, binaries, multiarch)
    twins = tuple(
        _dkms_package(name, version, f"the {words} module", driver, binaries)
        for name, words in (("nvidia-kernel-dkms", "proprietary"), ("nvidia-kernel-open-dkms", "open"))
    )
    needs = (*(f"{package.name} {same}" for package in libraries), f"{twins[0].name} {same} | {twins[1].name} {same}")
    return (*libraries, *twins, Package("nvidia-driver-cuda", version, "driver for computing", needs))


def _branch_595(binaries: Binaries, multiarch: str) -> tuple[Package, ...]:
    """Branch 595 under Ubuntu's names, and `nvidia-driver`, the name without a branch that follows the newest one."""
    version, packages = DRIVER_595 + UBUNTU, []
    for suffix, meta in (("-595", "nvidia-driver-595"), ("-595-server", "nvidia-headless-595-server")):
        parts = (*_userspace(DRIVER_595, suffix, binaries, multiarch), _newer_module(DRIVER_595, suffix, binaries))
        needs = tuple(f"{part.name} (= {version})" for part in (parts[0], parts[3]))
        packages += [*parts, Package(meta, version, "driver of branch 595, which ignores a V100", needs)]
    newest = Package("nvidia-driver", version, "newest driver, which ignores a V100", (f"nvidia-driver-595 (= {version})",))
    return (*packages, newest)


def _cuda() -> tuple[Package, ...]:
    toolkits = []
    for name, (version, build) in CUDA_TOOLKITS.items():
        release = name.replace("-", ".")
        nvcc = _NVCC.replace("@RELEASE@", release).replace("@BUILD@", build)
        files = {f"/usr/local/cuda-{release}/bin/nvcc": PackedFile(nvcc.encode(), 0o755)}
        toolkits.append(Package(f"cuda-toolkit-{name}", version, f"nvcc that says release {release}", files=files))
    driver = f"{DRIVERS_580[-1]}-1"
    old = _NVCC.replace("@RELEASE@", "12.0").replace("@BUILD@", "12.0.140")
    return (
        *toolkits,
        Package(
            "nvidia-cuda-toolkit",
            "12.0.140~12.0.1-4build4",
            "the distribution's own nvcc, of release 12.0",
            files={"/usr/bin/nvcc": PackedFile(old.encode(), 0o755)},
        ),
        Package("cuda", "13.0.2-1", "toolkit and newest driver", ("cuda-toolkit-13-0", "cuda-drivers")),
        Package("cuda-drivers", f"{DRIVER_595}-1", "newest driver", ("nvidia-driver-595",)),
        # The name says 580; it depends on a package without a branch in its name, and so on the newest one.
        Package("cuda-drivers-580", driver, "driver of branch 580, by name", ("nvidia-driver",)),
        Package(
            "nvidia-driver-pinning-580",
            "580-1",
            "apt preferences for branch 580",
            files={"/etc/apt/preferences.d/nvidia-driver-pinning-580": PackedFile(_PINNING.encode())},
        ),
    )


# update-initramfs makes nothing for a kernel that can't say how its initramfs may be packed.
_KERNEL_CONFIG = f"# {NOTICE}CONFIG_BLK_DEV_INITRD=y\nCONFIG_RD_GZIP=y\nCONFIG_RD_ZSTD=y\n"


def _kernels() -> tuple[Package, ...]:
    packages = []
    for release, meta in KERNELS.items():
        version, full = meta.split("~")[0], f"{release}-generic"
        notice = PackedFile(NOTICE.encode())
        scripts = {name: _KERNEL_SCRIPT.replace("@KERNEL@", full).replace("@HOOKS@", name) for name in ("postinst", "postrm")}
        packages += [
            Package(
                f"linux-modules-{full}",
                version,
                f"modules of kernel {full}",
                files={f"/lib/modules/{full}/kernel/stand-in": notice, f"/boot/config-{full}": PackedFile(_KERNEL_CONFIG.encode())},
            ),
            Package(
                f"linux-image-{full}",
                version,
                f"kernel {full}; can't boot",
                (f"linux-modules-{full} (= {version})",),
                files={f"/boot/vmlinuz-{full}": notice},
                scripts=scripts,
            ),
            Package(
                f"linux-headers-{full}",
                version,
                f"headers of kernel {full}",
                files={
                    f"/usr/src/linux-headers-{full}/Makefile": PackedFile(f"# {NOTICE}".encode()),
                    f"/lib/modules/{full}/build": PackedFile(link=f"/usr/src/linux-headers-{full}"),
                },
            ),
            Package("linux-image-generic", meta, "newest kernel", (f"linux-image-{full}",)),
            Package("linux-headers-generic", meta, "headers of the newest kernel", (f"linux-headers-{full}",)),
            Package(
                "linux-generic",
                meta,
                "newest kernel and headers",
                (f"linux-image-generic (= {meta})", f"linux-headers-generic (= {meta})"),
            ),
        ]
    return tuple(packages)


def main_packages(binaries: Binaries, multiarch: str) -> tuple[Package, ...]:
    """The stand-ins of the main repository. `multiarch` is the library folder's name, x86_64-linux-gnu."""
    return (
        *(package for driver in DRIVERS_580 for package in _server_branch(driver, binaries, multiarch)),
        *(package for driver in (DRIVER_595, DRIVER_610) for package in _renamed(driver, binaries, multiarch)),
        *_branch_595(binaries, multiarch),
        *_vendor_580(DRIVERS_580[-1], binaries, multiarch),
        *(package for driver in (*DRIVERS_580, DRIVER_595) for package in _vendor_debian(driver, binaries, multiarch)),
        Package("dkms", "3.1.8-1", "dkms status", files={"/usr/sbin/dkms": PackedFile(_DKMS.encode(), 0o755)}),
        *_cuda(),
        *_kernels(),
    )


# Where each package of the 580-server branch leads to when the branch ends.
_SUCCESSORS = {
    "nvidia-headless-580-server": "nvidia-headless-595-server",
    "nvidia-headless-no-dkms-580-server": "nvidia-headless-595-server",
    "nvidia-dkms-580-server": "nvidia-dkms-595-server",
    "nvidia-kernel-source-580-server": "nvidia-dkms-595-server",
    "nvidia-kernel-common-580-server": "nvidia-dkms-595-server",
    "libnvidia-compute-580-server": "libnvidia-compute-595-server",
    "nvidia-compute-utils-580-server": "nvidia-compute-utils-595-server",
    "nvidia-utils-580-server": "nvidia-utils-595-server",
    "nvidia-dkms-580": "nvidia-dkms",
    "libnvidia-compute-580": "libnvidia-compute",
}


def trap_packages() -> tuple[Package, ...]:
    """What an archive does when a branch ends: the pinned names live on as transitional packages of the next branch."""
    version = DRIVER_595 + UBUNTU
    return tuple(
        Package(name, version, f"transitional dummy package for {successor}", (f"{successor} (>= {version})",))
        for name, successor in _SUCCESSORS.items()
    )


# ---- building -------------------------------------------------------------------------------------------------------


def apt_source(folder: str | Path) -> str:
    """The line for sources.list that makes apt use a repository of stand-ins at `folder` (or its `trap` folder)."""
    return f"deb [trusted=yes] file:{folder} ./"


def smi_text() -> str:
    """The simulated nvidia-smi as a program of its own."""
    return f"#!/usr/bin/python3\n{SMI_SOURCE.read_text()}"


def compile_nvml(output: Path, driver: str, gcc: str = "gcc") -> None:
    """Compile the simulated libnvidia-ml.so.1 of driver version `driver` to `output`. Errors: SandboxError."""
    argv = ["-O2", "-shared", "-fPIC", "-fvisibility=hidden", f'-DDRIVER_VERSION="{driver}"', "-Wl,-soname,libnvidia-ml.so.1"]
    _gcc(gcc, [*argv, "-o", str(output), str(NVML_SOURCE)])


def folder(state: Path, gcc: str = "gcc") -> Path:
    """Where the repositories for the present sources lie; the name changes with the sources, as running hosts have it mounted."""
    return state / "packages" / _stamp(gcc)[:12]


def build(output_dir: Path, gcc: str = "gcc") -> bool:
    """Have the repositories in `output_dir`; they are built again only when what they are made from changed.

    Returns True when they were built. Root is not needed. Errors: SandboxError, with the command that installs a missing tool.
    """
    stamp = _stamp(gcc)
    if (output_dir / "stamp").exists() and (output_dir / "stamp").read_text() == stamp:
        return False
    _check_tools(gcc)
    architecture = _output(["dpkg", "--print-architecture"])
    multiarch = _output([gcc, "-print-multiarch"])
    work = output_dir / ".new"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    binaries = _compile(work, gcc)
    for folder, packages in ((work, main_packages(binaries, multiarch)), (work / "trap", trap_packages())):
        _build_repository(folder, packages, architecture)
    # Contents are exchanged, not the folder: running hosts have it mounted.
    (output_dir / "stamp").unlink(missing_ok=True)
    for name in ("pool", "trap", "Packages", "Release"):
        old = output_dir / name
        if old.is_dir():
            shutil.rmtree(old)
        (work / name).rename(old)
    shutil.rmtree(work)
    write_atomic(output_dir / "stamp", stamp)
    return True


def _stamp(gcc: str) -> str:
    digest = hashlib.sha256(gcc.encode())
    for path in (NVML_SOURCE, PERSISTENCED_SOURCE, SMI_SOURCE, MODULE_SOURCE, Path(__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest() + "\n"


def _check_tools(gcc: str) -> None:
    missing = [package for tool, package in TOOLS.items() if not shutil.which(gcc if tool == "gcc" else tool)]
    if missing:
        raise SandboxError(f"the sandbox's packages need tools that are missing: apt-get install {' '.join(missing)}")


def _output(argv: Sequence[str]) -> str:
    return run(argv, deadline_s=30, check=True).stdout.strip()


def _gcc(gcc: str, arguments: Sequence[str]) -> None:
    if not shutil.which(gcc):
        raise SandboxError(f"{gcc} is not installed, and the simulated NVML has to be compiled: apt-get install {TOOLS['gcc']}")
    done = run([gcc, *arguments], deadline_s=60)
    if not done.ok:
        raise SandboxError(f"the simulated NVML does not compile: {done.last_line()}: apt-get install {TOOLS['gcc']}")


def _compile(work: Path, gcc: str) -> Binaries:
    nvml = {}
    for driver in (*DRIVERS_580, DRIVER_595, DRIVER_610):
        library = work / f"libnvidia-ml.so.{driver}"
        compile_nvml(library, driver, gcc)
        nvml[driver] = library.read_bytes()
    program = work / "nvidia-persistenced"
    _gcc(gcc, ["-O2", "-o", str(program), str(PERSISTENCED_SOURCE), str(work / f"libnvidia-ml.so.{DRIVERS_580[-1]}")])
    modules = {}
    for driver in nvml:
        for flavour, licence in (("", "NVIDIA"), ("open", "Dual MIT/GPL")):
            module = work / "nvidia.ko"
            _gcc(gcc, ["-c", f'-DDRIVER_VERSION="{driver}"', f'-DLICENSE="{licence}"', "-o", str(module), str(MODULE_SOURCE)])
            modules[driver, flavour] = module.read_bytes()
    return Binaries(nvml, program.read_bytes(), modules)


def _build_repository(folder: Path, packages: Sequence[Package], architecture: str) -> None:
    pool = folder / "pool"
    pool.mkdir(parents=True)
    for path in (folder, pool):
        path.chmod(0o755)  # apt reads as a user of its own
    for package in packages:
        _build_package(folder / "staging", package, architecture, pool)
    index = run(["apt-ftparchive", "packages", "pool"], deadline_s=120, cwd=folder, check=True)
    write_atomic(folder / "Packages", index.stdout)
    labels = {"Origin": "laoka-sandbox", "Label": "stand-in packages", "Suite": "sandbox"}
    options = [part for name, value in labels.items() for part in ("-o", f"APT::FTPArchive::Release::{name}={value}")]
    release = run(["apt-ftparchive", *options, "release", "."], deadline_s=60, cwd=folder, check=True)
    write_atomic(folder / "Release", release.stdout)


def _build_package(staging: Path, package: Package, architecture: str, pool: Path) -> None:
    files = {f"/usr/share/doc/{package.name}/README.sandbox": PackedFile(NOTICE.encode()), **package.files}
    for name, packed in files.items():
        path = staging / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        if packed.link:
            path.symlink_to(packed.link)
        else:
            path.write_bytes(packed.content)
            path.chmod(packed.mode)
    control = staging / "DEBIAN"
    control.mkdir()
    (control / "control").write_text(control_text(package, architecture))
    conffiles = [name for name in package.files if name.startswith("/etc/")]
    if conffiles:
        (control / "conffiles").write_text("".join(f"{name}\n" for name in conffiles))
    for name, text in package.scripts.items():
        (control / name).write_text(text)
        (control / name).chmod(0o644 if name == "triggers" else 0o755)
    # dpkg-deb refuses folders that others can't read, and the umask may be tight.
    for path in (staging, *(path for path in staging.rglob("*") if path.is_dir())):
        path.chmod(0o755)
    target = pool / package.file_name(architecture)
    run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", str(staging), str(target)], deadline_s=60, check=True)
    target.chmod(0o644)
    shutil.rmtree(staging)
