"""The recipe of a bench run: what is asked, how often and how many at once. Two runs compare only when it is the same. Pure.

Prompts are token ids, never text: text of "512 tokens" comes out as 512 to 514 after the server's tokenizer, and over chat as 522
to 524, because of the template (tried with vLLM 0.32.0).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

PrefixCache = Literal["defeated", "measured"]
VERSION = 1
TEXT = """\
An old accelerator is a fine teacher. Somebody bought four of them from a closed data centre, with dust in the fins and no fans,
and now they sit on a desk beside a board that was made for one graphics card. First the firmware has to give each of them room
for its memory window; if it does not, the driver prints one line and the card stays dark. Then come the cables: these cards take
the plug of a processor, not that of a gaming card, and the wrong one fits if it is pushed hard enough. After that the work is
mostly waiting: for packages, for a model of twenty gigabytes, for kernels to be compiled.

def mean(values: list[float]) -> float:
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

Question: why does the second request come back faster than the first? Answer: its beginning was read before. The server keeps
what it computed for a prefix, and a prompt that starts with the same words need not be read again. Move what never changes to the
front, what changes to the end, and the cache does the rest. 1, 2, 3, 5, 8, 13, 21, 34, 55: each number is the sum of the two
before it. 旧显卡也能工作，只要供电、散热和插槽都没有问题；不要相信名字，要看编号。
"""
"""What the decode test continues, in pieces: prose, code, a list, some Chinese. Random tokens would say nothing of drafted ones."""


class RecipeError(ValueError):
    """A recipe that can't be run; the message is one line."""


@dataclass(frozen=True)
class Recipe:
    """What a run asks for. Counts of tokens are the server's own.

    `server_limits`: max-model-len of each round of cells, as the server had it. `requests_per_stream`: how many requests each of
    the concurrent streams makes in one repeat. `prefix_cache` "defeated": every prompt is new and has a salt of its own;
    "measured": every prompt of the prefill test is sent twice, and the second one counts apart.
    """

    prompt_tokens: int = 512
    output_tokens: int = 256
    concurrency: tuple[int, ...] = (1, 4, 8)
    requests_per_stream: int = 2
    repeats: int = 3
    warmup_requests: int = 2
    prefill_tokens: int = 500
    prefill_requests: int = 5
    decode_prompt_tokens: int = 32
    decode_tokens: int = 400
    decode_requests: int = 2
    prefix_cache: PrefixCache = "defeated"
    server_limits: tuple[int, ...] = ()
    version: int = VERSION

    def table(self) -> dict[str, Any]:
        """As plain values, as they stand in a result."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @property
    def id(self) -> str:
        """A short name of this very recipe."""
        return recipe_id(self.table())

    def longest_tokens(self) -> int:
        """The most tokens, prompt and answer, that one request of the recipe has."""
        return max(self.prompt_tokens + self.output_tokens, self.decode_prompt_tokens + self.decode_tokens, self.prefill_tokens + 1)

    def check(self) -> Recipe:
        """The recipe itself. Errors: RecipeError for numbers that make no sense, or a server limit that it does not fit in."""
        for name, value in self.table().items():
            numbers = value if isinstance(value, list) else [value]
            if any(isinstance(number, int) and number < (0 if name == "warmup_requests" else 1) for number in numbers):
                raise RecipeError(f"recipe: {name} is {value}: it has to be above zero")
        if not self.concurrency:
            raise RecipeError("recipe: concurrency is empty: name how many requests run at once")
        for limit in self.server_limits:
            if limit < self.longest_tokens():
                raise RecipeError(
                    f"recipe: the server's max-model-len is {limit}, and a request has {self.longest_tokens()} tokens in all:"
                    " raise max-model-len, or ask for shorter prompts"
                )
        return self


def recipe_id(table: Mapping[str, Any]) -> str:
    """A short name of a recipe given as a table."""
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:12]


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[str, ...]:
    """What two recipes differ in, one text each; empty when they are the same."""
    names = dict.fromkeys([*first, *second])
    return tuple(f"{name}: {first.get(name)} and {second.get(name)}" for name in names if first.get(name) != second.get(name))


def prompt_ids(count: int, known: Sequence[int], rng: random.Random) -> list[int]:
    """Token ids of one prompt: `count` of those that are known, at random."""
    return [known[rng.randrange(len(known))] for _ in range(count)]


def text_ids(count: int, text: Sequence[int], number: int) -> list[int]:
    """Token ids of a piece of the text, in its order; `number` says which piece, and the text begins again at its end."""
    start = number * count
    return [text[(start + place) % len(text)] for place in range(count)]
