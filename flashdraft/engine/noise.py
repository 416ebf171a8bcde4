"""The noise of sampling: counted, not drawn, so that a token's noise depends only on its seed, choice and output index."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
UNIFORM_BITS = 23  # the most for which (x + 1/2) / 2**bits is exact in float32, so neither 0 nor 1
GUMBEL_MAX = -math.log(-math.log1p(-(2.0 ** -(UNIFORM_BITS + 1))))  # 16.6, at the largest uniform


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


def uniform_of(words: Tensor) -> Tensor:
    """Random words to float64 uniforms, the middles of 2**23 equal parts of (0, 1)."""
    return (words >> (32 - UNIFORM_BITS)).double().add_(0.5).mul_(2.0**-UNIFORM_BITS)


def gumbel_of(words: Tensor) -> Tensor:
    """Random words to float32 Gumbel noise. The logs are float64: rounded to float32 they hardly differ between devices."""
    return uniform_of(words).log_().neg_().log_().neg_().float()


def words_of_row(noise: Tensor, vocab: int) -> Tensor:
    """Random words [S, vocab] of the rows with noise keys [S, 4] (see noise_key).

    Token t is lane t & 3 of the counter (t >> 2, index, choice, 0): four tokens share a Philox call, a quarter of the work.
    """
    low, high, choice, index = noise[:, :, None].unbind(1)
    block = torch.arange((vocab + 3) // 4, device=noise.device)[None]
    lanes = philox((block, index, choice, torch.zeros_like(index)), (low, high))
    return torch.stack(lanes, dim=-1).flatten(1)[:, :vocab]


def words_of_token(noise: Tensor, row: Tensor, token: Tensor) -> Tensor:
    """Random words [N] of single tokens: token[i] of row[i]. The same words as words_of_row gives."""
    low, high, choice, index = noise.t().contiguous().index_select(1, row)  # contiguous columns: 3 times faster
    w0, w1, w2, w3 = philox((token >> 2, index, choice, torch.zeros_like(index)), (low, high))
    lane = token & 3
    return torch.where(lane < 2, torch.where(lane == 0, w0, w1), torch.where(lane == 2, w2, w3))


def noise_key(seed: int, choice: int, index: int) -> tuple[int, int, int, int]:
    """What keys the noise of one output token: two words of the 64-bit seed, choice of n answers, index in the output."""
    return seed & WORD, (seed >> 32) & WORD, choice, index


def philox_uniform(seed: int, choice: int, index: int, vocab: int) -> Tensor:
    """The uniforms, float32 [vocab] in the open (0, 1), behind the noise of one output token."""
    return uniform_of(words_of_row(torch.tensor([noise_key(seed, choice, index)]), vocab))[0].float()


def gumbel(seed: int, choice: int, index: int, vocab: int) -> Tensor:
    """The Gumbel noise, float32 [vocab], of one output token: what `sample` adds to its logits over temperature."""
    return gumbel_of(words_of_row(torch.tensor([noise_key(seed, choice, index)]), vocab))[0]
