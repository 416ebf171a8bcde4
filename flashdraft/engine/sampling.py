"""The target's own choice at every row of a step: processed logits and keyed noise.

Shape letters: R rows of a batch (the anchor and proposals of every request), S rows that need more than an arg-max,
V vocabulary. A row's choice depends on its logits, parameters, seed, choice index and output index, and on nothing else of
the batch, bit for bit. Three things make that so: the noise is counted, not drawn (Philox 4x32-10); every sum over the
vocabulary is of integers, hence exact in any order; all else is element-wise or a maximum.

Order, in float32: logit bias, min_tokens, penalties, grammar, temperature, min-p, top-k, top-p, Gumbel-max.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashdraft.engine.request import SamplingParams, TokenLogprobs
from flashdraft.errors import FlashdraftError, RequestError

WORD = 0xFFFFFFFF
UNIFORM_BITS = 23  # the most for which (x + 1/2) / 2**bits is exact in float32, so neither 0 nor 1
GUMBEL_MAX = -math.log(-math.log1p(-(2.0 ** -(UNIFORM_BITS + 1))))  # 16.6, at the largest uniform
WEIGHT_SCALE = 2.0**32  # weights of top-p are integers in units of exp(-22.2); 2**18 of them sum to 2**50, exact in float64
NEAR = 4.0  # nats: tokens this close to the best one get their noise first, to bound how far the winner can be
NARROW = (6.0, 12.0)  # nats: where a top-k or top-p threshold is looked for before the whole row (CPU)


# --- noise --------------------------------------------------------------------------------------------------------------


def philox(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10 (Salmon et al., SC'11): four counter words and two key words to four random words.

    Words are int64 tensors of values below 2**32 that broadcast together: torch has no 32-bit multiply-high, and the low
    64 bits of an int64 product are those of the unsigned one.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((p1 >> 32) ^ (c1 ^ k0)).bitwise_and_(WORD)  # >> keeps the sign: the mask drops it
        c2 = ((p0 >> 32) ^ (c3 ^ k1)).bitwise_and_(WORD)
        c1, c3 = p1.bitwise_and_(WORD), p0.bitwise_and_(WORD)
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def _uniform(words: Tensor) -> Tensor:
    """Random words to float64 uniforms, the middles of 2**23 equal parts of (0, 1)."""
    return (words >> (32 - UNIFORM_BITS)).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)


def _gumbel(words: Tensor) -> Tensor:
    """Random words to float32 Gumbel noise. The logs are float64: rounded to float32 they hardly differ between devices."""
    return _uniform(words).log_().neg_().log_().neg_().float()


def _words_of_row(noise: Tensor, vocab: int) -> Tensor:
    """Random words [S, vocab] of the rows with noise keys [S, 4] (seed low, seed high, choice, index).

    Token t is lane t & 3 of the counter (t >> 2, index, choice, 0): four tokens share a Philox call, a quarter of the work.
    """
    low, high, choice, index = noise[:, :, None].unbind(1)
    block = torch.arange((vocab + 3) // 4, device=noise.device)[None]
    lanes = philox((block, index, choice, torch.zeros_like(index)), (low, high))
    return torch.stack(lanes, dim=-1).flatten(1)[:, :vocab]


def _words_of_token(noise: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """Random words [N] of single tokens: token[i] of row[i]. The same words as _words_of_row gives."""
    low, high, choice, index = noise[row].unbind(1)
    w0, w1, w2, w3 = philox((token >> 2, index, choice, torch.zeros_like(index)), (low, high))
    lane = token & 3
    return torch.where(lane < 2, torch.where(lane == 0, w0, w1), torch.where(lane == 2, w2, w3))


def _noise_key(seed: int, choice: int, index: int) -> Tensor:
    return torch.tensor([[seed & WORD, (seed >> 32) & WORD, choice, index]])


def philox_uniform(seed: int, choice: int, index: int, vocab: int) -> Tensor:
    """The uniforms, float32 [vocab] in the open (0, 1), behind the noise of one output token."""
    return _uniform(_words_of_row(_noise_key(seed, choice, index), vocab))[0].float()


def gumbel(seed: int, choice: int, index: int, vocab: int) -> Tensor:
    """The Gumbel noise, float32 [vocab], of one output token: `choice` of n answers, token `index` of its output."""
    return _gumbel(_words_of_row(_noise_key(seed, choice, index), vocab))[0]


# --- rows ---------------------------------------------------------------------------------------------------------------


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
    def penalised(self) -> bool:
        p = self.params
        return p.presence_penalty != 0 or p.frequency_penalty != 0 or p.repetition_penalty != 1

    @property
    def plain(self) -> bool:
        """Whether the arg-max of the raw logits is the choice."""
        p = self.params
        early = self.index < p.min_tokens and bool(self.stop_ids)
        return p.greedy and not (p.logit_bias or early or self.penalised or self.mask is not None)


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Refuse a logit_bias for a token that the target does not have. Raises RequestError."""
    beyond = [token for token in params.logit_bias if token >= vocab_size]
    if beyond:
        raise RequestError(f"logit_bias names token {beyond[0]}, but the target's vocabulary ends at {vocab_size - 1}")


def choose(logits: Tensor, batch: Sequence[RequestRows], *, check: bool = True) -> Tensor:
    """The target's choice at each row: logits [R, V] of any float type to tokens int64 [rows of the batch].

    Rows follow the batch in order; rows of padding may come after them. A row without a finite best logit (NaN or infinite
    logits, a grammar that allows nothing) raises FlashdraftError. `check=False` gives -1 there instead and spares a GPU
    the wait; the caller then has to look.
    """
    total = sum(r.rows for r in batch)
    logits = logits[:total]
    work = [r for r in batch if not r.plain]
    if len(work) < len(batch):
        best, tokens = logits.max(-1)  # the first of equal maxima; 2 to 5 times faster than argmax on a CPU
        tokens = torch.where(best.isfinite(), tokens, -1)
    else:
        tokens = torch.empty(total, dtype=torch.long, device=logits.device)
    if work:
        chosen = _choose_processed(logits, batch, work)
        places = None if len(work) == len(batch) else _places(batch, logits.device)
        tokens = chosen if places is None else tokens.index_copy(0, places, chosen)
    if check and bool((tokens < 0).any()):
        _refuse(logits, tokens)
    return tokens


def _places(batch: Sequence[RequestRows], device: torch.device) -> Tensor:
    """Numbers of the rows that are not plain."""
    places: list[int] = []
    start = 0
    for r in batch:
        if not r.plain:
            places.extend(range(start, start + r.rows))
        start += r.rows
    return torch.tensor(places, device=device)


def _choose_processed(logits: Tensor, batch: Sequence[RequestRows], work: Sequence[RequestRows]) -> Tensor:
    """Choices [S] of the requests in `work`, in order."""
    if len(work) == len(batch):
        x_SV = logits.to(torch.float32, copy=True)
    else:
        x_SV = logits[_places(batch, logits.device)].float()
    start = 0
    for r in work:
        _process(x_SV[start : start + r.rows], r)
        start += r.rows
    if all(r.params.greedy for r in work):
        best, tokens = x_SV.max(-1)
        return torch.where(best.isfinite(), tokens, -1)
    table = SampleTable.of(work, logits.device)
    return sample(x_SV, table) if logits.is_cuda else sample_sparse(x_SV, table)


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
    if r.penalised:
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


def _refuse(logits: Tensor, tokens: Tensor) -> None:
    row = int((tokens < 0).nonzero()[0])
    best = float(logits[row].float().max())
    if math.isfinite(best):
        raise FlashdraftError(f"the grammar or the stop tokens held back by min_tokens leave row {row} no token to choose")
    raise FlashdraftError(
        f"the target's logits in row {row} are broken (their maximum is {best}): check its weights, or load it in bfloat16 "
        "or float32 if it runs in float16"
    )


# --- sampling -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleTable:
    """Sampling parameters of S rows as tensors, and which filters any of them uses."""

    temperature: Tensor  # float32 [S, 1]; 1 where greedy
    limit: Tensor  # float32 [S, 1]: nats below the best that min-p allows; 0 where greedy
    top_k: Tensor  # int64 [S, 1]; 2**31 for all
    top_p: Tensor  # float64 [S, 1]
    greedy: Tensor  # bool [S]
    noise: Tensor  # int64 [S, 4]: seed low, seed high, choice, index
    use_top_k: bool
    use_top_p: bool

    @classmethod
    def of(cls, work: Sequence[RequestRows], device: torch.device | str) -> SampleTable:
        lines: list[tuple[float, ...]] = []
        for r in work:
            p = r.params
            limit = 0.0 if p.greedy else -math.log(p.min_p) if p.min_p > 0 else math.inf
            line = (1.0 if p.greedy else p.temperature, limit, p.top_k or 2.0**31, p.top_p, p.greedy, r.seed & WORD, r.seed >> 32)
            lines.extend((*line, r.choice, r.index + i) for i in range(r.rows))
        # One copy to the device; float64 holds every 32-bit word exactly.
        table = torch.tensor(lines, dtype=torch.float64).to(device, non_blocking=True)
        sampled = [r.params for r in work if not r.params.greedy]
        return cls(
            temperature=table[:, 0:1].float(),
            limit=table[:, 1:2].float(),
            top_k=table[:, 2:3].long(),
            top_p=table[:, 3:4],
            greedy=table[:, 4] > 0,
            noise=table[:, 5:9].long(),
            use_top_k=any(p.top_k > 0 for p in sampled),
            use_top_p=any(p.top_p < 1 for p in sampled),
        )


def sample(x_SV: Tensor, table: SampleTable) -> Tensor:
    """Choices int64 [S] from processed float32 logits, -1 where no logit is finite. No wait and no data-dependent shape."""
    best, first = x_SV.max(-1)
    below = (best[:, None] - x_SV).div_(table.temperature)
    limit = _filter(below, table, narrow=False)
    score = _gumbel(_words_of_row(table.noise, x_SV.shape[1])) - below
    tokens = score.masked_fill_(below > limit, -math.inf).max(-1).indices
    return torch.where(best.isfinite(), torch.where(table.greedy, first, tokens), -1)


def sample_sparse(x_SV: Tensor, table: SampleTable) -> Tensor:
    """The same choices as `sample`, with noise only for the tokens that can win.

    Noise is at most GUMBEL_MAX, so once the tokens near the best have their scores, whatever lies further below the best of
    these scores than that is out: about 3,000 tokens of 49,152 stay for a 135M target's prose at temperature 1.
    """
    best, first = x_SV.max(-1)
    finite = best.isfinite()
    below = (best[:, None] - x_SV).div_(table.temperature).nan_to_num_(nan=0.0)
    limit = _filter(below, table, narrow=True)
    near, _ = _best_score(below, below <= limit.clamp(max=NEAR), table.noise)
    reach = (GUMBEL_MAX - near + 1e-3)[:, None]  # the margin covers float32 rounding of a score, under 1e-5
    _, tokens = _best_score(below, below <= torch.minimum(limit, reach), table.noise)
    return torch.where(finite, torch.where(table.greedy, first, tokens), -1)


def _best_score(below: Tensor, keep: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Highest score (noise less nats below the best) [S] among the kept tokens, and its token [S], the lowest of equals."""
    row, token = keep.nonzero(as_tuple=True)
    if row.numel() * 4 > keep.numel():  # a Philox call for each is more work than one for each four of all
        score = _gumbel(_words_of_row(noise, keep.shape[1])).sub_(below).masked_fill_(~keep, -math.inf)
        best, tokens = score.max(-1)
        return best, tokens
    score = _gumbel(_words_of_token(noise, row, token)) - below[row, token]
    count = keep.sum(-1)
    place = torch.arange(row.numel(), device=row.device) - (count.cumsum(0) - count)[row]
    padded = score.new_full((keep.shape[0], int(count.max())), -math.inf)
    padded[row, place] = score
    best, place = padded.max(-1)
    return best, token[count.cumsum(0) - count + place]


def _filter(below: Tensor, table: SampleTable, *, narrow: bool) -> Tensor:
    """How many nats below the best [S, 1] a token may lie after min-p, top-k and top-p; ties at a threshold stay."""
    limit = table.limit
    if table.use_top_k:
        kth = _threshold(below, None, table.top_k, narrow)
        limit = torch.minimum(limit, kth)
    if table.use_top_p:
        weight = below.double().neg_().exp_().mul_(WEIGHT_SCALE).round_().masked_fill_(below > limit, 0.0)
        need = (weight.sum(-1, keepdim=True) * table.top_p).ceil_().clamp_(min=1.0)
        nucleus = _threshold(below, weight, need, narrow)
        limit = torch.where(table.top_p < 1, torch.minimum(limit, nucleus), limit)
    return limit


def _threshold(below: Tensor, weight: Tensor | None, need: Tensor, narrow: bool) -> Tensor:
    """The least t [S, 1] such that the tokens with below <= t weigh at least `need`, +inf if all together do not.

    Weights (1 each if None) are integers, so that their sums are exact. By bisection over the bits of float32, whose order
    among non-negative numbers is that of integers: 31 passes, no sort. `narrow` first tries the tokens near the best alone.
    """
    if narrow:
        for reach in NARROW:
            keep = below <= reach
            mass = keep.sum(-1, keepdim=True) if weight is None else weight.masked_fill(~keep, 0.0).sum(-1, keepdim=True)
            if bool((mass >= need).all()):
                width = int(keep.sum(-1).max())
                below, order = below.topk(width, largest=False, sorted=False)
                weight = None if weight is None else weight.gather(1, order)
                break
    key = below.view(torch.int32)
    low = torch.zeros_like(key[:, :1])
    high = torch.full_like(low, 0x7F800000)  # +inf
    for _ in range(31):
        middle = low + ((high - low) >> 1)
        kept = key <= middle
        mass = kept.sum(-1, keepdim=True) if weight is None else (weight * kept).sum(-1, keepdim=True)
        enough = mass >= need
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    return high.view(torch.float32)


# --- log-probabilities --------------------------------------------------------------------------------------------------


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
