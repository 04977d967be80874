"""Installs one pinned release of an engine into an environment of its own, beside the one that runs, and proves it.

Run on the host: `python -m laoka.serving.engine_install --pin JSON`. The environment counts only when its stamp is written, last of
all; what fails before leaves nothing but the fetched wheel. Switching to it is another step (laoka.serving.switch).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from laoka.files import write_atomic
from laoka.process import Completed, run
from laoka.serving.engine_pin import CURRENT, ENGINES, RECORD, STAMP, EngineError, EnginePin, folder_of, parse_pin
from laoka.serving.engine_wheel import Places, have_wheel
from laoka.serving.kernels import Folder, Proof, Wheel, prove, prove_live

Say = Callable[[str], None]

HINT = re.compile(r"(\[notice\]|WARNING|hint:|To fix this|\d\. |ERROR: ResolutionImpossible)")
"""Lines of an installer that say nothing about what went wrong."""
WHEELS = Path("/var/cache/laoka/engines")
UV_HOME = Path("/opt/laoka/uv")
INSTALL_DEADLINE_S = 3 * 3600
SEPARATE_ATTENTION = ("flash_attn_v100", "flash-attn-v100")
"""Both spellings name one distribution for pip; people install it under either, and it overwrites the bundled module."""


@dataclass(frozen=True)
class Options:
    """How to install. `house` is a folder of wheels: what lies there is not downloaded, and what is downloaded is kept there; None
    keeps the engine's own wheel only. `python` is what the environment is made with, None finds one of the pinned versions.

    `torch_index` is an index of torch's builds, None takes them from the package index (or, by uv, from where torch publishes
    them); `python_mirror` is where uv takes a Python from that the system does not have.
    """

    engines: Path = ENGINES
    house: Path | None = None
    places: Places = field(default_factory=Places)
    python: str | None = None
    torch_index: str | None = None
    python_mirror: str | None = None
    live: bool | None = None
    """Whether the kernels are imported with the card; None: when the host has one."""


def install(pin: EnginePin, options: Options, say: Say = lambda line: None) -> Path:
    """Have the environment of a pinned release, whole and proven; returns its folder.

    Errors: EngineError, with nothing left of the environment; the engine that runs is not touched.
    """
    folder = folder_of(pin.name, pin.version, options.engines)
    if stamp_of(folder) == pin.stamp:
        return folder
    if folder.exists() and in_use(folder, options.engines):
        raise EngineError(
            f"{folder} is the engine that {options.engines / CURRENT} points to, and it was made from another wheel "
            f"({stamp_of(folder) or 'no stamp'}): switch to another version first, then install this one again"
        )
    check_glibc(pin, host_glibc())
    wheel, source = have_wheel(pin, options.house or WHEELS, options.places, say)
    proof = prove_wheel(wheel, pin)
    say(f"{wheel.name}: SHA-256 is the pinned one{_told(proof)}")
    python = find_python(pin, options)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        installer = make_environment(folder, python, pin, options, say)
        fill_environment(folder, wheel, pin, options, installer, say)
        proof = prove_environment(folder, pin)
        live = _live(folder, pin, options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    record = {
        "name": pin.name, "version": pin.version, "wheel": pin.wheel_file, "wheel_sha256": pin.wheel_sha256, "source": source,
        "installer": installer, "kernels": proof.table(), "live": live,
    }  # fmt: skip
    write_atomic(folder / RECORD, json.dumps(record, indent=1, sort_keys=True) + "\n")
    os.sync()
    write_atomic(folder / STAMP, f"{pin.stamp}\n")
    say(f"{folder}: {pin.pin} is ready{_told(proof)}")
    return folder


def _told(proof: Proof) -> str:
    if proof.kind != "sm70":
        return ""
    return f"; DFlash2's kernels are in it (the verifier takes {proof.verifier_width} query tokens)"


def stamp_of(folder: Path) -> str | None:
    """What a finished environment was made from; None for one that is not there or not finished."""
    try:
        return (folder / STAMP).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def in_use(folder: Path, engines: Path) -> bool:
    """Whether the link `current` points to this folder."""
    link = engines / CURRENT
    return link.is_symlink() and link.resolve() == folder.resolve()


# ---- what the host has --------------------------------------------------------------------------------------------------


def host_glibc() -> str | None:
    """The glibc of this host, "2.36"; None when it can't be told."""
    try:
        told = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return None
    return told.split()[-1] if told else None


def check_glibc(pin: EnginePin, glibc: str | None) -> None:
    """Errors: EngineError when the host's glibc is older than the engine's libraries ask for."""
    if pin.glibc_min is not None and glibc is not None and _numbers(glibc) < _numbers(pin.glibc_min):
        raise EngineError(
            f"{pin.pin} needs glibc {pin.glibc_min}, this host has {glibc} (its libraries would not load: version `GLIBC_"
            f"{pin.glibc_min}' not found): take ReVolta (glibc 2.34), a newer release of the system, or the container"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def find_python(pin: EnginePin, options: Options) -> str:
    """The Python to make the environment with: a path, or a version that uv is asked for.

    Errors: EngineError when the one that was named is not of a pinned version.
    """
    if options.python is not None:
        seen = python_version(options.python)
        if seen is None:
            raise EngineError(f"engine_python {options.python}: there is no such Python on this host")
        if pin.python and seen not in pin.python:
            raise EngineError(f"{pin.pin} runs on CPython {', '.join(pin.python)}; engine_python {options.python} is {seen}")
        return options.python
    for candidate in (*(f"python{version}" for version in reversed(pin.python)), "python3"):
        if not pin.python or python_version(candidate) in pin.python:
            return candidate
    # The newest that every release of these engines has run on; uv brings it.
    return "3.12" if "3.12" in pin.python else pin.python[-1]


def python_version(command: str) -> str | None:
    """The version of a Python on this host, "3.12"; None when there is none, or it can't make environments."""
    script = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    done = run([command, "-c", script], deadline_s=30)
    return done.stdout.strip() if done.ok else None


# ---- the environment ----------------------------------------------------------------------------------------------------


def make_environment(folder: Path, python: str, pin: EnginePin, options: Options, say: Say) -> str:
    """An empty environment; returns what fills it, "uv" or "pip". uv is used where it is, and where only it can bring a Python.

    Errors: EngineError.
    """
    foreign = re.fullmatch(r"3\.\d+", python) is not None
    uv = shutil.which("uv")
    if uv is None and foreign:
        say(f"no Python {python} on this host: fetching uv, which brings one")
        uv = str(get_uv())
    folder.parent.mkdir(parents=True, exist_ok=True)
    if uv is not None:
        env = {"UV_PYTHON_INSTALL_DIR": "/opt/laoka/python"}
        if options.python_mirror:
            env["UV_PYTHON_INSTALL_MIRROR"] = options.python_mirror
        argv = [uv, "venv", "--quiet", "--seed", "--python", python, str(folder)]
        _done(run(argv, deadline_s=1800, env=env), f"{pin.pin}: no environment with Python {python}")
        return "uv"
    _done(run([python, "-m", "venv", str(folder)], deadline_s=300), f"{pin.pin}: no environment with {python}")
    return "pip"


def get_uv() -> Path:
    """uv in an environment of its own, fetched by pip unless it is there. Errors: EngineError."""
    uv = UV_HOME / "bin" / "uv"
    if not uv.is_file():
        shutil.rmtree(UV_HOME, ignore_errors=True)
        _done(run(["python3", "-m", "venv", str(UV_HOME)], deadline_s=300), "no environment for uv")
        _done(run([str(UV_HOME / "bin" / "pip"), "install", "-q", "uv"], deadline_s=1800), "uv can't be fetched")
    return uv


def constraints_of(pin: EnginePin) -> str:
    """The versions that the environment is held to, one a line."""
    torch = (f"torch=={pin.torch}",) if pin.torch else ()
    return "".join(f"{line}\n" for line in (*torch, *pin.pins))


def install_commands(folder: Path, wheel: Path, pin: EnginePin, options: Options, uv: str | None) -> tuple[tuple[str, ...], ...]:
    """Ways to put a wheel and what it needs into an environment, to be tried in order until one does. Pure.

    The wheel is named with its hash, so that the installer checks it once more. With a folder of wheels the first way needs no
    network; pip then fills the folder and tries again, uv has its own cache and fetches what the folder does not have.
    """
    named = f"{_distribution(pin)} @ {wheel.as_uri()}#sha256={pin.wheel_sha256}"
    python = str(folder / "bin" / "python")
    held = ("-c", str(folder / "laoka-constraints.txt"))
    house = ("--find-links", str(options.house)) if options.house is not None else ()
    if uv is not None:
        torch: tuple[str, ...] = ("--torch-backend", "cpu") if pin.torch_backend == "cpu" else ()
        torch = ("--index", options.torch_index) if options.torch_index else torch
        base = (uv, "pip", "install", "--quiet", "--python", python, *held, *house)
        offline = ((*base, "--no-index", named),) if house else ()
        return (*offline, (*base, *torch, named))
    torch = ("--extra-index-url", options.torch_index) if options.torch_index else ()
    pip = (python, "-m", "pip")
    if options.house is None:
        return ((*pip, "install", "--no-input", "--progress-bar", "off", *held, *torch, named),)
    local = (*pip, "install", "--no-input", "--progress-bar", "off", "--no-index", *held, *house, named)
    lock = ("flock", str(options.house / ".lock"))
    return (
        local,
        (*lock, *pip, "download", "--no-input", "--progress-bar", "off", "-d", str(options.house), *held, *house, *torch, named),
        local,
    )


def _distribution(pin: EnginePin) -> str:
    """The distribution's name as the wheel's file name has it."""
    return pin.wheel_file.split("-", 1)[0].replace("_", "-")


def fill_environment(folder: Path, wheel: Path, pin: EnginePin, options: Options, installer: str, say: Say) -> None:
    """Put the wheel and what it needs into the environment, then mend what its requirements bring wrong. Errors: EngineError."""
    write_atomic(folder / "laoka-constraints.txt", constraints_of(pin))
    uv = (shutil.which("uv") or str(UV_HOME / "bin" / "uv")) if installer == "uv" else None
    if pin.kernels == "sm70":
        _uninstall(folder, SEPARATE_ATTENTION, uv)
    say(f"{pin.pin}: installing it and what it needs with {installer}")
    last = _first_that_does(install_commands(folder, wheel, pin, options, uv))
    if not last.ok and uv is None and pin.torch_backend == "cpu":
        # torch's CPU builds are in no package index; uv knows where they are.
        say("pip does not find torch's CPU build: fetching uv, which does")
        uv = str(get_uv())
        last = _first_that_does(install_commands(folder, wheel, pin, options, uv))
    _done(last, f"{pin.pin}: installing failed")
    if pin.remove_after_install:
        _uninstall(folder, pin.remove_after_install, uv)
    if pin.dist_info_alias:
        add_alias(site_packages(folder), pin.dist_info_alias)
    python = str(folder / "bin" / "python")
    if pin.device == "cpu":
        # The import that fails when a library or torch's build is wrong: better here than at the first start.
        _done(run([python, "-c", "import torch, vllm._C"], deadline_s=600, cwd="/"), f"{pin.pin} can't be imported")
    _done(run([str(folder / "bin" / "vllm"), "--version"], deadline_s=600, cwd="/"), f"{pin.pin}: its command does not run")


def _first_that_does(ways: Sequence[Sequence[str]]) -> Completed:
    """Run commands in order until an installation worked; a download only prepares the next one."""
    env = _installer_env(os.environ)
    for argv in ways:
        done = run(argv, deadline_s=INSTALL_DEADLINE_S, env=env, cwd="/")
        if done.ok and "download" not in argv:
            break
        if not done.ok and "download" in argv:
            break  # what is missing can't be had: that says more than the next failure
    return done


def _uninstall(folder: Path, names: Sequence[str], uv: str | None) -> None:
    """Take distributions out of an environment; what is not there is no failure."""
    python = str(folder / "bin" / "python")
    pip = [uv, "pip", "uninstall", "--quiet", "--python", python] if uv else [python, "-m", "pip", "uninstall", "-q", "-y"]
    run([*pip, *names], deadline_s=300, cwd="/")


def _installer_env(env: Mapping[str, str]) -> dict[str, str]:
    """What uv is told of pip's settings, which it does not read: the mirror and the cache."""
    found = {"UV_HTTP_TIMEOUT": "120", "UV_LINK_MODE": "copy", "PYTHONNOUSERSITE": "1"}
    if env.get("PIP_INDEX_URL"):
        found["UV_DEFAULT_INDEX"] = env["PIP_INDEX_URL"]
    if env.get("PIP_CACHE_DIR"):
        found["UV_CACHE_DIR"] = f"{env['PIP_CACHE_DIR']}/uv"
    return found


def site_packages(folder: Path) -> Path:
    """The site-packages of an environment. Errors: EngineError when it has none."""
    found = sorted(folder.glob("lib/python3*/site-packages"))
    if not found:
        raise EngineError(f"{folder}: no site-packages: not an environment")
    return found[0]


def add_alias(site: Path, requirement: str) -> None:
    """Add the metadata of a distribution that the engine's command line asks for: "vllm==0.32.0+cpu"."""
    name, _, version = requirement.partition("==")
    text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    write_atomic(site / f"{name}-{version}.dist-info" / "METADATA", text)


def _done(completed: Completed, complaint: str) -> None:
    if not completed.ok:
        # pip tells the cause of a conflict among what it does, the rest on stderr.
        cause = completed.stdout.partition("The conflict is caused by:")[2].partition("To fix this")[0]
        said = f"{cause}\n{completed.stderr}" if completed.stderr.strip() else completed.stdout
        lines = [line.strip() for line in said.splitlines() if line.strip() and not HINT.match(line.strip())]
        why = " ".join(lines[-6:])[-500:] or completed.last_line()
        raise EngineError(f"{complaint}: {'it took too long' if completed.timed_out else why}")


# ---- proof --------------------------------------------------------------------------------------------------------------


def prove_wheel(wheel: Path, pin: EnginePin) -> Proof:
    """The kernels by the wheel alone, before anything is installed. Errors: EngineError that names what is missing."""
    try:
        return _judged(prove(Wheel(wheel), pin.kernels, pin.version), pin, str(wheel))
    except (zipfile.BadZipFile, OSError, KeyError) as error:
        raise EngineError(f"{wheel}: not a wheel, or damaged: {error}") from None


def prove_environment(folder: Path, pin: EnginePin) -> Proof:
    """The kernels by the files of an environment. Errors: EngineError that names what is missing."""
    return _judged(prove(Folder(site_packages(folder)), pin.kernels, pin.version), pin, str(folder))


def _judged(proof: Proof, pin: EnginePin, where: str) -> Proof:
    if not proof.ok:
        raise EngineError(f"{where}: {pin.pin} is not what it should be, so nothing was switched: {'; '.join(proof.faults)}")
    return proof


def _live(folder: Path, pin: EnginePin, options: Options) -> dict[str, object] | None:
    """What importing the kernels with the card shows; None where there is no card. Errors: EngineError."""
    wanted = options.live if options.live is not None else Path("/dev/nvidiactl").exists()
    if not wanted or pin.kernels == "none":
        return None
    told, faults = prove_live(folder / "bin" / "python", pin.kernels)
    if faults:
        raise EngineError(f"{folder}: {pin.pin} does not work with this host's card, so nothing was switched: {'; '.join(faults)}")
    return told


# ---- the command --------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 there and proven, 1 not."""
    parser = argparse.ArgumentParser(prog="python -m laoka.serving.engine_install", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pin", required=True, help="the pin as JSON")
    parser.add_argument("--engines", type=Path, default=ENGINES)
    parser.add_argument("--wheelhouse", type=Path, help=f"folder of wheels on this host [{WHEELS} for the engine's own]")
    parser.add_argument("--mirror", help="a web folder with the wheel and SHA256SUMS")
    parser.add_argument("--index", help="package index")
    parser.add_argument("--torch-index", help="index of torch's builds")
    parser.add_argument("--python", help="Python to make the environment with")
    parser.add_argument("--python-mirror", help="where uv takes a Python from")
    parser.add_argument(
        "--only-wheel", action="store_true", help="fetch the wheel, check its hash and its kernels; install nothing"
    )
    words = parser.parse_args(argv)
    places = Places(words.mirror, words.index)
    options = Options(words.engines, words.wheelhouse, places, words.python, words.torch_index, words.python_mirror)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        pin = parse_pin(words.pin)
        if words.only_wheel:
            wheel, source = have_wheel(pin, options.house or WHEELS, places, say)
            told = {"wheel": str(wheel), "sha256": pin.wheel_sha256, "source": source, "kernels": prove_wheel(wheel, pin).table()}
            print(json.dumps(told, sort_keys=True))
        else:
            print(install(pin, options, say))
    except (EngineError, OSError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
