"""The one loader of the catalogue: TOML rows into frozen dataclasses, every fault told in one line."""

from __future__ import annotations

import dataclasses
import datetime
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, TypeVar, Union

from laoka.catalog import toml


class CatalogError(ValueError):
    """A catalogue file that is not right; the message is one line: file, row, key, what is wrong."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """What every row of the catalogue has: a name, where its facts come from, and when that was looked at."""

    id: str
    source: str
    checked: datetime.date


R = TypeVar("R", bound=Row)

_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_text(name: str) -> str:
    """The text of a file of the catalogue as installed, such as "gpus.toml"."""
    return (resources.files("laoka.catalog") / name).read_text(encoding="utf-8")


def parse(text: str, name: str, table: str, cls: type[R]) -> tuple[R, ...]:
    """Rows `[[table]]` of a TOML text, in the file's order.

    Arguments: `name` is what an error calls the file; `cls` the dataclass of a row.
    Errors: CatalogError for a file that is not TOML, a key that is unknown or missing, a value of the wrong kind,
    an empty `source`, a date that is not one, or an `id` that stands twice.
    """
    try:
        content = toml.loads(text, name)
    except toml.TomlError as error:
        raise CatalogError(str(error)) from None
    rows = content.get(table)
    if not isinstance(rows, list) or not rows:
        raise CatalogError(f"{name}: no [[{table}]] row")
    found: dict[str, R] = {}
    for number, raw in enumerate(rows, 1):
        label = raw.get("id") if isinstance(raw, Mapping) else None
        row = build(raw, cls, f"{name}: [[{table}]] {number} ({label or 'no id'})")
        if not row.id.strip() or not row.source.strip():
            raise CatalogError(f"{name}: [[{table}]] {number} ({label}): id and source can't be empty")
        if row.id in found:
            raise CatalogError(f"{name}: [[{table}]] {number}: id {row.id} stands twice")
        found[row.id] = row
    return tuple(found.values())


def tables(text: str, name: str) -> frozenset[str]:
    """The table names of a catalogue file. Errors: CatalogError."""
    try:
        return frozenset(toml.loads(text, name))
    except toml.TomlError as error:
        raise CatalogError(str(error)) from None


def build(raw: Any, cls: type[R], where: str) -> R:
    """One row, checked against the dataclass. Errors: CatalogError that begins with `where`."""
    built: R = _build(raw, cls, where)
    return built


@cache
def load(name: str, table: str, cls: type[R]) -> tuple[R, ...]:
    """Rows of a file of the catalogue as installed, read once. Errors: CatalogError."""
    return parse(read_text(name), name, table, cls)


def by_id(rows: Iterable[R]) -> dict[str, R]:
    """Rows by their id."""
    return {row.id: row for row in rows}


def unique(rows: Iterable[Row], key: str, name: str) -> None:
    """Every value of the list `key` stands in one row only. Errors: CatalogError."""
    seen: dict[object, str] = {}
    for row in rows:
        for value in getattr(row, key):
            if value in seen:
                raise CatalogError(f"{name}: {key} {value} stands in {seen[value]} and in {row.id}")
            seen[value] = row.id


def references(rows: Iterable[Row], key: str, known: Iterable[str], name: str) -> None:
    """Every value of `key` (one name, a list of them, or None) is in `known`. Errors: CatalogError."""
    names = frozenset(known)
    for row in rows:
        value = getattr(row, key)
        wanted = () if value is None else (value,) if isinstance(value, str) else tuple(value)
        for item in wanted:
            if item not in names:
                raise CatalogError(f"{name}: {row.id}: {key} names {item}, which the catalogue does not have")


def is_sha256(value: str) -> bool:
    """Whether a text is a SHA-256 as 64 hexadecimal digits in lower case."""
    return bool(_SHA256.fullmatch(value))


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(raw: Any, cls: Any, where: str) -> Any:
    if not isinstance(raw, Mapping):
        raise CatalogError(f"{where}: is not a table")
    hints, fields = _hints(cls), {field.name: field for field in dataclasses.fields(cls)}
    for key in raw:
        if key not in fields:
            raise CatalogError(f"{where}: unknown key {key}")
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _convert(raw[name], hints[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise CatalogError(f"{where}: {name} is missing")
    return cls(**values)


def _convert(value: Any, kind: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        # TOML has no null: an absent key is None, so what is written is of the other kind.
        kinds = [arg for arg in args if arg is not type(None)]
        return _convert(value, kinds[0], where)
    if origin is Literal:
        if value not in args or isinstance(value, bool) != any(isinstance(arg, bool) for arg in args):
            raise CatalogError(f"{where}: is {value!r}, not one of {', '.join(map(str, args))}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise CatalogError(f"{where}: is {value!r}, not a list")
        return tuple(_convert(item, args[0], f"{where}[{number}]") for number, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise CatalogError(f"{where}: is {value!r}, not a table")
        return {key: _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _build(value, kind, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    # bool is an int to Python, and a date-time is a date: neither is meant by the catalogue.
    if type(value) is not kind:
        raise CatalogError(f"{where}: is {value!r}, not {getattr(kind, '__name__', kind)}")
    return value
