"""How many proposals to verify, 0 included: the width that commits most tokens a second.

While serving it estimates how likely position k of a block is accepted once k - 1 were: for each request, leaning on all
requests while it is young. What a step costs (by sequences, rows, and whether it drafts) is given. Host only: no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

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


@dataclass
class Acceptance:
    """Decayed counts of tries and hits by position of a block."""

    tried: list[float]
    hit: list[float]

    @classmethod
    def of(cls, width: int) -> Acceptance:
        return cls([0.0] * width, [0.0] * width)

    def observe(self, drafted: int, accepted: int, decay: float) -> None:
        """Positions up to the first rejected one were tried; those behind it say nothing."""
        for k in range(min(accepted + 1, drafted)):
            self.tried[k] = self.tried[k] * decay + 1.0
            self.hit[k] = self.hit[k] * decay + (k < accepted)


# seconds(sequences, rows in all, how many of the sequences draft): what a step costs, from a table measured at warm-up.
StepCost = Callable[[int, int, int], float]


@dataclass
class _State:
    acceptance: Acceptance
    width: int
    probing: bool = False


class WidthPolicy:
    """Chooses a width for every request of a step."""

    def __init__(self, max_width: int, seconds: StepCost) -> None:
        self.max_width, self.seconds = max_width, seconds
        self.everyone = Acceptance.of(max_width)
        self._states: dict[Hashable, _State] = {}
        self._since_probe, self._probe_share, self._paid = 0, PROBE_SHARE, False
        self._price = 1.0
        self._probed: list[int] = []  # tokens of each request that the last probe tried

    def choose(self, requests: Sequence[tuple[Hashable, int]]) -> list[int]:
        """Widths for requests (key, limit), in their order."""
        if not requests:
            return []
        states = [self._state(key) for key, _ in requests]
        limits = [limit for _, limit in requests]
        survival = [self._survival(state.acceptance, limit) for state, limit in zip(states, limits, strict=True)]
        current = [min(state.width, limit) for state, limit in zip(states, limits, strict=True)]
        best, best_rate = current, self._rate(current, survival) * GAIN
        plan = self._likeliest(survival)
        if self._rate(plan, survival) > best_rate:
            best = plan
        probe = self._probe_width(best, limits)
        for state, limit, width in zip(states, limits, best, strict=True):
            state.width, state.probing = width, width == 0 and limit > 0 and probe > 0
        return [min(probe, limit) if s.probing else w for s, limit, w in zip(states, limits, best, strict=True)]

    def _probe_width(self, plan: list[int], limits: list[int]) -> int:
        """The width at which requests that are off are probed in this step, in case their text has become easier; mostly 0."""
        if all(width or not limit for width, limit in zip(plan, limits, strict=True)):
            self._since_probe, self._probe_share, self._paid = 0, PROBE_SHARE, False
            return 0
        now = self._seconds(plan)
        prices = {
            width: self._seconds([w or min(width, limit) for w, limit in zip(plan, limits, strict=True)]) / now
            for width in range(1, self.max_width + 1)
        }
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

    def _likeliest(self, survival: list[list[float]]) -> list[int]:
        """The best plan that takes proposals likeliest first: a row costs the same whosever it is."""
        likeliest = sorted(((chance, r) for r, own in enumerate(survival) for chance in own), reverse=True)
        n = len(survival)
        tokens, drafting, best, best_rate = float(n), 0, 0, n / self.seconds(n, n, 0)
        seen = [False] * n
        for taken, (chance, r) in enumerate(likeliest, 1):
            tokens += chance
            drafting += not seen[r]
            seen[r] = True
            rate = tokens / self.seconds(n, n + taken, drafting)
            if rate > best_rate:
                best, best_rate = taken, rate
        plan = [0] * n
        for _, r in likeliest[:best]:
            plan[r] += 1
        return plan

    def _seconds(self, plan: list[int]) -> float:
        return self.seconds(len(plan), len(plan) + sum(plan), sum(width > 0 for width in plan))

    def _rate(self, plan: list[int], survival: list[list[float]]) -> float:
        return (len(plan) + sum(sum(s[:w]) for w, s in zip(plan, survival, strict=True))) / self._seconds(plan)

    def observe(self, key: Hashable, drafted: int, accepted: int) -> None:
        """The outcome of one verify step of one request."""
        state = self._states.get(key)
        if drafted and state is not None:
            state.acceptance.observe(drafted, accepted, DECAY)
            if state.probing:
                self._probed.append(accepted + 1)
            self.everyone.observe(drafted, accepted, GLOBAL_DECAY)

    def forget(self, key: Hashable) -> None:
        self._states.pop(key, None)

    def _state(self, key: Hashable) -> _State:
        if key not in self._states:
            self._states[key] = _State(Acceptance.of(self.max_width), self.max_width)
        return self._states[key]

    def _survival(self, own: Acceptance, limit: int) -> list[float]:
        """P(proposal k is committed) for k = 1..limit."""
        chance, result, before, weight = 1.0, [], FIRST_GUESS, FIRST_WEIGHT
        for k in range(limit):
            # Deep positions are seldom tried, never at small widths: they are taken to be like the one before until seen.
            everyone = (self.everyone.hit[k] + weight * before) / (self.everyone.tried[k] + weight)
            before, weight = everyone, DEPTH_WEIGHT
            chance *= (own.hit[k] + PRIOR_WEIGHT * everyone) / (own.tried[k] + PRIOR_WEIGHT)
            result.append(chance)
        return result
