"""The target's own choice at every row of a step: processed logits and keyed noise.

Shape letters: R rows of a batch (the anchor and proposals of every request), S rows that need more than an arg-max,
V vocabulary. A row's choice depends on its logits, parameters, seed, choice index and output index, and on nothing else of
the batch, bit for bit. Three things make that so: the noise is counted, not drawn (Philox 4x32-10); every sum over the
vocabulary is of integers, hence exact in any order; all else is element-wise or a maximum.

Filters and sampling look at a token's distance from the best logit in float32: tokens of equal distance are tied, and ties at a
threshold stay. Order, in float32: logit bias, min_tokens, penalties, grammar, temperature, min-p, top-k, top-p, Gumbel-max.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from flashdraft.engine.noise import GUMBEL_MAX, gumbel_of, noise_key, words_of_row, words_of_token
from flashdraft.engine.request import SamplingParams, TokenLogprobs
from flashdraft.errors import FlashdraftError, RequestError
from flashdraft.kernels.sample import sample_rows, supports
from flashdraft.kernels.step import Samples

ALL = 2**31  # top_k of a row that has none
WEIGHT_SCALE = 2.0**32  # weights of top-p are integers in units of exp(-22.2); 2**18 of them sum to 2**50, exact in float64
NEAR = 4.0  # nats: tokens this close to the best one get their noise first, to bound how far the winner can be
HEAD = 256  # likeliest tokens of a row that a CPU looks at first: 1.3 ms for 8 rows of 49,152, against 5 for all of them


class TokenCounts:
    """What the penalties know of a request: which tokens its prompt holds, how often its output holds each."""

    def __init__(
        self, prompt: Sequence[int], vocab_size: int, *, output: Sequence[int] = (), device: torch.device | str = "cpu"
    ) -> None:
        self.prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.prompt[torch.tensor(prompt, dtype=torch.long, device=device)] = True
        self.output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.commit(output)

    def commit(self, tokens: Sequence[int]) -> None:
        """Count committed tokens; rejected proposals never come here."""
        ids = torch.tensor(tokens, dtype=torch.long, device=self.output.device)
        self.output.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

    def at_rows(self, rows: int, proposals: Sequence[int]) -> Tensor:
        """Output counts int32 [rows, V] as row i sees them: committed tokens and proposals[:i]."""
        counts = self.output.repeat(rows, 1)
        pairs = [(row, token) for i, token in enumerate(proposals) for row in range(i + 1, rows)]
        if pairs:
            row, token = torch.tensor(pairs, device=counts.device).unbind(1)
            counts.index_put_((row, token), torch.ones_like(row, dtype=torch.int32), accumulate=True)
        return counts


@dataclass(frozen=True)
class RequestRows:
    """The rows of one request in a step: row i chooses output token `index + i` after `proposals[:i]`."""

    params: SamplingParams
    rows: int = 1
    index: int = 0  # output index of the first row
    seed: int = 0
    choice: int = 0
    proposals: Sequence[int] = ()  # at least rows - 1 of them where penalties are used
    stop_ids: frozenset[int] = frozenset()  # may not be chosen before min_tokens
    counts: TokenCounts | None = None  # needed where penalties are used
    mask: Tensor | None = None  # tokens the grammar allows, bool [rows, V]

    @property
    def plain(self) -> bool:
        """Whether the arg-max of the raw logits is the choice."""
        p = self.params
        early = self.index < p.min_tokens and bool(self.stop_ids)
        return p.greedy and not (p.logit_bias or early or p.penalised or self.mask is not None)

    def row(self, i: int) -> RequestRows:
        """Row i alone, for requests without penalties, which see the proposals before it."""
        mask = None if self.mask is None else self.mask[i : i + 1]
        return replace(self, rows=1, index=self.index + i, proposals=self.proposals[:0], mask=mask)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a logit_bias for a token that the target does not have. Raises RequestError."""
    beyond = [token for token in params.logit_bias if token >= vocab_size]
    if beyond:
        raise RequestError(f"logit_bias names token {beyond[0]}, but the target's vocabulary ends at {vocab_size - 1}")


def choose(logits: Tensor, batch: Sequence[RequestRows]) -> Tensor:
    """The target's choice at each row: logits [R, V] of any float type to tokens int64 [rows of the batch].

    Rows follow the batch in order; rows of padding may come after them. A row without a finite best logit (NaN or infinite
    logits, a grammar that allows nothing) gives -1, and `no_choice` says why: one request's trouble is not the batch's.
    """
    logits = logits[: sum(r.rows for r in batch)]
    work = [r for r in batch if not r.plain]
    if not work:
        tokens = arg_max(logits)
    elif len(work) == len(batch):
        tokens = _choose_processed(logits.to(torch.float32, copy=True), work)
    else:
        plain = [r.plain for r in batch for _ in range(r.rows)]
        places = torch.tensor([i for i, is_plain in enumerate(plain) if not is_plain], device=logits.device)
        tokens = arg_max(logits).index_copy(0, places, _choose_processed(logits[places].float(), work))
    return tokens


def arg_max(x: Tensor) -> Tensor:
    """The first of the likeliest tokens of each row, -1 where it is not finite."""
    best, tokens = x.max(-1)  # promises the first of equals, and is 2 to 5 times faster than argmax on a CPU
    return torch.where(best.isfinite(), tokens, -1)


def _choose_processed(x_SV: Tensor, work: Sequence[RequestRows]) -> Tensor:
    """Choices [S] of the rows of requests that are not plain, from their raw logits in float32, which it overwrites."""
    start = 0
    for r in work:
        _process(x_SV[start : start + r.rows], r)
        start += r.rows
    if all(r.params.greedy for r in work):
        return arg_max(x_SV)
    table = SampleTable.of(work, x_SV.device)
    return sample(x_SV, table) if x_SV.is_cuda else sample_sparse(x_SV, table)


def _process(x: Tensor, r: RequestRows) -> None:
    """Logit bias, min_tokens, penalties and grammar, in place on the request's rows x [rows, V], float32."""
    p = r.params
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=x.device)
        x[:, ids] += torch.tensor(list(p.logit_bias.values()), dtype=torch.float32, device=x.device)
    early = min(p.min_tokens - r.index, r.rows)
    if early > 0 and r.stop_ids:
        ids = torch.tensor([token for token in r.stop_ids if token < x.shape[1]], dtype=torch.long, device=x.device)
        x[:early].index_fill_(1, ids, -math.inf)
    if p.penalised:
        assert r.counts is not None
        _penalise(x, p, r.counts, r.proposals)
    if r.mask is not None:
        x.masked_fill_(~r.mask, -math.inf)


def _penalise(x: Tensor, p: SamplingParams, history: TokenCounts, proposals: Sequence[int]) -> None:
    """vLLM's penalties, in its order: repetition over prompt and output, then frequency and presence over output."""
    counts = history.at_rows(x.shape[0], proposals)
    used = counts > 0
    if p.repetition_penalty != 1:
        scaled = torch.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty)
        x.copy_(torch.where(used | history.prompt, scaled, x))
    if p.frequency_penalty:
        x -= p.frequency_penalty * counts
    if p.presence_penalty:
        x -= p.presence_penalty * used


def no_choice(logits: Tensor | None) -> FlashdraftError:
    """Why the raw logits [V] of one row left nothing to choose; None: raw logits alone decided, and are gone."""
    best = float(logits.float().max()) if logits is not None else math.nan
    if math.isfinite(best):
        return FlashdraftError("the grammar or the stop tokens held back by min_tokens leave no token to choose: relax them")
    return FlashdraftError(
        f"the target's logits are broken (their maximum is {best}): check its weights, or load it in bfloat16 or float32 if it "
        "runs in float16"
    )


def sample_line(p: SamplingParams, seed: int, choice: int) -> tuple[float, ...]:
    """What sampling needs of a request, as numbers that float64 holds exactly: the columns of SampleTable up to the index."""
    limit = 0.0 if p.greedy else -math.log(p.min_p) if p.min_p > 0 else math.inf
    low, high, choice, _ = noise_key(seed, choice, 0)
    return (1.0 if p.greedy else p.temperature, limit, min(p.top_k or ALL, ALL), p.top_p, p.greedy, low, high, choice)


@dataclass(frozen=True)
class SampleFilters:
    """Which filters any row of a batch uses: what none does is not computed."""

    top_k: bool
    top_p: bool
    limit: bool  # min-p or top-k, which come before top-p

    @classmethod
    def of(cls, batch: Iterable[SamplingParams]) -> SampleFilters:
        sampled = [p for p in batch if not p.greedy]
        return cls(
            top_k=any(p.top_k > 0 for p in sampled),
            top_p=any(p.top_p < 1 for p in sampled),
            limit=any(p.top_k > 0 or p.min_p > 0 for p in sampled),
        )


NO_FILTERS, ALL_FILTERS = SampleFilters(False, False, False), SampleFilters(True, True, True)
# How the rows of a batch choose: by the arg-max of raw logits (None), or sampled with these filters.
Choosing = SampleFilters | None


def choosing(batch: Iterable[SamplingParams]) -> Choosing:
    """One of three ways, so that there are few graphs: filters that a request does not use let everything through."""
    params = list(batch)
    if all(p.greedy for p in params):
        return None
    return ALL_FILTERS if any(vars(SampleFilters.of(params)).values()) else NO_FILTERS


@dataclass(frozen=True)
class SampleTable:
    """Sampling parameters of S rows as tensors, and which filters any of them uses."""

    temperature: Tensor  # float32 [S, 1]; 1 where greedy
    limit: Tensor  # float32 [S, 1]: nats below the best that min-p allows; 0 where greedy
    top_k: Tensor  # int64 [S, 1]; ALL where there is none
    top_p: Tensor  # float64 [S, 1]
    greedy: Tensor  # bool [S]
    noise: Tensor  # int64 [S, 4]: seed low, seed high, choice, index
    filters: SampleFilters

    COLUMNS: ClassVar[int] = 8  # of a sample_line

    @classmethod
    def of(cls, work: Sequence[RequestRows], device: torch.device | str) -> SampleTable:
        lines = [sample_line(r.params, r.seed, r.choice) for r in work for _ in range(r.rows)]
        index = [r.index + i for r in work for i in range(r.rows)]
        # One copy to the device; float64 holds every 32-bit word exactly.
        table = torch.tensor([(*line, i) for line, i in zip(lines, index, strict=True)], dtype=torch.float64)
        table = table.to(device, non_blocking=True)
        return cls.from_lines(table[:, :-1], table[:, -1].long(), SampleFilters.of(r.params for r in work))

    @classmethod
    def from_lines(cls, lines: Tensor, index: Tensor, filters: SampleFilters) -> SampleTable:
        """The table of rows with sample_lines float64 [S, COLUMNS] that choose output tokens index int64 [S]."""
        return cls(*Samples.from_lines(lines, index), filters)


def sample_on_device(logits: Tensor, table: SampleTable) -> Tensor:
    """`sample` of logits [S, V] of any float type, by our kernel where there is one: no wait, no data-dependent shape."""
    if not supports(logits):
        return sample(logits.float(), table)
    filters = table.filters
    return sample_rows(
        logits,
        table.temperature,
        table.limit,
        table.top_k,
        table.top_p,
        table.greedy,
        table.noise,
        use_top_k=filters.top_k,
        use_top_p=filters.top_p,
        use_limit=filters.limit,
    )


def sample(x_SV: Tensor, table: SampleTable) -> Tensor:
    """Choices int64 [S] from processed float32 logits, -1 where no logit is finite. No wait and no data-dependent shape."""
    best, first = x_SV.max(-1)
    below = (best[:, None] - x_SV).div_(table.temperature)
    score = gumbel_of(words_of_row(table.noise, x_SV.shape[1])) - below
    tokens = score.masked_fill_(below > _filter(below, table), -math.inf).max(-1).indices
    return torch.where(best.isfinite(), torch.where(table.greedy, first, tokens), -1)


def sample_sparse(x_SV: Tensor, table: SampleTable) -> Tensor:
    """The same choices as `sample`, with noise only for the tokens that can win.

    Noise is at most GUMBEL_MAX, so once the tokens near the best have their scores, whatever lies further below the best of
    these scores than that is out: about 3,000 tokens of 49,152 stay for a 135M target's prose at temperature 1.
    """
    best, first = x_SV.max(-1)
    finite = best.isfinite()
    if not bool(finite.all()):
        x_SV = x_SV.masked_fill(~finite[:, None], 0.0)
        best, first = x_SV.max(-1)
    below = (best[:, None] - x_SV).div_(table.temperature)
    limit = _filter_sparse(below, table)
    near, _ = _best_score(below, below <= limit.clamp(max=NEAR), table.noise)
    reach = (GUMBEL_MAX - near + 1e-3)[:, None]  # the margin covers float32 rounding of a score, under 1e-5
    _, tokens = _best_score(below, below <= torch.minimum(limit, reach), table.noise)
    return torch.where(finite, torch.where(table.greedy, first, tokens), -1)


def _best_score(below: Tensor, keep: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Highest score (noise less nats below the best) [S] among the kept tokens, and its token [S], the lowest of equals."""
    row, token = keep.nonzero(as_tuple=True)
    if row.numel() * 4 > keep.numel():  # a Philox call for each is more work than one for each four of all
        score = gumbel_of(words_of_row(noise, keep.shape[1])).sub_(below).masked_fill_(~keep, -math.inf)
        best, tokens = score.max(-1)
        return best, tokens
    score = gumbel_of(words_of_token(noise, row, token)) - below[row, token]
    count = torch.bincount(row, minlength=keep.shape[0])
    start = count.cumsum(0) - count
    padded = score.new_full((keep.shape[0], int(count.max())), -math.inf)
    padded[row, torch.arange(row.numel(), device=row.device) - start[row]] = score
    best, place = padded.max(-1)
    return best, token[start + place]


def _filter(below: Tensor, table: SampleTable) -> Tensor:
    """How many nats below the best [S, 1] a token may lie after min-p, top-k and top-p; ties at a threshold stay."""
    limit = table.limit
    if table.filters.top_k:
        limit = torch.minimum(limit, _threshold(below, torch.ones_like(below), table.top_k))
    if table.filters.top_p:
        weight, need = _weights(below, limit, table)
        nucleus = _threshold(below, weight, need)
        limit = torch.where(table.top_p < 1, torch.minimum(limit, nucleus), limit)
    return limit


def _filter_sparse(below: Tensor, table: SampleTable) -> Tensor:
    """The same limits as `_filter`, from the HEAD likeliest tokens of each row where these settle it."""
    limit = table.limit
    if not (table.filters.top_k or table.filters.top_p):
        return limit
    vocab = below.shape[1]
    head = below.topk(min(HEAD, vocab), largest=False).values
    if table.filters.top_k:
        unlimited = table.top_k >= vocab
        if bool((unlimited | (table.top_k <= head.shape[1])).all()):
            kth = head.gather(1, (table.top_k - 1).clamp(max=head.shape[1] - 1)).masked_fill_(unlimited, math.inf)
        else:
            kth = _threshold(below, torch.ones_like(below), table.top_k)
        limit = torch.minimum(limit, kth)
    if table.filters.top_p:
        if bool((limit < head[:, -1:]).all()):
            below = head  # all else is out already
        weight, need = _weights(below, limit, table)
        if below is not head:
            head_weight, _ = _weights(head, limit, table)
            if bool((head_weight.sum(-1, keepdim=True) >= need).all()):
                below, weight = head, head_weight
        nucleus = _threshold(below, weight, need)
        limit = torch.where(table.top_p < 1, torch.minimum(limit, nucleus), limit)
    return limit


def _weights(below: Tensor, limit: Tensor, table: SampleTable) -> tuple[Tensor, Tensor]:
    """Integers in proportion to the probabilities, 0 beyond the limit, and how much of their sum top-p needs; float64.

    Rows without top-p need as good as nothing, so that they do not make others look beyond the head.
    """
    weight = below.double().neg_().exp_().mul_(WEIGHT_SCALE).round_()
    if table.filters.limit:
        weight.masked_fill_(below > limit, 0.0)
    need = (weight.sum(-1, keepdim=True) * table.top_p).ceil_().clamp_(min=1.0)
    return weight, need.masked_fill_(table.top_p >= 1, 1.0)


def _threshold(below: Tensor, weight: Tensor, need: Tensor) -> Tensor:
    """The least t [S, 1] such that the tokens with below <= t weigh at least `need`, +inf if all together do not.

    A radix search, no sort: non-negative float32 numbers order as their bits do, so three histograms of the weights, each
    over the numbers that begin with the bits found so far, give t. Weights are integers, so that their sums are exact.
    """
    bits = below.view(torch.int32).long().bitwise_and_(0x7FFFFFFF)  # -0.0, from logits of both zeros, is 0
    found = torch.zeros_like(need, dtype=torch.long)
    for shift, width in ((20, 11), (10, 10), (0, 10)):
        digit = bits >> shift
        inside = weight if shift == 20 else weight.masked_fill(digit >> width != found, 0.0)
        bins = weight.new_zeros(weight.shape[0], 1 << width).scatter_add_(1, digit & ((1 << width) - 1), inside)
        total = bins.cumsum(-1)
        place = (total < need).sum(-1, keepdim=True).clamp_(max=(1 << width) - 1)
        need = need - (total - bins).gather(1, place)
        found = (found << width) | place
    return found.int().view(torch.float32).nan_to_num(nan=math.inf, posinf=math.inf)


def logprobs(logits: Tensor, tokens: Tensor, n: int) -> list[TokenLogprobs]:
    """Log-probabilities of tokens [R] and of the n likeliest at each row, from raw logits [R, V], computed in float32.

    Equal logits rank by token id, so that the list is the same on every device.
    """
    raw = logits.float()
    logs = raw.log_softmax(-1)
    chosen = logs.gather(1, tokens[:, None])[:, 0].tolist()
    top: list[list[tuple[int, float]]] = [[] for _ in chosen]
    if n > 0:
        least = raw.topk(min(n, raw.shape[1])).values[:, -1:]
        row, token = (raw >= least).nonzero(as_tuple=True)
        entries = zip(row.tolist(), token.tolist(), raw[row, token].tolist(), logs[row, token].tolist(), strict=True)
        for r, t, _, log in sorted(entries, key=lambda entry: (entry[0], -entry[2], entry[1])):
            if len(top[r]) < n:
                top[r].append((t, log))
    return [TokenLogprobs(t, c, tuple(u)) for t, c, u in zip(tokens.tolist(), chosen, top, strict=True)]
