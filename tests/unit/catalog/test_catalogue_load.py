"""The loader: every fault of a catalogue file is one line that names file, row and key."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laoka.catalog.drivers import DriverBranch, KernelFact, OsRelease, PackageSource
from laoka.catalog.drivers import check as check_drivers
from laoka.catalog.engines import Engine
from laoka.catalog.engines import check as check_engines
from laoka.catalog.gpus import by_device_id, by_name, parse_gpus
from laoka.catalog.load import CatalogError, Row, parse, references, unique
from laoka.catalog.models import Architecture, Drafter, Model
from laoka.catalog.models import check as check_models
from laoka.catalog.profiles import Constant, MemoryFigure
from laoka.catalog.profiles import check as check_profiles


@dataclass(frozen=True)
class Part:
    kind: Literal["a", "b"]
    size: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Thing(Row):
    count: int
    names: tuple[str, ...] = ()
    levels: Mapping[str, int] | None = None
    parts: tuple[Part, ...] = ()
    on: bool | None = None


GOOD = '[[thing]]\nid = "x"\nsource = "s"\nchecked = 2026-12-01\ncount = 3\n'


def test_a_good_row() -> None:
    text = GOOD + 'names = ["n"]\nlevels = { "q:1" = 75 }\non = true\n[[thing.parts]]\nkind = "b"\nsize = 2\n'
    (row,) = parse(text, "t.toml", "thing", Thing)
    assert row == Thing(
        id="x",
        source="s",
        checked=datetime.date(2026, 12, 1),
        count=3,
        names=("n",),
        levels={"q:1": 75},
        parts=(Part("b", 2.0),),
        on=True,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("= nonsense", "t.toml"),
        ("", r"no \[\[thing\]\] row"),
        ("thing = 3", r"no \[\[thing\]\] row"),
        (GOOD + "colour = 1\n", r"1 \(x\): unknown key colour"),
        (GOOD.replace("count = 3\n", ""), r"1 \(x\): count is missing"),
        (GOOD.replace("checked = 2026-12-01\n", ""), "checked is missing"),
        (GOOD.replace('source = "s"\n', ""), "source is missing"),
        (GOOD.replace('"s"', '"  "'), "can't be empty"),
        (GOOD.replace("2026-12-01", '"2026-12-01"'), "checked: is '2026-12-01', not date"),
        (GOOD.replace("2026-12-01", "2026-12-01T00:00:00"), "not date"),
        (GOOD.replace("count = 3", "count = true"), "count: is True, not int"),
        (GOOD.replace("count = 3", "count = 3.0"), "not int"),
        (GOOD + 'names = "n"\n', "not a list"),
        (GOOD + "names = [1]\n", r"names\[0\]: is 1, not str"),
        (GOOD + "levels = [1]\n", "not a table"),
        (GOOD + 'levels = { a = "b" }\n', r"levels.a: is 'b', not int"),
        (GOOD + "on = 1\n", "not bool"),
        (GOOD + '[[thing.parts]]\nkind = "c"\n', r"kind: is 'c', not one of a, b"),
        (GOOD + '[[thing.parts]]\nkind = "a"\nweight = 1\n', "unknown key weight"),
        (GOOD + GOOD, "id x stands twice"),
    ],
)
def test_a_fault_is_one_line(text: str, said: str) -> None:
    with pytest.raises(CatalogError, match=said) as caught:
        parse(text, "t.toml", "thing", Thing)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("t.toml")


VALUE = st.recursive(
    st.one_of(
        st.integers(-5, 5), st.booleans(), st.text("ab", max_size=2), st.floats(allow_nan=False, allow_infinity=False, width=16)
    ),
    lambda inner: st.lists(inner, max_size=2),
    max_leaves=4,
)


@given(st.sampled_from(["id", "source", "checked", "count", "names", "levels", "parts", "on", "other"]), VALUE)
def test_no_value_is_taken_for_what_it_is_not(key: str, value: object) -> None:
    def written(item: object) -> str:
        if isinstance(item, bool):
            return str(item).lower()
        if isinstance(item, list):
            return "[" + ", ".join(map(written, item)) + "]"
        return f'"{item}"' if isinstance(item, str) else str(float(item)) if isinstance(item, float) else str(item)

    lines = [line for line in GOOD.splitlines() if not line.startswith(f"{key} ")]
    text = "\n".join([*lines, f"{key} = {written(value)}"])
    try:
        (row,) = parse(text, "t.toml", "thing", Thing)
    except CatalogError as error:
        assert "\n" not in str(error)
        return
    kinds = {"id": str, "source": str, "count": int, "names": tuple, "parts": tuple, "on": bool}
    assert type(getattr(row, key)) is kinds[key]


def row(**more: object) -> dict[str, object]:
    return {"id": "x", "source": "s", "checked": datetime.date(2026, 12, 1), **more}


def test_a_value_in_two_rows_and_a_reference_to_nothing() -> None:
    things = (Thing(**row(count=1, names=("n",))), Thing(**row(id="y", count=1, names=("m", "n"))))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match="names n stands in x and in y"):
        unique(things, "names", "t.toml")
    with pytest.raises(CatalogError, match="y: names names n, which the catalogue does not have"):
        references(things[1:], "names", {"m"}, "t.toml")


GPU = """
[[gpu]]
id = "g"
name = "G"
device_ids = ["10de:1db6"]
family = "volta"
sm = 70
form = "pcie"
module_flavours = ["proprietary"]
source = "s"
checked = 2026-12-01
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GPU + GPU.replace('"g"', '"h"'), "10de:1db6 stands in g and in h"),
        (GPU.replace("10de:1db6", "1db6"), "not like 10de:1db6"),
        (GPU.replace("10de:1db6", "10de:1DB6"), "not like 10de:1db6"),
        (GPU.replace('["proprietary"]', "[]"), "module_flavours is empty"),
        (GPU + "power_limit_min_w = 300\npower_limit_max_w = 250\n", "is above power_limit_max_w"),
        (GPU.replace("volta", "vulcan"), "not one of"),
    ],
)
def test_gpus_that_are_wrong(text: str, said: str) -> None:
    with pytest.raises(CatalogError, match=said):
        parse_gpus(text)


def test_gpus_are_found_by_id_and_by_name() -> None:
    found = by_device_id("10de:1db6")
    assert found is not None and found.id == "v100-pcie-32gb"
    assert by_device_id("0x1DB6") is found
    assert by_name("V100 PCIe 32GB") is found
    assert by_device_id("10de:ffff") is None
    assert by_name("v100") is None, "several cards are called so"
    for name in ("4080", "RTX 4080", "NVIDIA GeForce RTX 4080"):
        card = by_name(name)
        assert card is not None and card.id == "rtx-4080"
    assert by_name("h200") is by_device_id("10de:2335")


def test_references_between_files() -> None:
    branch = DriverBranch(**row(id="580", kind="LTS", versions=("595.1",)))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match=r"version 595\.1 is of another branch"):
        check_drivers((branch,), (), ())
    fact = KernelFact(**row(driver="999.1", kernel="6.8", works=True))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match="a branch that the catalogue does not have"):
        check_drivers((), (), (fact,))
    release = OsRelease(**row(id="r", name="R"))  # type: ignore[arg-type]
    names = {"name": "S", "releases": ("r",), "userspace": ("nvidia-utils",), "versioned": ("nvidia-*",)}
    for change, said in (
        ({"dkms": ("nvidia-dkms-580-open",)}, "open module among the proprietary packages"),
        ({"dkms": ()}, "can't be empty"),
        ({"dkms": ("d",), "releases": ("other",)}, "releases names other"),
        ({"dkms": ("d",), "branches": ("999",)}, "branches names 999"),
    ):
        source = PackageSource(**row(**{**names, **change}))  # type: ignore[arg-type]
        with pytest.raises(CatalogError, match=said):
            check_drivers((), (release,), (), (source,))
    arch = Architecture(
        **row(
            id="a",
            model_type="t",
            hidden=8,
            layers=2,
            full_attention_layers=1,
            heads=1,
            kv_heads=1,
            head_dim=8,
            intermediate=8,
            vocab=8,
            max_position=8,
        )  # type: ignore[arg-type]
    )
    with pytest.raises(CatalogError, match="don't add up to 2"):
        check_models((arch,), (), ())
    model = Model(**row(repo="r", architecture="b", scheme="bf16"))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match="architecture names b"):
        check_models((), (model,), ())
    drafter = Drafter(**row(repo="r", method="dflash", architecture="D", bytes_total=1, weights_sha256="abc"))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match="weights_sha256 is not 64"):
        check_models((), (), (drafter,))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wheel_sha256": "ABC"}, "neither 64 hexadecimal digits nor unverified"),
        ({"wheel_sha256": "unverified", "sums_url": None}, "no hash, and no sums_url"),
        ({"torch": None}, "torch is missing"),
        ({"sm": ()}, "sm is missing"),
        ({"package": None}, "neither package nor wheel_url"),
        ({"id": "other"}, "id is not e-1"),
    ],
)
def test_engines_that_are_wrong(change: dict[str, object], said: str) -> None:
    good = row(
        id="e-1",
        name="e",
        version="1",
        package="e",
        wheel_file="e.whl",
        wheel_sha256="0" * 64,
        python=("3.12",),
        glibc_min="2.28",
        torch="2.10.0",
        torch_backend="cu128",
        sm=(70,),
    )
    assert check_engines((Engine(**good),))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match=said):
        check_engines((Engine(**{**good, **change}),))  # type: ignore[arg-type]


def test_a_constant_is_never_proved_by_what_it_was_fitted_on() -> None:
    figure = MemoryFigure(
        **row(
            id="f",
            kind="resident",
            role="fitted",
            gpu="v100-sxm2-32gb",
            count=1,
            engine="1cat-vllm==1.5.1",
            model="qwen3.8-27b-quasar-nvfp4",
            speculative="none",
            value=1.0,
            unit="GiB",
        )  # type: ignore[arg-type]
    )
    constant = Constant(**row(value=1.0, unit="u", meaning="m", fitted_on=("f",), held_out=("f",)))  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match="shares a figure with held_out"):
        check_profiles((), (figure,), (), (constant,))
