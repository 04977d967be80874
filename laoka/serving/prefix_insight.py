"""What noted hashes say: which beginnings are shared, how much prefill that can save, what stands in the wrong place. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from laoka.serving.prefix_log import Noted, covered

EARLY_TOKENS = 64
"""Prompts that part before so many tokens have something at their very beginning that changes."""
WORTH_SHARE = 0.1
MOST = 20


@dataclass(frozen=True)
class Shared:
    """A beginning that several requests share. `id` is its hash; `saved_tokens`: read once instead of each time."""

    id: str
    tokens: int
    requests: int
    saved_tokens: int


@dataclass(frozen=True)
class Insight:
    """What a log says. Tokens are of prompts; shares are of all of them.

    `reusable_tokens`: what a cache that forgets nothing would have had, in whole blocks of the engine. `misplaced_tokens`: what was
    in earlier prompts too, but comes after something that was not, so that no prefix cache can have it.
    """

    requests: int
    tokens: int
    block_tokens: int
    reusable_tokens: int
    misplaced_tokens: int
    parts_at_tokens: float | None
    """The median place at which a request parts from the one before it that is most like it; None with less than two requests."""
    shared: tuple[Shared, ...]

    @property
    def reusable_share(self) -> float:
        return self.reusable_tokens / self.tokens if self.tokens else 0.0

    @property
    def misplaced_share(self) -> float:
        return self.misplaced_tokens / self.tokens if self.tokens else 0.0

    @property
    def advice(self) -> tuple[str, ...]:
        """Keys of catalog/messages/cache.toml, the most useful first."""
        if self.requests < 2:
            return ("few",)
        found = []
        if self.misplaced_share >= WORTH_SHARE:
            early = self.parts_at_tokens is not None and self.parts_at_tokens < EARLY_TOKENS
            found.append("changes_first" if early else "reorder")
        if self.reusable_share >= WORTH_SHARE:
            found.append("keep")
        if not found:
            found.append("nothing_shared")
        if self.shared and self.shared[0].tokens < self.block_tokens:
            found.append("below_block")
        return tuple(found)


def analyse(noted: Iterable[Noted], block_tokens: int = 16) -> Insight:
    """Look through a log in the order of time. `block_tokens`: size of the engine's cache blocks; only whole ones are kept."""
    requests = sorted(noted, key=lambda item: item.time_s)
    seen: set[tuple[str, str]] = set()
    chunks_seen: set[tuple[str, str]] = set()
    counts: Counter[tuple[str, int, str]] = Counter()
    reusable = misplaced = 0
    parts: list[int] = []
    for request in requests:
        known = 0
        for index, digest in enumerate(request.prefix):
            if (request.run, digest) not in seen:
                break
            known = covered(index)
        if any(run == request.run for run, _ in chunks_seen):
            parts.append(known)
        reusable += known // block_tokens * block_tokens
        start = 0
        for digest, length in request.chunks:
            if start >= known and (request.run, digest) in chunks_seen:
                misplaced += length
            start += length
        seen.update((request.run, digest) for digest in request.prefix)
        chunks_seen.update((request.run, digest) for digest, _ in request.chunks)
        counts.update((request.run, index, digest) for index, digest in enumerate(request.prefix))
    return Insight(
        len(requests), sum(request.tokens for request in requests), block_tokens, reusable, misplaced,
        median(parts) if parts else None, _shared(requests, counts),
    )  # fmt: skip


def _shared(requests: Sequence[Noted], counts: Counter[tuple[str, int, str]]) -> tuple[Shared, ...]:
    """Beginnings of two or more requests, each as far as all of them go together."""
    longer: Counter[tuple[str, int, str]] = Counter()  # the most requests that share a mark and the one after it
    for request in requests:
        for index, digest in enumerate(request.prefix[:-1]):
            key = (request.run, index, digest)
            longer[key] = max(longer[key], counts[request.run, index + 1, request.prefix[index + 1]])
    found = [
        Shared(digest, covered(index), count, covered(index) * (count - 1))
        for (run, index, digest), count in counts.items()
        if count > 1 and longer[run, index, digest] < count
    ]
    return tuple(sorted(found, key=lambda item: (-item.saved_tokens, item.id))[:MOST])
