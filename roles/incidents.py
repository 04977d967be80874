"""Writes docs/incidents.md and its Chinese twin from the code: `python -m roles.incidents en > docs/incidents.md`."""

from __future__ import annotations

import sys

from laoka.agent.config import Config
from laoka.agent.ladder import MILD, REBOOTS, CardState, Case, ladder
from laoka.agent.signals import CLASS_OF_KIND, SEVERITY_OF_CLASS
from laoka.catalog import xids
from laoka.catalog.messages import COLON, LANGUAGES, Language, text

UNIT = Config(host="x").unit


def page(lang: Language) -> str:
    """The whole page as Markdown: every class of incident, then every Xid that a V100 can print."""
    parts = [text("incidents.head", lang), text("incidents.classes", lang)]
    for name, severity in SEVERITY_OF_CLASS.items():
        parts.append(_class(name, severity, lang))
    parts.append(text("incidents.xids", lang) + "\n\n" + _xids(lang))
    return "\n\n".join(parts) + "\n"


def _class(name: str, severity: str, lang: Language) -> str:
    values = {"bdf": "BDF", "unit": UNIT, "limit": "W"}
    signs = ", ".join(f"`{kind}`" for kind, found in CLASS_OF_KIND.items() if found == name)
    numbers = ", ".join(str(row.number) for row in xids.xids() if row.incident_class == name and row.volta)
    seen = [signs] if signs else []
    seen += [f"Xid {numbers}"] if numbers else []
    steps = told(name, "", lang)
    if any(told(name, row.action, lang) != steps for row in xids.xids() if row.incident_class == name and row.volta):
        without = f" {text('incidents.else', lang)} {steps}" if signs else ""
        steps = text("incidents.by_xid", lang) + without
    colon = COLON[lang]
    return "\n".join(
        (
            f"### {text(f'watchdog.class.{name}', lang)} (`{name}`)",
            "",
            f"- {text('incidents.severity', lang)}{colon}{text(f'incidents.severity.{severity}', lang)}",
            f"- {text('incidents.signs', lang)}{colon}{'; '.join(seen)}",
            f"- {text('incidents.cause', lang)}{colon}{text(f'watchdog.why.{name}', lang)}",
            f"- {text('incidents.watchdog', lang)}{colon}{steps}",
            f"- {text('incidents.you', lang)}{colon}{_safe(text(f'watchdog.next.{name}', lang, **values))}",
        )
    )


def told(incident_class: str, action: str, lang: Language) -> str:
    """The ladder of a class, and of the action of the Xid that it is called after, in words."""
    steps = ladder(Case("", incident_class, (CardState("0000:00:00.0"),), action=action))
    if not steps:
        return text("incidents.nothing", lang)
    words = []
    for step in steps:
        mark = "incidents.mild" if step in MILD else "incidents.reboots" if step in REBOOTS else ""
        words.append(text(f"watchdog.step.{step}", lang) + (f" ({text(mark, lang)})" if mark else ""))
    return " -> ".join(words)


def _xids(lang: Language) -> str:
    head = [text(f"incidents.column.{name}", lang) for name in ("xid", "name", "class", "watchdog", "you")]
    lines = [f"| {' | '.join(head)} |", "| --- | --- | --- | --- | --- |"]
    for row in xids.xids():
        if not row.volta:
            continue
        name = row.name if lang == "en" else row.name_zh
        you = _safe(text(f"watchdog.action.{row.action}", lang, bdf="BDF", unit=UNIT, limit="W"))
        shown = [str(row.number), name, f"`{row.incident_class}`", told(row.incident_class, row.action, lang), you]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in shown)} |")
    return "\n".join(lines)


def _safe(words: str) -> str:
    # "> /sys/..." after a line break would be a quotation, and <...> a tag.
    return words.replace("<", "&lt;")


if __name__ == "__main__":
    chosen = sys.argv[1] if len(sys.argv) > 1 else "en"
    print(page(next(lang for lang in LANGUAGES if lang == chosen)), end="")
