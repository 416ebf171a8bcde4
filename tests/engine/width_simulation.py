"""Traces of acceptance replayed against a cost table: what a width policy would have been worth, without a model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flashdraft.engine.width import StepCost, WidthPolicy


@dataclass
class Simulation:
    """Replays recorded acceptance traces against a cost table: what a policy would have been worth, without a model.

    A trace holds, for each output position as the anchor, how many leading proposals were right (see train/validation.py).
    """

    cost: dict[str, float]  # seconds: "plain", "draft", and "row" for every row beyond one a sequence
    traces: list[list[int]]
    slots: int = 1
    max_width: int = 7
    lag: int = 0  # steps between a choice of widths and the outcome it may know of; 1 where steps are launched ahead
    widths_seen: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> StepCost:
        def verify(sequences: int, rows: int) -> float:
            return self.cost["plain"] + self.cost["row"] * (rows - sequences)

        return StepCost(verify, lambda drafting: self.cost["draft"])

    def run(self, policy: WidthPolicy | int) -> float:
        """Tokens a second over all traces, `slots` at a time; an int is that width at every step."""
        waiting: list[tuple[int, list[int]]] = list(enumerate(self.traces))
        active: dict[int, tuple[list[int], int]] = {}
        outcomes: deque[list[tuple[int, int, int]]] = deque()
        tokens, clock = 0, 0.0
        self.widths_seen = []
        while waiting or active:
            while waiting and len(active) < self.slots:
                number, trace = waiting.pop(0)
                active[number] = (trace, 0)
            keys = list(active)
            limits = [(key, self.max_width) for key in keys]
            widths = [policy] * len(keys) if isinstance(policy, int) else policy.choose(limits)
            clock += self.seconds.verify(len(widths), len(widths) + sum(widths)) + self.cost["draft"] * any(widths)
            self.widths_seen.extend(widths)
            outcomes.append([])
            for key, width in zip(keys, widths, strict=True):
                trace, at = active[key]
                accepted = min(trace[at], width, len(trace) - at - 1)
                tokens += accepted + 1
                active[key] = (trace, at + accepted + 1)
                outcomes[-1].append((key, width, min(trace[at], width)))
                if active[key][1] >= len(trace):
                    del active[key]
            if isinstance(policy, WidthPolicy) and len(outcomes) > self.lag:
                for key, width, accepted in outcomes.popleft():
                    policy.observe(key, width, accepted)
                    if key not in active:
                        policy.forget(key)
        return tokens / clock
