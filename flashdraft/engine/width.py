"""How many proposals to verify, 0 included: the width that commits most tokens a second.

While serving it estimates how likely position k of a block is accepted once k - 1 were: for each request, leaning on all
requests while it is young. What a step costs (by sequences, rows, and whether it drafts) is given. Host only, and by arrays:
between two steps of 64 requests there is time for some 100 us. Shape letters: N requests, K proposals of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

DECAY = 0.98  # of a request's counts at each of its observations: the last 50 steps matter
GLOBAL_DECAY = 0.995
PRIOR_WEIGHT = 16.0  # observations that the estimate over all requests is worth to one request
DEPTH_WEIGHT = 6.0  # and that the estimate of one position is worth to the next
FIRST_GUESS, FIRST_WEIGHT = 0.7, 20.0  # for the first position before anything was seen, and what that is worth
GAIN = 1.03  # another width must promise this much more before it is taken
# Requests that are off are probed now and then, all of a batch in one step. Probes may cost this share of the time, first and
# after many that did not pay; one that paid is followed by another at once.
PROBE_SHARE, PROBE_SHARE_LEAST = 0.015, 0.008
PROBE_PRICE = 1.5  # a probe is as wide as it can be within this price, in plain steps

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step: `verify(sequences, rows)`, and where any of them draft `draft(drafting)` more.

    proposal: seconds more for each proposal, as they are now; the others do not change.
    """

    verify: Callable[[int, int], float]
    draft: Callable[[int], float]
    proposal: Callable[[], float] = lambda: 0.0


class Acceptance:
    """Decayed counts of tries and hits by position of a block, [N, K] each."""

    def __init__(self, requests: int, width: int) -> None:
        self.tried, self.hit = np.zeros((requests, width)), np.zeros((requests, width))

    def observe(self, places: Ints, drafted: Ints, accepted: Ints, decay: float) -> None:
        """One step of the requests at different `places`. Positions up to the first rejected one were tried; those behind it
        say nothing."""
        k = np.arange(self.tried.shape[1])
        tried, hit = k < np.minimum(accepted + 1, drafted)[:, None], k < np.minimum(accepted, drafted)[:, None]
        self.tried[places] = np.where(tried, self.tried[places] * decay + 1.0, self.tried[places])
        self.hit[places] = np.where(tried, self.hit[places] * decay + hit, self.hit[places])

    def observe_all(self, drafted: Ints, accepted: Ints, decay: float) -> None:
        """One step of many requests, counted as one: each try decays the counts, and none comes before the others."""
        k = np.arange(self.tried.shape[1])
        tries = (k < np.minimum(accepted + 1, drafted)[:, None]).sum(0)
        hits = (k < np.minimum(accepted, drafted)[:, None]).sum(0)
        left = decay**tries
        seen = (1.0 - left) / (1.0 - decay)
        self.tried[0] = self.tried[0] * left + seen
        self.hit[0] = self.hit[0] * left + seen * hits / np.maximum(tries, 1)


@dataclass(frozen=True)
class _Decision:
    requests: list[tuple[Hashable, int]]
    limits: Ints
    plan: Ints
    widths: list[int]  # the plan
    off: NDArray[np.bool_]  # who might draft and does not
    any_off: bool


class WidthPolicy:
    """Chooses a width for every request of a step."""

    def __init__(self, max_width: int, cost: StepCost) -> None:
        self.max_width, self.cost = max_width, cost
        self._everyone = Acceptance(1, max_width)
        self._places: dict[Hashable, int] = {}
        self._free: list[int] = []
        self._acceptance, self._widths = Acceptance(0, max_width), np.zeros(0, np.int64)
        self._news: dict[int, tuple[int, int]] = {}  # what was observed since the last choice, by place: drafted, accepted
        self._verify: dict[int, Floats] = {}  # seconds by rows beyond one a sequence, for each number of sequences
        self._draft = np.zeros(1)  # seconds by sequences that draft
        self._decided: _Decision | None = None  # until something is observed
        self._prices: dict[int, float] = {}  # by width, of a probe beside what was decided; made when asked for
        self._since_probe, self._probe_share, self._paid = 0, PROBE_SHARE, False
        self._price = 1.0
        self._awaited = 0  # outcomes of the last probe that are still to come
        self._probed: list[int] = []  # tokens of each request that it tried

    def choose(self, requests: Sequence[tuple[Hashable, int]]) -> list[int]:
        """Widths for requests (key, limit), in their order."""
        if not requests:
            return []
        self._learn()
        if self._decided is None or self._decided.requests != requests:
            places = np.array([self._place(key) for key, _ in requests])
            limits = np.array([limit for _, limit in requests])
            survival = self._survival(places, limits)
            best = np.minimum(self._widths[places], limits)
            plan = self._likeliest(survival)
            if self._rate(plan, survival) > self._rate(best, survival) * GAIN:
                best = plan
            self._widths[places] = best
            off = (best == 0) & (limits > 0)
            self._decided = _Decision(list(requests), limits, best, best.tolist(), off, bool(off.any()))
            self._prices = {}
        decided = self._decided
        probe = self._probe_width(decided)
        if not probe:
            return [*decided.widths]
        self._awaited = int(decided.off.sum())
        chosen: list[int] = np.where(decided.off, np.minimum(probe, decided.limits), decided.plan).tolist()
        return chosen

    def _probe_width(self, decided: _Decision) -> int:
        """The width at which requests that are off are probed in this step, in case their text has become easier; mostly 0."""
        if not decided.any_off:
            self._since_probe, self._probe_share, self._paid = 0, PROBE_SHARE, False
            return 0
        if not self._prices:
            now, widths = self._seconds(decided.plan), range(1, self.max_width + 1)
            probed = {w: np.where(decided.off, np.minimum(w, decided.limits), decided.plan) for w in widths}
            self._prices = {w: self._seconds(plan) / now for w, plan in probed.items()}
        prices = self._prices
        width = max(w for w, price in prices.items() if price <= max(PROBE_PRICE, 1.05 * prices[1]))
        self._since_probe += 1
        if self._probed:
            if sum(self._probed) > self._price * len(self._probed):
                self._paid, self._probe_share = True, PROBE_SHARE
            self._probed.clear()
        if not self._paid and self._since_probe * self._probe_share < prices[width] - 1:
            return 0
        self._since_probe, self._paid, self._price = 0, False, prices[width]
        self._probe_share = max(self._probe_share / 1.5, PROBE_SHARE_LEAST)
        return width

    def _likeliest(self, survival: Floats) -> Ints:
        """The best plan that takes proposals likeliest first: a row costs the same whosever it is."""
        n, width = survival.shape
        order = np.argsort(-survival, axis=None, kind="stable")[: np.count_nonzero(survival)]
        verify, draft = self._tables(n)
        tokens = n + np.concatenate(([0.0], np.cumsum(survival.ravel()[order])))
        drafting = np.concatenate(([0], np.cumsum(order % width == 0)))  # a request's first proposal is its likeliest
        best = int(np.argmax(tokens / (verify[: len(tokens)] + draft[drafting])))
        return np.bincount(order[:best] // width, minlength=n)

    def _seconds(self, plan: Ints) -> float:
        verify, draft = self._tables(len(plan))
        return float(verify[plan.sum()] + draft[np.count_nonzero(plan)])

    def _rate(self, plan: Ints, survival: Floats) -> float:
        committed = len(plan) + survival[np.arange(self.max_width) < plan[:, None]].sum()
        return float(committed / self._seconds(plan))

    def _tables(self, sequences: int) -> tuple[Floats, Floats]:
        if sequences not in self._verify:
            rows = range(sequences, sequences * (self.max_width + 1) + 1)
            self._verify[sequences] = np.array([self.cost.verify(sequences, count) for count in rows])
        if sequences >= len(self._draft):
            self._draft = np.array([0.0, *(self.cost.draft(count) for count in range(1, sequences + 1))])
        verify = self._verify[sequences]
        return verify + self.cost.proposal() * np.arange(len(verify)), self._draft

    def observe(self, key: Hashable, drafted: int, accepted: int) -> None:
        """The outcome of one verify step of one request."""
        place = self._places.get(key)
        if not drafted or place is None:
            return
        if place in self._news:
            self._learn()
        self._news[place] = drafted, accepted
        if self._awaited and self._widths[place] == 0:
            self._awaited -= 1
            self._probed.append(accepted + 1)

    def forget(self, key: Hashable) -> None:
        if key in self._places:
            self._learn()
            self._decided = None
            self._free.append(self._places.pop(key))

    def _learn(self) -> None:
        if self._news:
            drafted, accepted = np.array(list(self._news.values())).T
            self._acceptance.observe(np.array(list(self._news)), drafted, accepted, DECAY)
            self._everyone.observe_all(drafted, accepted, GLOBAL_DECAY)
            self._news.clear()
            self._decided = None

    def _place(self, key: Hashable) -> int:
        place = self._places.get(key)
        if place is None:
            if not self._free:
                self._grow(max(8, 2 * len(self._widths)))
            place = self._places[key] = self._free.pop()
            self._acceptance.tried[place] = self._acceptance.hit[place] = 0.0
            self._widths[place] = self.max_width
        return place

    def _grow(self, size: int) -> None:
        before, more = len(self._widths), size - len(self._widths)
        own = self._acceptance
        own.tried, own.hit = (np.pad(counts, ((0, more), (0, 0))) for counts in (own.tried, own.hit))
        self._widths = np.pad(self._widths, (0, more))
        self._free += range(before, size)

    def _survival(self, places: Ints, limits: Ints) -> Floats:
        """P(proposal k is committed) for k = 1..K of every request, 0 beyond its limit: [N, K]."""
        everyone, before, weight = np.empty(self.max_width), FIRST_GUESS, FIRST_WEIGHT
        for k, (tried, hit) in enumerate(zip(self._everyone.tried[0].tolist(), self._everyone.hit[0].tolist(), strict=True)):
            # Deep positions are seldom tried, never at small widths: they are taken to be like the one before until seen.
            everyone[k] = before = (hit + weight * before) / (tried + weight)
            weight = DEPTH_WEIGHT
        own = self._acceptance
        chance = (own.hit[places] + PRIOR_WEIGHT * everyone) / (own.tried[places] + PRIOR_WEIGHT)
        return np.where(np.arange(self.max_width) < limits[:, None], np.cumprod(chance, 1), 0.0)
