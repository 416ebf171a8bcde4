"""The noise of sampling is Philox 4x32-10, keyed by seed, choice and output index alone."""

from __future__ import annotations

import math

import pytest
import torch

from flashdraft.engine.noise import (
    GUMBEL_MAX,
    WORD,
    gumbel,
    gumbel_of,
    noise_key,
    philox,
    philox_uniform,
    uniform_of,
    words_of_row,
    words_of_token,
)

# Random123 1.14, tests/kat_vectors, "philox4x32 10": counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor([int(word, 16)]) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_gives_the_known_answers_of_random123(counter: str, key: str, result: str) -> None:
    assert " ".join(f"{int(word):08x}" for word in philox(words(counter), words(key))) == result


def philox_in_python(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & WORD, (p0 >> 32) ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return c


def test_token_t_is_lane_t_mod_4_of_counter_t_div_4_index_choice_0() -> None:
    seed, choice, index = 0xFEDCBA9876543210, 3, 1234
    got = words_of_row(torch.tensor([noise_key(seed, choice, index)]), 22)[0].tolist()
    key = [seed & WORD, seed >> 32]
    assert got == [philox_in_python([t >> 2, index, choice, 0], key)[t & 3] for t in range(22)]


def test_words_of_single_tokens_are_those_of_the_row() -> None:
    keys = torch.tensor([noise_key(2**64 - 1, 0, 5), noise_key(7, 2, 2**31)])
    row = torch.tensor([0, 1, 1, 0, 1])
    token = torch.tensor([3, 0, 49151, 262143, 17])
    assert words_of_token(keys, row, token).equal(words_of_row(keys, 262144)[row, token])


def test_uniforms_are_never_0_or_1_even_in_float32() -> None:
    ends = uniform_of(torch.tensor([0, WORD]))
    assert ends.float().double().equal(ends)
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]
    assert gumbel_of(torch.tensor([0, WORD])).tolist() == pytest.approx([-math.log(24 * math.log(2)), GUMBEL_MAX])
    assert abs(GUMBEL_MAX - 24 * math.log(2)) < 1e-6


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    u = philox_uniform(seed=1, choice=0, index=0, vocab=100_000)
    counts = torch.histc(u, 20, 0.0, 1.0)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 50  # chi-square, 19 degrees of freedom: p = 1e-4
    g = gumbel(seed=1, choice=0, index=0, vocab=100_000)
    assert float(g.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(g.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)


@pytest.mark.parametrize("other", [(2, 0, 0), (1 + 2**32, 0, 0), (1, 1, 0), (1, 0, 1)])
def test_noise_differs_with_each_of_seed_choice_and_index(other: tuple[int, int, int]) -> None:
    base, changed = gumbel(1, 0, 0, 4096), gumbel(*other, 4096)
    assert gumbel(1, 0, 0, 4096).equal(base)
    assert int((base == changed).sum()) <= 2  # 23-bit uniforms coincide once in 8 million
    assert abs(float(torch.corrcoef(torch.stack([base, changed]))[0, 1])) < 0.06


def test_a_longer_vocabulary_only_adds_noise() -> None:
    assert gumbel(9, 0, 4, 101)[:50].equal(gumbel(9, 0, 4, 50))
