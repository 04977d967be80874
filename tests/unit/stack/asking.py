"""Requests for tests, written as people write them."""

from __future__ import annotations

from typing import Any

from laoka.stack.models import checkpoint_of
from laoka.stack.request import DEFAULT_MODEL, Request, parse_driver, parse_engine, parse_gpu
from laoka.stack.resolve import Refusal, Stack, resolve


def request(gpu: str, os_release: str = "ubuntu-24.04", model: str = DEFAULT_MODEL, **wishes: Any) -> Request:
    """A request; `gpu` "2xv100-pcie-32gb + rtx-5090", `engine` and `driver` as on the command line."""
    name, version = parse_engine(wishes.pop("engine", None))
    driver = parse_driver(wishes.pop("driver", None))
    cards = sum((parse_gpu(word) for word in gpu.split("+")), ())
    return Request(cards, checkpoint_of(model), os_release, engine=name, engine_version=version, driver=driver, **wishes)


def stack(gpu: str, *args: Any, **wishes: Any) -> Stack:
    """What has to resolve."""
    outcome = resolve(request(gpu, *args, **wishes))
    assert isinstance(outcome, Stack), [item.evidence.say() for item in outcome.violations]
    return outcome


def refusal(gpu: str, *args: Any, **wishes: Any) -> Refusal:
    """What has to be refused."""
    outcome = resolve(request(gpu, *args, **wishes))
    assert isinstance(outcome, Refusal), outcome.engine.pin
    return outcome
