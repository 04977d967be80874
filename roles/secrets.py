"""Secrets that an inventory only names: in a file, in the environment, or in a file that sops has encrypted.

`env:NAME` is a variable of pyinfra's environment; `sops:FILE#KEY` one value of a file that `sops` can decrypt on the operator's
machine (KEY may lead into tables: `alerts.wecom`), `sops:FILE` the whole of one. Read when a deploy runs, never printed.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from laoka.process import run

SOPS_DEADLINE_S = 60
"""sops may ask a key service on the net."""
REFERENCES = ("env:", "sops:")


def secret(value: str) -> str:
    """What a value stands for: @FILE, env:NAME, sops:FILE#KEY, or itself. Errors: ValueError with what to do."""
    if value.startswith("@"):
        return _read(Path(value[1:]).expanduser(), "a value that begins with @ names a file on your machine")
    return _referred(value) if value.startswith(REFERENCES) else value


def secret_file(value: str) -> str:
    """The content of a setting that names a file: that file's, or what env:NAME or sops:FILE stands for.

    Errors: ValueError with what to do.
    """
    return _referred(value) if value.startswith(REFERENCES) else _read(Path(value).expanduser(), "it is a file on your machine")


def _read(path: Path, about: str) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: {about}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not UTF-8") from None


def _referred(value: str) -> str:
    kind, _, name = value.partition(":")
    if kind == "sops":
        file, _, key = name.partition("#")
        return _decrypted(str(Path(file).expanduser()), key)
    found = os.environ.get(name, "").strip()
    if not found:
        raise ValueError(f"{value}: the environment of this run has no {name}: export it before pyinfra")
    return found


@cache
def _decrypted(file: str, key: str) -> str:
    """Once a run, not once a host: sops may ask for a passphrase or a hardware key."""
    if not Path(file).is_file():
        raise ValueError(f"sops:{file}: there is no such file on this machine")
    extract = ("--extract", "".join(f'["{part}"]' for part in key.split("."))) if key else ()
    done = run(["sops", "--decrypt", *extract, file], deadline_s=SOPS_DEADLINE_S)
    if done.status == 127:
        raise ValueError(f"sops:{file}: sops is not installed on this machine: install it, or name a file or env:NAME instead")
    if not done.ok or not done.stdout.strip():
        # sops 3.11 says what failed in its first line, and ends with advice in a paragraph.
        said = next((line.strip() for line in done.stderr.splitlines() if line.strip()), "it is empty")
        reason = f"no answer in {SOPS_DEADLINE_S} s" if done.timed_out else said
        raise ValueError(f"sops:{file}{'#' if key else ''}{key}: sops could not decrypt it: {reason}")
    return done.stdout.strip()
