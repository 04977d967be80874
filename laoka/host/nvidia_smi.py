"""nvidia-smi's output in all its forms: XML, `-q`, the query CSV, the table, `nvlink -s`, and what it says when it fails."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from dataclasses import dataclass, field

from laoka.host.pci_address import normal
from laoka.host.unread import Maybe, Unread

NOT_SHOWN = Unread("not in nvidia-smi's output")

# What nvidia-smi prints instead of a value, with or without brackets.
_NO_VALUE = re.compile(
    r"\[?(N/A|Not Supported|Unknown Error|ERR!|GPU is lost|Insufficient Permissions|No permission|GPU requires reset"
    r"|Requested functionality has been deprecated|Not Found)\]?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class EccCounts:
    """Corrected (single-bit) and uncorrected (double-bit) errors: since the driver was loaded, and of the card's life."""

    volatile_corrected: Maybe[int]
    volatile_uncorrected: Maybe[int]
    aggregate_corrected: Maybe[int]
    aggregate_uncorrected: Maybe[int]


@dataclass(frozen=True)
class SmiGpu:
    """One card as nvidia-smi shows it. Everything may be Unread: "N/A", "ERR!" and the like keep their words as reason."""

    address: str | None
    name: Maybe[str]
    device_id: Maybe[int]
    uuid: Maybe[str]
    serial: Maybe[str]
    vbios_version: Maybe[str]
    persistence_mode: Maybe[bool]
    bar1_total_mib: Maybe[int]
    memory_total_mib: Maybe[int]
    memory_used_mib: Maybe[int]
    link_gen: Maybe[int]
    link_gen_max: Maybe[int]
    link_width: Maybe[int]
    link_width_max: Maybe[int]
    replay_count: Maybe[int]
    performance_state: Maybe[str]
    throttle_reasons: Maybe[tuple[str, ...]]
    compute_mode: Maybe[str]
    gpu_utilization_percent: Maybe[int]
    ecc_enabled: Maybe[bool]
    ecc_enabled_next: Maybe[bool]
    ecc: EccCounts
    retired_pages_single_bit: Maybe[int]
    retired_pages_double_bit: Maybe[int]
    retired_pages_pending: Maybe[bool]
    remapping_pending: Maybe[bool]
    remapping_failed: Maybe[bool]
    core_temperature_c: Maybe[int]
    memory_temperature_c: Maybe[int]
    shutdown_temperature_c: Maybe[int]
    slowdown_temperature_c: Maybe[int]
    max_core_temperature_c: Maybe[int]
    max_memory_temperature_c: Maybe[int]
    power_draw_w: Maybe[float]
    power_limit_w: Maybe[float]
    power_limit_default_w: Maybe[float]
    power_limit_max_w: Maybe[float]
    sm_clock_mhz: Maybe[int]
    sm_clock_max_mhz: Maybe[int]
    recovery_action: Maybe[str]


@dataclass(frozen=True)
class LostHandle:
    """`Unable to determine the device handle for GPU...`: `index` and `address` as far as the words name them."""

    index: int | None
    address: str | None
    reason: str


@dataclass(frozen=True)
class Trouble:
    """What nvidia-smi said went wrong, on either stream: it may still end with status 0."""

    lost: tuple[LostHandle, ...] = ()
    version_mismatch: bool = False
    no_devices: bool = False
    cannot_reach_driver: bool = False
    error_cells: int = 0


@dataclass(frozen=True)
class Smi:
    """A full listing (`-q` or `-q -x`). `attached_gpus` is nvidia-smi's own count."""

    driver_version: Maybe[str]
    cuda_version: Maybe[str]
    attached_gpus: Maybe[int]
    gpus: tuple[SmiGpu, ...]
    trouble: Trouble = field(default_factory=Trouble)


# ------------------------------------------------------------------------------------------------ the two listings

Flat = Mapping[str, str]

# Where each field is: paths in the XML (they moved between driver branches), then in `-q` (marked by a leading =).
_PATHS: dict[str, tuple[str, ...]] = {
    "name": ("product_name", "=product name"),
    "device_id": ("pci/pci_device_id", "=pci/device id"),
    "uuid": ("uuid", "=gpu uuid"),
    "serial": ("serial", "=serial number"),
    "vbios_version": ("vbios_version", "=vbios version"),
    "persistence_mode": ("persistence_mode", "=persistence mode"),
    "bar1_total_mib": ("bar1_memory_usage/total", "=bar1 memory usage/total"),
    "memory_total_mib": ("fb_memory_usage/total", "=fb memory usage/total"),
    "memory_used_mib": ("fb_memory_usage/used", "=fb memory usage/used"),
    "link_gen": ("pci/pci_gpu_link_info/pcie_gen/current_link_gen", "=pci/gpu link info/pcie generation/current"),
    "link_gen_max": ("pci/pci_gpu_link_info/pcie_gen/max_link_gen", "=pci/gpu link info/pcie generation/max"),
    "link_width": ("pci/pci_gpu_link_info/link_widths/current_link_width", "=pci/gpu link info/link width/current"),
    "link_width_max": ("pci/pci_gpu_link_info/link_widths/max_link_width", "=pci/gpu link info/link width/max"),
    "replay_count": ("pci/replay_counter", "=pci/replays since reset"),
    "performance_state": ("performance_state", "=performance state"),
    "compute_mode": ("compute_mode", "=compute mode"),
    "gpu_utilization_percent": ("utilization/gpu_util", "=utilization/gpu"),
    "ecc_enabled": ("ecc_mode/current_ecc", "=ecc mode/current"),
    "ecc_enabled_next": ("ecc_mode/pending_ecc", "=ecc mode/pending"),
    "volatile_corrected": (
        "ecc_errors/volatile/single_bit/total",
        "ecc_errors/volatile/dram_correctable",
        "=ecc errors/volatile/single bit/total",
        "=ecc errors/volatile/dram correctable",
    ),
    "volatile_uncorrected": (
        "ecc_errors/volatile/double_bit/total",
        "ecc_errors/volatile/dram_uncorrectable",
        "=ecc errors/volatile/double bit/total",
        "=ecc errors/volatile/dram uncorrectable",
    ),
    "aggregate_corrected": (
        "ecc_errors/aggregate/single_bit/total",
        "ecc_errors/aggregate/dram_correctable",
        "=ecc errors/aggregate/single bit/total",
        "=ecc errors/aggregate/dram correctable",
    ),
    "aggregate_uncorrected": (
        "ecc_errors/aggregate/double_bit/total",
        "ecc_errors/aggregate/dram_uncorrectable",
        "=ecc errors/aggregate/double bit/total",
        "=ecc errors/aggregate/dram uncorrectable",
    ),
    "retired_pages_single_bit": (
        "retired_pages/multiple_single_bit_retirement/retired_count",
        "=retired pages/single bit ecc",
    ),
    "retired_pages_double_bit": ("retired_pages/double_bit_retirement/retired_count", "=retired pages/double bit ecc"),
    "retired_pages_pending": (
        "retired_pages/pending_retirement",
        "retired_pages/pending_blacklist",
        "=retired pages/pending page blacklist",
        "=retired pages/pending",
    ),
    "remapping_pending": ("remapped_rows/remapped_row_pending", "=remapped rows/pending"),
    "remapping_failed": ("remapped_rows/remapped_row_failure", "=remapped rows/remapping failure occurred"),
    "core_temperature_c": ("temperature/gpu_temp", "=temperature/gpu current temp"),
    "memory_temperature_c": ("temperature/memory_temp", "=temperature/memory current temp"),
    "shutdown_temperature_c": ("temperature/gpu_temp_max_threshold", "=temperature/gpu shutdown temp"),
    "slowdown_temperature_c": ("temperature/gpu_temp_slow_threshold", "=temperature/gpu slowdown temp"),
    "max_core_temperature_c": ("temperature/gpu_temp_max_gpu_threshold", "=temperature/gpu max operating temp"),
    "max_memory_temperature_c": ("temperature/gpu_temp_max_mem_threshold", "=temperature/memory max operating temp"),
    "power_draw_w": (
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/power_draw",
        "gpu_power_readings/average_power_draw",
        "power_readings/power_draw",
        "=gpu power readings/instantaneous power draw",
        "=gpu power readings/power draw",
        "=gpu power readings/average power draw",
        "=power readings/power draw",
    ),
    "power_limit_w": (
        "gpu_power_readings/current_power_limit",
        "power_readings/enforced_power_limit",
        "power_readings/power_limit",
        "=gpu power readings/current power limit",
        "=power readings/enforced power limit",
        "=power readings/power limit",
    ),
    "power_limit_default_w": (
        "gpu_power_readings/default_power_limit",
        "power_readings/default_power_limit",
        "=gpu power readings/default power limit",
        "=power readings/default power limit",
    ),
    "power_limit_max_w": (
        "gpu_power_readings/max_power_limit",
        "power_readings/max_power_limit",
        "=gpu power readings/max power limit",
        "=power readings/max power limit",
    ),
    "sm_clock_mhz": ("clocks/sm_clock", "=clocks/sm"),
    "sm_clock_max_mhz": ("max_clocks/sm_clock", "=max clocks/sm"),
    "recovery_action": ("gpu_recovery_action", "=gpu recovery action"),
}


def read_xml(text: str, stderr: str = "") -> Maybe[Smi]:
    """`nvidia-smi -q -x`. Unread when it is not that, or was cut off. Arguments: `stderr` what it printed there."""
    start = text.find("<?xml")
    body = text[start if start >= 0 else text.find("<nvidia_smi_log") :]
    if "<nvidia_smi_log" not in body:
        trouble = read_trouble(text + "\n" + stderr)
        return Unread(_trouble_words(trouble, text + stderr))
    if "<!ENTITY" in body:
        return Unread("XML with entity definitions, which nvidia-smi never writes")
    end = body.rfind("</nvidia_smi_log>")
    if end < 0:
        return Unread("nvidia-smi's XML was cut off")
    try:
        root = ElementTree.fromstring(body[: end + len("</nvidia_smi_log>")])  # noqa: S314 - entities refused above
    except ElementTree.ParseError as error:
        return Unread(f"nvidia-smi's XML can't be read: {error}")
    top = _flat_xml(root, skip="gpu")
    gpus = tuple(_gpu(_flat_xml(gpu), gpu.get("id", "")) for gpu in root.findall("gpu"))
    trouble = read_trouble(body[end:] + "\n" + stderr)
    return Smi(
        _text(top, "driver_version"),
        _text(top, "cuda_version"),
        _integer(_text(top, "attached_gpus")),
        gpus,
        trouble,
    )


def read_q(text: str) -> Maybe[Smi]:
    """`nvidia-smi -q` in the layouts of branches 410 to 580. Unread when it is something else."""
    top: dict[str, str] = {}
    cards: list[tuple[str, dict[str, str]]] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not line.strip() or line.startswith(("#", "$", "=")):
            continue
        indent = len(line) - len(line.lstrip())
        if indent == 0 and (card := re.match(r"GPU ([0-9A-Fa-f:.]+)$", line.strip())):
            cards.append((card[1], {}))
            path = []
            continue
        key, colon, value = line.strip().partition(" : ") if " : " in line else (line.strip(), "", "")
        while path and path[-1][0] >= indent:
            path.pop()
        name = key.strip().lower()
        target = cards[-1][1] if cards and indent else top
        if colon:
            target.setdefault("=" + "/".join([*(part for _, part in path), name]), value.strip())
        path.append((indent, name))
    if not cards and "=driver version" not in top:
        return Unread(_trouble_words(read_trouble(text), text))
    return Smi(
        _text(top, "=driver version"),
        _text(top, "=cuda version"),
        _integer(_text(top, "=attached gpus")),
        tuple(_gpu(flat, address) for address, flat in cards),
        read_trouble(text),
    )


def _flat_xml(node: ElementTree.Element, skip: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}

    def walk(element: ElementTree.Element, path: str) -> None:
        for child in element:
            name = f"{path}{child.tag}"
            if child.tag == skip:
                continue
            if len(child):
                walk(child, f"{name}/")
            else:
                flat.setdefault(name, (child.text or "").strip())

    walk(node, "")
    return flat


def _gpu(flat: Flat, address: str) -> SmiGpu:
    def text(name: str) -> Maybe[str]:
        reason: Unread | None = None
        for path in _PATHS[name]:
            value = _text(flat, path)
            if not isinstance(value, Unread):
                return value
            if reason is None and path in flat:
                reason = value
        return NOT_SHOWN if reason is None else reason

    def whole(name: str) -> Maybe[int]:
        return _integer(text(name))

    def number(name: str) -> Maybe[float]:
        return _number(text(name))

    return SmiGpu(
        address=normal(address),
        name=text("name"),
        device_id=_pci_device_id(text("device_id")),
        uuid=text("uuid"),
        serial=text("serial"),
        vbios_version=text("vbios_version"),
        persistence_mode=_switch(text("persistence_mode")),
        bar1_total_mib=whole("bar1_total_mib"),
        memory_total_mib=whole("memory_total_mib"),
        memory_used_mib=whole("memory_used_mib"),
        link_gen=whole("link_gen"),
        link_gen_max=whole("link_gen_max"),
        link_width=whole("link_width"),
        link_width_max=whole("link_width_max"),
        replay_count=whole("replay_count"),
        performance_state=text("performance_state"),
        throttle_reasons=_throttle_reasons(flat),
        compute_mode=text("compute_mode"),
        gpu_utilization_percent=whole("gpu_utilization_percent"),
        ecc_enabled=_switch(text("ecc_enabled")),
        ecc_enabled_next=_switch(text("ecc_enabled_next")),
        ecc=EccCounts(
            whole("volatile_corrected"),
            whole("volatile_uncorrected"),
            whole("aggregate_corrected"),
            whole("aggregate_uncorrected"),
        ),
        retired_pages_single_bit=whole("retired_pages_single_bit"),
        retired_pages_double_bit=whole("retired_pages_double_bit"),
        retired_pages_pending=_switch(text("retired_pages_pending")),
        remapping_pending=_switch(text("remapping_pending")),
        remapping_failed=_switch(text("remapping_failed")),
        core_temperature_c=whole("core_temperature_c"),
        memory_temperature_c=whole("memory_temperature_c"),
        shutdown_temperature_c=whole("shutdown_temperature_c"),
        slowdown_temperature_c=whole("slowdown_temperature_c"),
        max_core_temperature_c=whole("max_core_temperature_c"),
        max_memory_temperature_c=whole("max_memory_temperature_c"),
        power_draw_w=number("power_draw_w"),
        power_limit_w=number("power_limit_w"),
        power_limit_default_w=number("power_limit_default_w"),
        power_limit_max_w=number("power_limit_max_w"),
        sm_clock_mhz=whole("sm_clock_mhz"),
        sm_clock_max_mhz=whole("sm_clock_max_mhz"),
        recovery_action=text("recovery_action"),
    )


def _text(flat: Flat, path: str) -> Maybe[str]:
    value = flat.get(path)
    if value is None or value == "":
        return NOT_SHOWN
    return Unread(value.strip("[]")) if _NO_VALUE.fullmatch(value) else value


def _integer(value: Maybe[str]) -> Maybe[int]:
    number = _number(value)
    return number if isinstance(number, Unread) else int(number)


def _number(value: Maybe[str]) -> Maybe[float]:
    if isinstance(value, Unread):
        return value
    found = re.match(r"-?\d+(?:\.\d+)?", value)
    return float(found[0]) if found else Unread(f"{value[:40]!r} is not a number")


def _switch(value: Maybe[str]) -> Maybe[bool]:
    if isinstance(value, Unread):
        return value
    word = value.lower()
    if word in ("enabled", "yes", "on", "active"):
        return True
    return False if word in ("disabled", "no", "off", "not active") else Unread(f"{value[:40]!r} is neither yes nor no")


def _pci_device_id(value: Maybe[str]) -> Maybe[int]:
    """The device half of 1DB610DE or 0x1DB610DE."""
    if isinstance(value, Unread):
        return value
    found = re.fullmatch(r"(?:0x)?([0-9A-Fa-f]{4})10DE", value, re.IGNORECASE)
    return int(found[1], 16) if found else Unread(f"{value[:40]!r} is no NVIDIA device id")


_THROTTLE = re.compile(
    r"(?:clocks_(?:throttle|event)_reasons/clocks_(?:throttle|event)_reason_(.+)"
    r"|=clocks (?:throttle|event) reasons/(?:.*/)?(.+))$"
)


def _throttle_reasons(flat: Flat) -> Maybe[tuple[str, ...]]:
    """Names of the active ones, in the XML's spelling (sw_power_cap, hw_thermal_slowdown, ...)."""
    active, seen = [], False
    for path, value in flat.items():
        if found := _THROTTLE.match(path):
            seen = True
            if value == "Active":
                name = (found[1] or found[2]).replace(" ", "_")
                active.append("gpu_idle" if name == "idle" else name)
    return tuple(active) if seen else NOT_SHOWN


# ------------------------------------------------------------------------------------------------ smaller outputs

_LOST = re.compile(
    r"Unable to determine the device handle for gpu ?(?:(\d{1,3}): +)?([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)?:? ?(.*)$",
    re.IGNORECASE,
)


def read_trouble(text: str) -> Trouble:
    """What is wrong, out of anything that nvidia-smi printed."""
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("# ", "$ ")))
    lost = []
    for line in text.splitlines():
        if found := _LOST.match(line.strip()):
            address = normal(found[2]) if found[2] else None
            index = int(found[1]) if found[1] else None
            lost.append(LostHandle(index, address, re.sub(r"\s+", " ", found[3]).strip()))
    return Trouble(
        lost=tuple(lost),
        version_mismatch="Driver/library version mismatch" in text,
        no_devices="No devices were found" in text,
        cannot_reach_driver="couldn't communicate with the NVIDIA driver" in text,
        error_cells=len(re.findall(r"\bERR!", text)),
    )


def _trouble_words(trouble: Trouble, text: str) -> str:
    if trouble.version_mismatch:
        return "Driver/library version mismatch"
    if trouble.no_devices:
        return "No devices were found"
    if trouble.cannot_reach_driver:
        return "nvidia-smi couldn't communicate with the NVIDIA driver"
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("#", "$"))]
    return f"not a listing of nvidia-smi: {lines[0][:100]}" if lines else "nvidia-smi printed nothing"


@dataclass(frozen=True)
class TableRow:
    """One card of plain `nvidia-smi`'s table; what shows as ERR! or N/A is Unread."""

    index: int | None
    address: str | None
    core_temperature_c: Maybe[int]
    power_draw_w: Maybe[float]
    power_limit_w: Maybe[float]
    memory_used_mib: Maybe[int]
    memory_total_mib: Maybe[int]


_TABLE_HEAD = re.compile(r"\|\s+(\d+)\s+.*\|\s*([0-9A-Fa-f]{8}:[0-9A-Fa-f:.]+) ")
_TABLE_BODY = re.compile(
    r"\|\s*(?:\S+)\s+(?P<temp>\d+C|ERR!|N/A)\s+\S+\s+(?P<draw>[\d.]+W|ERR!|N/A|ERR)\s*/\s*(?P<limit>[\d.]+W|ERR!|N/A)"
    r"\s*\|\s*(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB"
)


def read_table(text: str) -> tuple[TableRow, ...]:
    """Rows of the table, also when its first line of a card was left out."""
    rows, index, address = [], None, None
    for line in text.splitlines():
        if head := _TABLE_HEAD.match(line):
            index, address = int(head[1]), normal(head[2])
        elif body := _TABLE_BODY.match(line):
            values = [
                _number(Unread(word) if _NO_VALUE.fullmatch(word) else word) for word in (body["temp"], body["draw"], body["limit"])
            ]
            core = values[0] if isinstance(values[0], Unread) else int(values[0])
            rows.append(TableRow(index, address, core, values[1], values[2], int(body["used"]), int(body["total"])))
            index, address = None, None
    return tuple(rows)


def read_csv(text: str) -> tuple[tuple[tuple[str, Maybe[str]], ...], ...]:
    """Rows of `--query-gpu=... --format=csv`, each a tuple of (query field, value).

    The fields come from the command line when it is quoted above the rows (`$ nvidia-smi --query-gpu=...`), else from
    a header row, else they are numbered; a list of numbered rows is how a gap in the indexes shows.
    """
    rows: list[tuple[tuple[str, Maybe[str]], ...]] = []
    fields: list[str] = []
    for line in text.splitlines():
        if asked := re.search(r"--query-gpu=(\S+)", line):
            fields = asked[1].split(",")
            continue
        if not line.strip() or line.startswith(("#", "$")) or _LOST.match(line):
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if not fields and all(re.match(r"[a-z_.]+( \[\w+\])?$", cell) for cell in cells):
            fields = [cell.split(" [")[0] for cell in cells]
            continue
        names = fields if len(fields) == len(cells) else [str(number) for number in range(len(cells))]
        values = (Unread(cell.strip("[]")) if _NO_VALUE.fullmatch(cell) else cell for cell in cells)
        rows.append(tuple(zip(names, values, strict=True)))
    return tuple(rows)


@dataclass(frozen=True)
class NvLink:
    """One link of `nvidia-smi nvlink -s`; speed None: inactive."""

    gpu_index: int
    link: int
    speed_gb_s: float | None


def read_nvlink(text: str) -> tuple[NvLink, ...]:
    """Links of every card in the listing."""
    links, gpu = [], -1
    for line in text.splitlines():
        if head := re.match(r"GPU (\d+):", line):
            gpu = int(head[1])
        elif found := re.match(r"\s*Link (\d+): (?:([\d.]+) GB/s|<?inactive>?)", line):
            links.append(NvLink(gpu, int(found[1]), float(found[2]) if found[2] else None))
    return tuple(links)
