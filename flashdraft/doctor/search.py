"""Which variations raise acceptance: one at a time, each on top of those found; two together where one alone shows nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from flashdraft.doctor.measuring import Measure
from flashdraft.doctor.variations import Variation

SURE = 3.0  # standard errors, for one of some twenty comparisons
# Of the acceptance length: what counts, and what counts where the same answers become likelier too, beyond doubt: feature
# layers off by one cost the built-in pair 6 %, which 24 answers do not show by their steps alone.
LEAST_GAIN, LEAST_LIKELY = 0.05, 0.02
LIKELY = 1.0  # standard errors of the acceptance length, then
LEAST_TOKENS = 0.1  # a step: less mends nothing, and where nothing is right something is always a little better
MOST = 4  # causes
PROMISING = 3  # variations whose verify steps are followed, after a look at some anchors
PARTNERS = 6  # variations that are tried together with every other
ALIKE = 0.01  # of the acceptance length: of several values of one setting, the likeliest of those as good as the best

Forms = tuple[Variation, ...]
Ask = Callable[[Forms, bool], Measure]  # (variations, quick) -> on the answers


@dataclass(frozen=True)
class Gain:
    """What one form of a draft accepts more than another, answer by answer: tokens a step, with a 95 % interval."""

    before: float
    after: float
    low: float
    high: float
    sure: bool

    @classmethod
    def of(cls, before: Measure, after: Measure) -> Gain:
        """On the same answers."""
        both = ~np.isnan(before.lengths) & ~np.isnan(after.lengths)
        found = cls.between(before, after, both, LEAST_GAIN)
        if both.sum() < 2:
            return found
        gain, error = _mean_error((after.lengths - before.lengths)[both])
        likelier, doubt = _mean_error((after.likelihood - before.likelihood)[both])
        likely = likelier > SURE * doubt and gain > max(LIKELY * error, LEAST_LIKELY * found.before, LEAST_TOKENS)
        return replace(found, sure=found.sure or likely)

    @classmethod
    def between(cls, before: Measure, after: Measure, chosen: np.ndarray, least: float) -> Gain:
        """On answers to the same prompts, of which `chosen` [answers] bool are compared; `least`: share that counts."""
        both = ~np.isnan(before.lengths) & ~np.isnan(after.lengths)
        both &= chosen
        a, b = before.lengths[both], after.lengths[both]
        if len(a) < 2:
            return cls(before.mean, after.mean, -np.inf, np.inf, False)
        gain, error = _mean_error(b - a)
        sure = gain > max(SURE * error, least * float(a.mean()), LEAST_TOKENS)
        return cls(float(a.mean()), float(b.mean()), gain - 1.96 * error, gain + 1.96 * error, sure)


def _mean_error(values: np.ndarray) -> tuple[float, float]:
    """The mean of [n] values and its standard error."""
    return float(values.mean()), float(values.std(ddof=1)) / float(np.sqrt(len(values)))


def with_one(forms: Forms, one: Variation) -> Forms:
    """With this variation too, in place of one of the same cause."""
    return (*(v for v in forms if v.cause != one.cause), one)


def search(ask: Ask, variations: Sequence[Variation], low: Callable[[float], bool], start: Forms = ()) -> Forms:
    """The variations without any of which clearly less is accepted. `low`: whether two at once are worth trying."""
    forms = start
    while len(forms) < MOST:
        better = _best(ask, forms, [with_one(forms, v) for v in variations if v not in forms])
        if better is None and low(ask(forms, False).mean):
            better = _best(ask, forms, _pairs(ask, forms, variations))
        if better is None:
            break
        forms = better
    return _needed(ask, forms, start)


def _pairs(ask: Ask, forms: Forms, variations: Sequence[Variation]) -> list[Forms]:
    """Each of the few that make the answers likelier, with every other: accepted runs may need both, likelihood shows one."""
    ranked = sorted(variations, key=lambda v: -float(np.nanmean(ask(with_one(forms, v), True).likelihood)))
    partners = ranked[:PARTNERS]
    several = [(a, b) for a, b in combinations(variations, 2) if a.cause != b.cause and (a in partners or b in partners)]
    return [with_one(with_one(forms, a), b) for a, b in several]


def _best(ask: Ask, forms: Forms, others: Sequence[Forms]) -> Forms | None:
    """The best of several forms, if it is clearly better than this one."""
    now = ask(forms, True)
    ranked = sorted(others, key=lambda one: -ask(one, True).mean)
    likeliest = sorted(others, key=lambda one: -float(np.nanmean(ask(one, True).likelihood)))
    chosen = dict.fromkeys([*ranked[:PROMISING], *likeliest[:1]])
    promising = [one for one in chosen if Gain.of(now, ask(one, True)).high > 0]
    found = [one for one in promising if Gain.of(ask(forms, False), ask(one, False)).sure]
    if not found:
        return None
    most = max(ask(one, False).mean for one in found)
    return next(one for one in others if one in found and ask(one, False).mean >= most * (1 - ALIKE))


def _needed(ask: Ask, forms: Forms, kept: Iterable[Variation]) -> Forms:
    """Without those that what was found later made needless."""
    for one in [v for v in forms if v not in kept]:
        rest = tuple(v for v in forms if v is not one)
        if not Gain.of(ask(rest, False), ask(forms, False)).sure:
            forms = rest
    return forms
