"""Choices follow the processed distribution, and depend on their own row alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from flashdraft.engine.noise import gumbel
from flashdraft.engine.request import SamplingParams, TokenLogprobs
from flashdraft.engine.sampling import (
    RequestRows,
    SampleTable,
    TokenCounts,
    check_token_ids,
    choose,
    logprobs,
    no_choice,
    sample,
    sample_sparse,
)
from flashdraft.errors import RequestError

LOGITS = [2.0, 1.5, 1.5, 0.7, 0.0, -0.4, -1.0, -1.0, -2.5, -4.0]


def probabilities(
    logits: Sequence[float], p: SamplingParams, used: Sequence[int] = (), prompt: Sequence[int] = ()
) -> list[float]:
    """The distribution that a row is to follow, in plain Python: sorts and sums where sampling.py searches."""
    x = list(logits)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in set(used) | set(prompt):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
    for token in set(used):
        x[token] -= p.frequency_penalty * used.count(token) + p.presence_penalty
    weights = [math.exp((value - max(x)) / p.temperature) for value in x]
    weights = [w if w >= p.min_p * (1 - 1e-9) else 0.0 for w in weights]
    if p.top_k and p.top_k < len(x):
        kth = sorted(weights)[-p.top_k]
        weights = [w if w >= kth * (1 - 1e-9) else 0.0 for w in weights]
    if p.top_p < 1:
        total, mass, least = sum(weights), 0.0, 0.0
        for least in sorted(weights, reverse=True):
            mass += least
            if mass >= p.top_p * total:
                break
        weights = [w if w >= least * (1 - 1e-9) else 0.0 for w in weights]
    return [w / sum(weights) for w in weights]


def chi_square(tokens: Tensor, expected: list[float]) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).tolist()
    assert all(count == 0 for count, p in zip(counts, expected, strict=True) if p == 0)
    n = len(tokens)
    return sum((count - n * p) ** 2 / (n * p) for count, p in zip(counts, expected, strict=True) if p > 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 2},  # a tie at the threshold: three tokens stay
        {"top_k": 5, "temperature": 2.0},
        {"top_p": 0.3},
        {"top_p": 0.9, "temperature": 1.3},
        {"min_p": 0.25},
        {"min_p": 0.2, "top_k": 6, "top_p": 0.8, "temperature": 1.5},
        {"top_k": 4, "top_p": 0.7},  # top-p is of what top-k left
        {"frequency_penalty": 0.7},
        {"presence_penalty": 1.5, "temperature": 0.8},
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6, "frequency_penalty": -0.5, "presence_penalty": 0.4},
        {"logit_bias": {9: 5.0, 0: -100.0}, "top_p": 0.95},
    ],
)
def test_sampled_tokens_follow_the_processed_softmax(settings: dict[str, Any]) -> None:
    params = SamplingParams(**settings)
    prompt, output = [8, 8, 3], [1, 1, 6, 1]
    rows = RequestRows(params, rows=6000, seed=11, counts=TokenCounts(prompt, len(LOGITS), output=output))
    tokens = choose(torch.tensor(LOGITS).expand(6000, -1), [rows])
    assert chi_square(tokens, probabilities(LOGITS, params, output, prompt)) < 34  # 9 degrees of freedom: p = 1e-4


def test_tokens_over_seeds_follow_the_softmax_too() -> None:
    params = SamplingParams(temperature=1.2)
    tokens = choose(torch.tensor(LOGITS).expand(4000, -1), [RequestRows(params, seed=seed) for seed in range(4000)])
    assert chi_square(tokens, probabilities(LOGITS, params)) < 34


def test_the_choice_is_the_arg_max_of_scaled_logits_and_gumbel_noise() -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)) * 3
    rows = RequestRows(SamplingParams(temperature=0.7), rows=3, seed=2**64 - 5, choice=2, index=40)
    expected = [int((logits[i] / 0.7 + gumbel(2**64 - 5, 2, 40 + i, 5000)).argmax()) for i in range(3)]
    assert choose(logits, [rows]).tolist() == expected


PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 40},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.9999, "temperature": 3.0},
    {"min_p": 0.02},
    {"top_k": 300, "top_p": 0.99, "min_p": 0.0001, "temperature": 1.4},
    {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.1},
]


def rough_logits(rows: int, vocab: int, seed: int) -> Tensor:
    """Rows of every sharpness, rounded to bfloat16 so that ties abound, with some tokens impossible."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, vocab, generator=g) * torch.logspace(-1, 1, rows)[:, None]
    x[torch.rand(rows, vocab, generator=g) < 0.05] = -math.inf
    return x.bfloat16()


@pytest.mark.parametrize("vocab", [1, 7, 200, 3001])
def test_noise_for_the_candidates_alone_gives_the_dense_choices(vocab: int) -> None:
    for number, settings in enumerate(PARAMS):
        params = SamplingParams(**settings)
        if params.greedy:
            continue
        x = rough_logits(24, vocab, number).float().nan_to_num(neginf=-1e4 if vocab == 1 else -math.inf)
        table = SampleTable.of([RequestRows(params, rows=24, seed=number)], "cpu")
        assert sample_sparse(x, table).equal(sample(x, table)), settings


def test_a_row_chooses_the_same_alone_and_in_any_batch() -> None:
    vocab, rows = 3001, 5
    logits = rough_logits(rows * len(PARAMS), vocab, 0)
    batch = [
        RequestRows(
            SamplingParams(**settings),
            rows=rows,
            index=3 * i,
            seed=i,
            proposals=[i, i, 5, 6],
            counts=TokenCounts([1, 2], vocab, output=[7, 7]),
        )
        for i, settings in enumerate(PARAMS)
    ]
    together = choose(logits, batch)
    backwards = choose(logits.view(-1, rows, vocab).flip(0).flatten(0, 1), batch[::-1]).view(-1, rows).flip(0).flatten()
    assert backwards.equal(together)
    for i, r in enumerate(batch):
        of_request = slice(i * rows, (i + 1) * rows)
        assert choose(logits[of_request], [r]).equal(together[of_request]), PARAMS[i]
        single = RequestRows(
            r.params, index=r.index + 2, seed=r.seed, counts=TokenCounts([1, 2], vocab, output=[7, 7, *r.proposals[:2]])
        )
        assert int(choose(logits[i * rows + 2][None], [single])) == int(together[i * rows + 2]), PARAMS[i]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_chooses_what_the_cpu_chooses_also_from_a_graph() -> None:
    logits = rough_logits(8, 3001, 0)
    for params in (SamplingParams(**options) for options in PARAMS):
        on_cpu, on_gpu = (
            RequestRows(params, rows=8, seed=3, proposals=[5] * 7, counts=TokenCounts([1, 2], 3001, output=[7], device=device))
            for device in ("cpu", "cuda")
        )
        assert choose(logits.cuda(), [on_gpu]).tolist() == choose(logits, [on_cpu]).tolist(), params
    x, table = logits.cuda().float(), SampleTable.of([RequestRows(SamplingParams(top_k=50, top_p=0.9), rows=8)], "cuda")
    expected = sample(x, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chosen = sample(x, table)
    graph.replay()
    assert chosen.equal(expected)


def test_seed_choice_and_index_each_change_the_sample_and_nothing_else_does() -> None:
    logits = torch.zeros(64, 1000)

    def text(**keys: int) -> list[int]:
        return choose(logits, [RequestRows(SamplingParams(), rows=64, **keys)]).tolist()

    base = text(seed=5)
    assert text(seed=5) == base
    assert text(seed=5, index=1)[:-1] == base[1:]
    for other in (text(seed=6), text(seed=5, choice=1), text(seed=5 + 2**32), text(seed=5, index=64)):
        assert sum(a == b for a, b in zip(base, other, strict=True)) < 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_maxima(dtype: torch.dtype) -> None:
    logits = torch.zeros(9, 700, dtype=dtype)
    logits[:, 300:] = 1.0
    logits[1, [5, 699]] = 2.0
    logits[2] = -math.inf
    logits[2, 44] = -7.0
    greedy = RequestRows(SamplingParams(temperature=0), rows=8)
    assert choose(logits, [greedy]).tolist() == [300, 5, 44, 300, 300, 300, 300, 300]  # and a row of padding is left out
    biased = RequestRows(SamplingParams(temperature=0, logit_bias={400: 0.0}), rows=8)
    assert choose(logits, [biased]).tolist() == choose(logits, [greedy]).tolist()


def test_greedy_rows_allocate_no_float32_copy_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("copied")

    logits = torch.eye(8, 50, dtype=torch.bfloat16)
    monkeypatch.setattr(Tensor, "float", forbidden)
    monkeypatch.setattr(Tensor, "to", forbidden)
    assert choose(logits, [RequestRows(SamplingParams(temperature=0), rows=4)] * 2).tolist() == list(range(8))


def test_equal_logits_are_all_kept_at_a_threshold() -> None:
    logits = torch.zeros(2000, 8)
    for settings in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        tokens = choose(logits, [RequestRows(SamplingParams(**settings), rows=2000)])
        assert chi_square(tokens, [1 / 8] * 8) < 30, settings


def test_zeros_of_both_signs_are_equal() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -30.0]]).repeat(2000, 1)
    for params in (SamplingParams(top_k=1), SamplingParams(top_p=0.01)):
        table = SampleTable.of([RequestRows(params, rows=2000)], "cpu")
        assert chi_square(sample(logits, table), [0.25] * 4 + [0]) < 22
        assert sample_sparse(logits, table).equal(sample(logits, table))


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 10**6}, {"top_k": 10**18}, {"top_p": 1e-9}, {"temperature": 1e-4}, {"temperature": 100.0}, {"min_p": 1.0}],
)
def test_extreme_parameters_choose_a_possible_token(settings: dict[str, Any]) -> None:
    logits = rough_logits(12, 400, 3)
    tokens = choose(logits, [RequestRows(SamplingParams(**settings), rows=12)])
    assert logits.gather(1, tokens[:, None]).isfinite().all()
    if settings.get("top_p") or settings.get("temperature") == 1e-4 or settings.get("min_p"):
        assert logits.gather(1, tokens[:, None])[:, 0].equal(logits.amax(-1))


def test_a_single_possible_token_is_chosen_whatever_the_parameters() -> None:
    logits = torch.full((2, 300), -math.inf)
    logits[:, 123] = -5.0
    for settings in PARAMS:
        rows = RequestRows(SamplingParams(**settings), rows=2, counts=TokenCounts([123], 300, output=[123]))
        assert choose(logits, [rows]).tolist() == [123, 123]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3, top_p=0.9)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_choose_nothing_and_say_why(params: SamplingParams, bad: float) -> None:
    logits = torch.zeros(3, 20)
    logits[1, 7] = bad
    assert choose(logits, [RequestRows(params, rows=3)])[1] == -1
    assert f"logits are broken (their maximum is {bad})" in str(no_choice(logits[1]))
    healthy = RequestRows(SamplingParams(temperature=0))
    assert choose(logits, [healthy, RequestRows(params), healthy]).tolist() == [0, -1, 0]


def test_impossible_rows_name_the_grammar() -> None:
    for params in (SamplingParams(temperature=0), SamplingParams()):
        rows = RequestRows(params, mask=torch.zeros(1, 20, dtype=torch.bool))
        assert choose(torch.zeros(1, 20), [rows]).tolist() == [-1]
    assert "grammar" in str(no_choice(torch.zeros(20)))


def test_a_grammar_masks_each_row_by_itself() -> None:
    logits = torch.arange(6.0).expand(3, 6)
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    for temperature in (0.0, 0.01):
        assert choose(logits, [RequestRows(SamplingParams(temperature=temperature), rows=3, mask=mask)]).tolist() == [1, 3, 5]


def test_min_tokens_holds_back_stop_ids_by_the_row_s_own_index() -> None:
    logits = torch.zeros(4, 10)
    logits[:, 9], logits[:, 4], logits[:, 2] = 3.0, 2.0, 1.0
    rows = RequestRows(SamplingParams(temperature=0, min_tokens=7), rows=4, index=5, stop_ids=frozenset({9, 4, 5000}))
    assert choose(logits, [rows]).tolist() == [2, 2, 9, 9]
    late = RequestRows(SamplingParams(temperature=0, min_tokens=7), rows=4, index=7, stop_ids=frozenset({9}))
    assert late.plain
    assert choose(logits, [late]).tolist() == [9] * 4


def test_logit_bias_of_100_forces_and_of_minus_100_bans_but_min_tokens_is_stronger() -> None:
    logits = torch.tensor([[30.0, 20.0, 10.0, 0.0]])
    for temperature in (0.0, 1.0):

        def pick(bias: dict[int, float], temperature: float = temperature, **more: Any) -> int:
            params = SamplingParams(temperature=temperature, logit_bias=bias, min_tokens=1 if more else 0)
            return int(choose(logits, [RequestRows(params, **more)]))

        assert pick({3: 100.0}) == 3
        assert pick({0: -100.0, 1: -100.0}) == 2
        assert pick({0: 100.0}, stop_ids=frozenset({0})) in (1, 2)


def test_penalties_see_the_output_and_the_proposals_before_the_row() -> None:
    logits = torch.tensor([3.0, 2.9, 2.8, 0.0, -1.0]).repeat(4, 1)
    counts = TokenCounts([4], 5, output=[0])
    rows = RequestRows(SamplingParams(temperature=0, presence_penalty=0.15), rows=4, proposals=[1, 1, 2], counts=counts)
    assert choose(logits, [rows]).tolist() == [1, 0, 0, 0]  # token 0 at 2.85 loses to 1 at 2.9 until 1 is proposed
    rows = RequestRows(SamplingParams(temperature=0, frequency_penalty=0.12), rows=4, proposals=[0, 1, 1], counts=counts)
    # token 0: 2.88, then 2.76; token 1: 2.9, 2.9, then 2.78, 2.66; token 2: 2.8
    assert choose(logits, [rows]).tolist() == [1, 1, 2, 2]
    assert counts.output.tolist() == [1, 0, 0, 0, 0]  # proposals are not counted for good


def test_penalties_are_vllm_s_in_its_order() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logprobs=1)
    logits = torch.tensor([[4.0, -1.0, 4.0, 0.9]])
    # 0: output twice, 4 / 2 - 2 * 0.5 - 0.25 = 0.75; 1: output once, -1 * 2 - 0.75; 2: prompt only, 4 / 2 = 2; 3: unseen, 0.9.
    counts = TokenCounts([2], 4, output=[0, 0, 1])
    assert choose(logits, [RequestRows(params, counts=counts)]).tolist() == [2]
    counts = TokenCounts([], 4, output=[0, 0, 2, 2])
    assert choose(logits, [RequestRows(params, counts=counts)]).tolist() == [3]


@given(
    output=st.lists(st.integers(0, 11), max_size=6),
    proposals=st.lists(st.integers(0, 11), max_size=7),
    accepted=st.integers(0, 7),
)
@hypothesis_settings(max_examples=60, deadline=None)
def test_counts_at_a_row_are_those_of_a_step_without_a_draft(output: list[int], proposals: list[int], accepted: int) -> None:
    kept = proposals[:accepted]
    in_block = TokenCounts([1], 12, output=output).at_rows(len(proposals) + 1, proposals)[len(kept)]
    one_by_one = TokenCounts([1], 12, output=output)
    for token in kept:
        one_by_one.commit([token])
    assert in_block.equal(one_by_one.at_rows(1, ())[0])


@given(
    temperature=st.floats(0.05, 4),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    # Apart by so much that float32 tells their distances from the best apart; what happens closer is the next test's.
    values=st.lists(st.integers(-9 * 1024, 9 * 1024).map(lambda n: n / 1024), min_size=10, max_size=10),
)
@hypothesis_settings(max_examples=80, deadline=None)
def test_only_tokens_of_the_reference_distribution_are_chosen(
    temperature: float, top_k: int, top_p: float, min_p: float, values: list[float]
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = choose(torch.tensor(values).expand(200, -1), [RequestRows(params, rows=200)])
    generous = SamplingParams(temperature=temperature, top_k=top_k, top_p=min(top_p + 1e-6, 1), min_p=max(min_p - 1e-6, 0))
    allowed = probabilities(values, generous)
    assert all(allowed[token] > 0 for token in tokens.unique().tolist())


def test_logits_whose_distances_from_the_best_are_equal_in_float32_are_tied() -> None:
    logits = torch.tensor([2.0, 1.0, 2.0**-24, 0.0])
    assert logits[2] > logits[3]
    assert logits[0] - logits[2] == logits[0] - logits[3]
    params = SamplingParams(temperature=4.0, top_k=3, seed=1)
    assert choose(logits.expand(400, -1), [RequestRows(params, rows=400)]).unique().tolist() == [0, 1, 2, 3]


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    check_token_ids(SamplingParams(logit_bias={99: 1.0}), 100)
    with pytest.raises(RequestError, match="token 100, but the target's vocabulary ends at 99"):
        check_token_ids(SamplingParams(logit_bias={100: 1.0}), 100)


def test_logprobs_are_of_the_raw_logits_likeliest_first() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0], [0.0, -math.inf, 5.0, 1.0]])
    logs = logits.log_softmax(-1)
    first, second = logprobs(logits, torch.tensor([2, 3]), 3)
    assert first == TokenLogprobs(
        2, float(logs[0, 2]), ((1, float(logs[0, 1])), (3, float(logs[0, 3])), (2, float(logs[0, 2])))
    )
    assert (second.token, second.logprob) == (3, float(logs[1, 3]))
    assert [token for token, _ in second.top] == [2, 3, 0]
    assert logprobs(logits, torch.tensor([2, 3]), 0)[0] == TokenLogprobs(2, float(logs[0, 2]))
    assert len(logprobs(logits, torch.tensor([2, 3]), 20)[0].top) == 4


def test_logprobs_are_the_same_alone_and_in_a_batch_with_ties_by_token_id() -> None:
    logits = rough_logits(9, 3001, 1)
    tokens = logits.argmax(-1)
    together = logprobs(logits, tokens, 20)
    assert [logprobs(logits[i : i + 1], tokens[i : i + 1], 20)[0] for i in range(9)] == together
    for entry in together:
        assert sorted(entry.top, key=lambda pair: (-pair[1], pair[0])) == list(entry.top)
        assert len(entry.top) == 20
    assert [token for token, _ in logprobs(torch.zeros(1, 500), torch.tensor([3]), 4)[0].top] == [0, 1, 2, 3]
