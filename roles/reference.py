"""The page of inventory keys in docs/ (docs/generate.py writes it), from the types of the settings;
`python -m roles.reference > laoka/fleet/inventory_keys.txt` prints the names alone.
"""

from __future__ import annotations

import ast
import inspect
import textwrap

from laoka.catalog.messages import Language
from laoka.catalog.translations import chinese
from roles.registry import ALL_SETTINGS
from roles.settings import RoleSettings

HEAD: dict[Language, str] = {
    "en": """\
# Inventory keys

Every key that laoka reads from an inventory, by role. Generated from the types of the settings; do not edit it by hand.

A key stands in a host's data, its group's data, or `inventories/group_data/`; the host's own wins. Besides these, keys of
pyinfra itself are allowed (`ssh_hostname`, `ssh_user`, `ssh_key`, `ssh_config_file`, `_sudo`, ...). Anything else stops the
run before anything changes; `laoka plan` and `laoka lock` refuse it, the commands that look at hosts tell it and go on.
""",
    "zh": """\
# 清单的键

laoka 从清单读取的全部键，按角色排列。由各设置的类型生成，请勿手工修改。

键可以写在主机的数据、组的数据，或 `inventories/group_data/` 里；主机自己的优先。此外还可以写 pyinfra 自己的键
（`ssh_hostname`、`ssh_user`、`ssh_key`、`ssh_config_file`、`_sudo` 等）。其他任何键都会让运行在改动之前停下；
`laoka plan` 和 `laoka lock` 会拒绝，只看主机的命令会指出并继续。
""",
}
COLUMNS: dict[Language, str] = {"en": "| key | type | default | what it is |", "zh": "| 键 | 类型 | 默认值 | 含义 |"}


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


def heading(cls: type[RoleSettings]) -> str:
    """The first line of a role's settings, which names the role."""
    return (cls.__doc__ or "").splitlines()[0]


def page(lang: Language) -> str:
    """The whole page as Markdown."""
    parts = [HEAD[lang]]
    for cls in ALL_SETTINGS:
        of_role = heading(cls).removeprefix("Settings of ").rstrip(".")
        parts.append(f"\n## {chinese('keys', heading(cls)) if lang == 'zh' else of_role[0].upper() + of_role[1:]}\n")
        parts.append(f"{COLUMNS[lang]}\n| --- | --- | --- | --- |")
        for key, (kind, default, about) in documented(cls).items():
            cells = (f"`{key}`", f"`{kind}`", f"`{default}`", chinese("keys", about) if lang == "zh" else about)
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(parts) + "\n"


def keys() -> str:
    """The names of all keys, one a line, for an installed laoka, which has no roles."""
    return "".join(f"{key}\n" for key in sorted(key for cls in ALL_SETTINGS for key in cls.model_fields))


if __name__ == "__main__":
    print(keys(), end="")
