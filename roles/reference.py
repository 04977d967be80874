"""Writes docs/inventory.md from the types of the settings: `python -m roles.reference > docs/inventory.md`;
with `keys`, the names alone: `python -m roles.reference keys > laoka/fleet/inventory_keys.txt`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap

from roles.registry import ALL_SETTINGS
from roles.settings import RoleSettings

HEAD = """\
# Inventory keys

Every key that laoka reads from an inventory, by role. Generated from the types of the settings; do not edit it by hand.

A key stands in a host's data, its group's data, or `inventories/group_data/`; the host's own wins. Besides these, keys of
pyinfra itself are allowed (`ssh_hostname`, `ssh_user`, `ssh_key`, `ssh_config_file`, `_sudo`, ...). Anything else stops the
run before anything changes; `laoka plan` and `laoka lock` refuse it, the commands that look at hosts tell it and go on.
"""


def documented(cls: type[RoleSettings]) -> dict[str, tuple[str, str, str]]:
    """Of each field: its type as written, its default as written, and the text below it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, tuple[str, str, str]] = {}
    for item, after in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            about = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                about = " ".join(str(after.value.value).split())
            value = item.value
            if isinstance(value, ast.Call) and ast.unparse(value.func) == "Field":
                value = value.args[0] if value.args else None  # the rest are limits
            default = "" if value is None else ast.unparse(value)
            found[item.target.id] = (ast.unparse(item.annotation), default, about)
    return found


def page() -> str:
    """The whole page as Markdown."""
    parts = [HEAD]
    for cls in ALL_SETTINGS:
        parts.append(f"\n## {(cls.__doc__ or '').splitlines()[0].removeprefix('Settings of ').rstrip('.').capitalize()}\n")
        parts.append("| key | type | default | what it is |\n| --- | --- | --- | --- |")
        for key, cells in documented(cls).items():
            kind, default, about = (cell.replace("|", "\\|") for cell in cells)
            parts.append(f"| `{key}` | `{kind}` | `{default}` | {about} |")
    return "\n".join(parts) + "\n"


def keys() -> str:
    """The names of all keys, one a line, for an installed laoka, which has no roles."""
    return "".join(f"{key}\n" for key in sorted(key for cls in ALL_SETTINGS for key in cls.model_fields))


if __name__ == "__main__":
    print(keys() if sys.argv[1:] == ["keys"] else page(), end="")
