"""The capture file: a gzipped tar with a manifest and the probe's text, made so that the same host gives the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import zlib

GZIP_MAGIC = b"\x1f\x8b"
MANIFEST, PROBE = "manifest.json", "probe.txt"
FORMAT = "laoka-capture"
FORMAT_VERSION = 1
CAPTURE_SUFFIXES = (".tar.gz", ".tgz", ".probe.txt", ".txt")
"""How a capture, or a saved probe, is called."""
MAX_PROBE_BYTES = 64 * 1024 * 1024


def is_bundle(data: bytes) -> bool:
    """True when it looks like a capture rather than plain text."""
    return data.startswith(GZIP_MAGIC)


def write_bundle(probe_text: str, manifest: dict[str, object]) -> bytes:
    """The bundle's bytes; the format, its version and the SHA-256 of the text are added to the manifest."""
    body = probe_text.encode()
    told = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        **manifest,
        "files": {PROBE: {"size_bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}},
    }
    stream = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=stream, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive,
    ):
        for name, data in ((MANIFEST, json.dumps(told, indent=2, sort_keys=True).encode() + b"\n"), (PROBE, body)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def read_bundle(data: bytes) -> str:
    """The probe's text out of a bundle. Errors: ValueError, one line, when it is none, damaged or of a newer format."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            plain = packed.read(MAX_PROBE_BYTES + 1)
        if len(plain) > MAX_PROBE_BYTES:
            raise ValueError("larger than a capture can be")
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as archive:
            parts = {name: _member(archive, name) for name in (MANIFEST, PROBE)}
        manifest = json.loads(parts[MANIFEST])
        if manifest.get("format") != FORMAT:
            raise ValueError("not a laoka capture")
        if manifest.get("version") != FORMAT_VERSION:
            raise ValueError(f"capture format {manifest.get('version')} is not known here (known: {FORMAT_VERSION})")
        if hashlib.sha256(parts[PROBE]).hexdigest() != manifest["files"][PROBE]["sha256"]:
            raise ValueError("damaged: the probe's text does not have the SHA-256 that the manifest says")
    except (
        OSError,
        EOFError,
        zlib.error,
        tarfile.TarError,
        KeyError,
        UnicodeDecodeError,
        TypeError,
        AttributeError,
        json.JSONDecodeError,
    ) as error:
        raise ValueError(f"not a laoka capture ({type(error).__name__}: {' '.join(str(error).split())})") from None
    return parts[PROBE].decode(errors="replace")


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    stream = archive.extractfile(name)
    if stream is None:
        raise KeyError(name)
    return stream.read()
