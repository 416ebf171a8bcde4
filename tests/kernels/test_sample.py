"""Sampling's CUDA source, emulated on the CPU, chooses what engine.sampling.sample chooses, token for token."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernels.emulation.narrow_emulation import COMPILER
from kernels.emulation.sample_emulation import TYPES, Emulator, build
from torch import Tensor

from flashdraft.engine.noise import GUMBEL_MAX, gumbel
from flashdraft.engine.request import SamplingParams
from flashdraft.engine.sampling import RequestRows, SampleTable, sample
from flashdraft.errors import ConfigError
from flashdraft.kernels.sample import LEAST_ROWS, Machine, cut, gpu, kernels, sample_rows

# struct Row of sample_rows.cuh: best, score, -, -, -, arrived, listed, -, weights and counts of 2,048 bins, -.
ZERO_BETWEEN_CALLS = torch.tensor([*range(16), *range(32, 40), *range(48, 48 + 12 * 2048)])
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("g++, which compiles the emulation of the CUDA kernels, is not installed")
    return build(tmp_path_factory.mktemp("emulation"))


def peaked(rows: int, vocab: int) -> Tensor:
    x = 3 * torch.randn(rows, vocab)
    x[torch.arange(rows), torch.randint(vocab, (rows,))] += 8
    return x


def ties(rows: int, vocab: int) -> Tensor:
    return torch.randint(-3, 4, (rows, vocab)).float()


def zeros(rows: int, vocab: int) -> Tensor:
    return torch.where(torch.rand(rows, vocab) < 0.5, 0.0, -0.0)


def banned(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab).masked_fill(torch.rand(rows, vocab) < 0.7, -math.inf)


LOGITS: dict[str, Callable[[int, int], Tensor]] = {
    "peaked": peaked,
    "bell": lambda *shape: 2 * torch.randn(*shape),
    "nearly flat": lambda *shape: 1e-3 * torch.randn(*shape),
    "equal": lambda *shape: torch.full(shape, 1.5),
    "ties": ties,
    "zeros of both signs": zeros,
    "most banned": banned,
    "huge": lambda *shape: 3e4 * torch.randn(*shape),
    "uniform": lambda *shape: 40 * torch.rand(*shape),
}
FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "top-k and top-p": {"top_k": 50, "top_p": 0.7},
    "min-p and top-k": {"min_p": 0.01, "top_k": 7},
    "min-p and top-p": {"min_p": 0.02, "top_p": 0.95},
    "all": {"min_p": 0.001, "top_k": 300, "top_p": 0.99},
}
TEMPERATURES = (0.01, 0.3, 0.7, 1.0, 1.5, 5.0)


def table_of(params: list[SamplingParams], device: str = "cpu") -> SampleTable:
    """Rows with seeds, choices and output indices of their own."""
    draw = lambda: int(torch.randint(2**40, ()))  # noqa: E731
    return SampleTable.of(
        [RequestRows(p, seed=draw() << 20 | i, choice=i % 3, index=7 * i) for i, p in enumerate(params)], device
    )


def run(logits: Tensor, table: SampleTable, machine: Machine | None = None) -> Tensor:
    filters = table.filters
    return sample_rows(
        *(logits, table.temperature, table.limit, table.top_k, table.top_p, table.greedy, table.noise),
        use_top_k=filters.top_k,
        use_top_p=filters.top_p,
        use_limit=filters.limit,
        machine=machine,
    )


def guarded(x: Tensor, aligned: bool) -> Tensor:
    """The same rows with NaN around each; aligned: each begins at a multiple of 16 bytes."""
    width = (x.shape[1] + 23) // 8 * 8 + (0 if aligned else 1)
    around = torch.full((x.shape[0], width), torch.nan, dtype=x.dtype)
    start = 8 if aligned else 3
    around[:, start : start + x.shape[1]] = x
    return around[:, start : start + x.shape[1]]


def assert_same(emulator: Emulator, x: Tensor, table: SampleTable) -> None:
    aligned = bool(torch.rand(()) < 0.6)
    found = run(guarded(x, aligned), table, emulator.machine())
    assert found.tolist() == sample(x.float(), table).tolist()


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("filters", FILTERS)
def test_rows_of_every_kind_and_filter(library, kind, filters):
    case = list(LOGITS).index(kind) * len(FILTERS) + list(FILTERS).index(filters)
    torch.manual_seed(case)
    dtype, vocab = TYPES[case % 3], (5000, 2731, 4097)[case % 7 % 3]
    x = LOGITS[kind](len(TEMPERATURES), vocab).to(dtype)
    assert_same(Emulator(library), x, table_of([SamplingParams(temperature=t, **FILTERS[filters]) for t in TEMPERATURES]))


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 7, 8, 9, 31, 100, 1023, 2047, 2048, 2049, 3001])
def test_every_size_of_vocabulary(library, vocab):
    torch.manual_seed(vocab)
    for dtype in TYPES:
        x = torch.randn(3, vocab).to(dtype)
        params = [SamplingParams(temperature=1.0), SamplingParams(top_k=3, top_p=0.8), SamplingParams(top_p=0.5)]
        assert_same(Emulator(library), x, table_of(params))


def mixed() -> list[SamplingParams]:
    filters = itertools.cycle(FILTERS.values())
    sampled = [SamplingParams(temperature=t, **f) for t, f in zip((*TEMPERATURES, *TEMPERATURES), filters, strict=False)]
    return [SamplingParams(temperature=0.0), *sampled, SamplingParams(temperature=0.0, top_k=3)]


def test_rows_with_different_parameters_and_greedy_rows(library):
    for seed, kind in enumerate(("peaked", "ties", "zeros of both signs", "bell")):
        torch.manual_seed(seed)
        params = mixed()
        assert_same(Emulator(library), LOGITS[kind](len(params), 2500).bfloat16(), table_of(params))


def test_a_row_without_a_finite_best_logit_is_minus_one_and_others_are_not_touched(library):
    x = torch.randn(8, 2600)
    x[1] = -math.inf
    x[2, 2599] = math.inf
    x[3, 702] = math.nan
    x[4, 100], x[4, 200] = math.nan, math.inf
    x[5, 1:] = -math.inf
    x[6] = math.nan
    for filters in ("none", "top-p", "all"):
        for temperature in (0.0, 0.8):
            table = table_of([SamplingParams(temperature=temperature, **FILTERS[filters])] * 8)
            emulator = Emulator(library)
            assert_same(emulator, x, table)
            ids = run(x, table, emulator.machine()).tolist()
            assert [i for i, token in enumerate(ids) if token == -1] == [1, 2, 3, 4, 6]
            assert ids[5] == 0


@pytest.mark.parametrize("top_k", [1, 2, 2499, 2500, 2501, 10**6])
def test_top_k_around_its_ends(library, top_k):
    torch.manual_seed(top_k)
    for kind in ("bell", "ties", "most banned"):
        params = [SamplingParams(temperature=5.0, top_k=top_k), SamplingParams(temperature=5.0, top_k=top_k, top_p=0.99)]
        assert_same(Emulator(library), LOGITS[kind](2, 2500), table_of(params))


@pytest.mark.parametrize("top_p", [1e-9, 0.01, 0.5, 1 - 1e-9])
def test_top_p_around_its_ends(library, top_p):
    torch.manual_seed(3)
    for kind in ("bell", "ties", "peaked"):
        params = [SamplingParams(temperature=2.0, top_p=top_p), SamplingParams(temperature=2.0, top_k=99, top_p=top_p)]
        assert_same(Emulator(library), LOGITS[kind](2, 2500), table_of(params))


def test_more_tokens_in_the_bin_of_a_threshold_than_are_listed(library):
    torch.manual_seed(4)
    close = 1e-3 * torch.rand(4, 12000)
    close[:, 7] = 5.0
    params = [
        SamplingParams(temperature=1.0, top_k=5000),
        SamplingParams(temperature=1.0, top_p=0.995),
        SamplingParams(temperature=1.0, top_k=5000, top_p=0.993),
        SamplingParams(temperature=1.0, top_k=11000, top_p=0.999),
    ]
    crowded = torch.where(torch.rand(4, 12000) < 0.2, torch.randn(4, 12000) - 5, close)
    for x in (close, crowded):
        assert_same(Emulator(library), x, table_of(params))


def test_all_of_a_row_can_win(library):
    """The winner is as likely to be anywhere: no token is left out too early."""
    torch.manual_seed(5)
    winners = set()
    for _ in range(3):
        table = table_of([SamplingParams(temperature=1.0)] * 40)
        ids = run(torch.zeros(40, 9), table, Emulator(library).machine())
        assert ids.tolist() == sample(torch.zeros(40, 9), table).tolist()
        winners |= set(ids.tolist())
    assert winners == set(range(9))


def winners_of(library: ctypes.CDLL, row: Tensor, **filters: float) -> set[int]:
    """What 24 seeds choose from a row; the same as `sample`."""
    torch.manual_seed(1)
    x = row.expand(24, -1).contiguous()
    table = table_of([SamplingParams(temperature=1.0, **filters)] * 24)
    assert_same(Emulator(library), x, table)
    return set(sample(x, table).tolist())


def test_thresholds_among_many_tokens_of_one_bin(library):
    torch.manual_seed(8)
    row = -0.5 - torch.rand(1500) / 129  # nats below the best token: one bin is 1 / 128 wide there
    row[77] = 0.0
    order = row.argsort(descending=True).tolist()
    assert winners_of(library, row, top_k=3) == set(order[:3])
    assert winners_of(library, row, top_k=3, top_p=0.7) == set(order[:2])
    # The two left by top-k weigh 1 and 0.6; all of the bin would weigh 909.
    assert winners_of(library, row, top_k=2, top_p=0.6) == {77}


def test_a_threshold_among_many_tokens_as_good_as_equal(library):
    torch.manual_seed(9)
    row = -9e-7 * torch.rand(1500)
    row[77] = 0.0
    assert winners_of(library, row, top_k=3) == set(row.argsort(descending=True)[:3].tolist())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("filters", ["none", "top-p"])
def test_no_token_is_passed_over(library, dtype, filters):
    torch.manual_seed(10)
    tokens = [0, 3, 4, 7, 8, 1019, 1020, 1023, 1024, 2043, 2044, 2047, 2048, 2051, 2099]
    x = torch.full((len(tokens), 2100), -math.inf, dtype=dtype)
    x[:, 50] = 0.0
    x[torch.arange(len(tokens)), tokens] = 3.0
    table = table_of([SamplingParams(temperature=1.0, **FILTERS[filters])] * len(tokens))
    found = run(x, table, Emulator(library).machine()).tolist()
    assert found == sample(x.float(), table).tolist()
    assert sum(a == b for a, b in zip(found, tokens, strict=True)) > len(tokens) / 2


def test_what_top_p_needs_is_rounded_up(library):
    row = torch.tensor([0.0, -1.0])
    weights = 2.0**32, round(2**32 * math.exp(-1))
    assert winners_of(library, row, top_p=(weights[0] + 0.4) / sum(weights)) == {0, 1}
    assert winners_of(library, row, top_p=(weights[0] - 0.4) / sum(weights)) == {0}


def test_tokens_too_far_behind_to_win_still_weigh_in_top_p(library):
    row = torch.full((4000,), -22.0)
    row[5], row[9] = 0.0, -1.0
    # But for the other 3,998 tokens, of 1 / 2**32 each, the likeliest would be enough.
    top_p = (1 - 1e-8) / (1 + math.exp(-1))
    assert winners_of(library, row, top_p=top_p) == {5, 9}
    assert winners_of(library, row, top_p=top_p - 1e-6) == {5}


@pytest.mark.parametrize("filters", ["none", "top-p"])
def test_the_greatest_noise_wins_from_as_far_as_it_reaches(library, filters):
    token, index = 138, 26  # of seed 1: its uniform is the greatest there is
    noise = gumbel(1, 0, index, 200)
    assert noise[token].item() == pytest.approx(GUMBEL_MAX)
    params = replace(SamplingParams(temperature=1.0), **({"top_p": 1 - 1e-12} if filters == "top-p" else {}))
    table = SampleTable.of([RequestRows(params, rows=2, seed=1, index=index)], "cpu")
    table = replace(table, noise=table.noise[:1].expand(2, 4))
    x = torch.full((2, 200), -math.inf)
    x[:, 0] = 0.0
    x[:, token] = noise[0] - noise[token] + torch.tensor([0.001, -0.001])
    assert sample(x, table).tolist() == [token, 0]
    assert run(x, table, Emulator(library).machine()).tolist() == [token, 0]


def test_the_choice_does_not_depend_on_segments_batch_or_what_ran_before(library):
    torch.manual_seed(6)
    params = mixed()
    x, table = LOGITS["bell"](len(params), 9000).bfloat16(), table_of(params)
    emulator = Emulator(library, multiprocessors=1)
    first = run(x, table, emulator.machine())
    assert emulator.memory[:, ZERO_BETWEEN_CALLS].count_nonzero() == 0
    kept = replace(emulator.machine(), workspace=lambda _: emulator.memory)
    assert torch.equal(run(x, table, kept), first)
    many = Emulator(library, multiprocessors=100)
    assert torch.equal(run(x, table, many.machine()), first)
    assert {launch.segments for launch in emulator.launches} == {1}
    assert {launch.segments for launch in many.launches} == {5}
    for i in range(0, len(params), 5):
        one = table_of(params)  # whatever: only row i is taken, with the noise of the table
        row = slice(i, i + 1)
        fields = {name: getattr(table, name)[row] for name in ("temperature", "limit", "top_k", "top_p", "greedy", "noise")}
        assert run(x[row], replace(one, **fields), Emulator(library).machine()).item() == first[i]


@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (8, 262144), (128, 262144), (512, 262144), (3, 151936), (65535, 50257)])
def test_segments_cover_the_vocabulary(rows, vocab):
    segments, tokens = cut(rows, vocab, 132)
    assert tokens % 2048 == 0
    assert (segments - 1) * tokens < vocab <= segments * tokens
    assert rows * segments >= 2 * 132 or segments == math.ceil(vocab / 2048)


def test_only_the_kernels_of_filters_in_use_run():
    assert kernels(False, False) == ["find_best", "choose"]
    assert kernels(True, False) == ["find_best", "fill_bins", "settle_top_k", "choose"]
    assert kernels(False, True) == ["find_best", "fill_bins", "settle_top_p", "choose"]
    assert kernels(True, True) == ["find_best", "fill_bins", "settle_top_k", "settle_top_p", "choose"]


def test_no_rows_are_no_choices():
    table = table_of([SamplingParams()])
    empty = {name: getattr(table, name)[:0] for name in ("temperature", "limit", "top_k", "top_p", "greedy", "noise")}
    assert run(torch.zeros(0, 10), replace(table, **empty)).shape == (0,)


GEMMA4_VOCAB = 262144


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [8, 128])
@pytest.mark.parametrize("filters", FILTERS)
def test_on_the_gpu(rows, filters):
    torch.manual_seed(rows)
    for (kind, make), dtype in zip(LOGITS.items(), itertools.cycle(TYPES), strict=False):
        with torch.device("cuda"):  # 33 million random numbers a kind
            x = make(rows, GEMMA4_VOCAB).to(dtype)
        temperatures = itertools.islice(itertools.cycle(TEMPERATURES), rows)
        table = table_of([SamplingParams(temperature=t, **FILTERS[filters]) for t in temperatures], "cuda")
        assert run(x, table).tolist() == sample(x.float(), table).tolist(), kind


@pytest.mark.gpu
@needs_gpu
def test_in_a_graph_on_the_gpu():
    params = [SamplingParams(temperature=t, **f) for t, f in zip((0.7, 1.0) * 4, FILTERS.values(), strict=True)]
    table = table_of(params, "cuda")
    x = torch.zeros(8, GEMMA4_VOCAB, dtype=torch.bfloat16, device="cuda")
    run(x, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = run(x, table)
    for seed in range(5):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            x.copy_(peaked(*x.shape))
        graph.replay()
        assert ids.tolist() == sample(x.float(), table).tolist()


@pytest.mark.gpu
@needs_gpu
def test_a_workspace_is_not_made_in_a_capture():
    machine = gpu(torch.device("cuda", torch.cuda.current_device()))
    machine.workspace(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        machine.workspace(LEAST_ROWS)
        with pytest.raises(ConfigError, match="run it once before"):
            machine.workspace(1 << 16)
