"""GPTQ gives Model Optimizer's codes, and less error than rounding on what it was calibrated with."""

from __future__ import annotations

import pytest
import torch
from golden import cases

from flashdraft.errors import ConfigError
from flashdraft.quant.calibrate import Statistics
from flashdraft.quant.gptq import gptq_codes, inverse_factor, proxy_loss
from flashdraft.quant.nvfp4 import amax, decode, encode, max_scales, pack, tensor_scale
from flashdraft.quant.quantize import Settings, _quantize
from flashdraft.quant.scales import searched_scales

GPTQ = cases("gptq")


@pytest.mark.parametrize("own_factor", [False, True])
@pytest.mark.parametrize("name", GPTQ)
def test_codes_are_the_golden_ones(name: str, own_factor: bool) -> None:
    case = GPTQ[name]
    weight, scale_2 = case["weight"], case["export.weight_scale_2"]
    upper = inverse_factor(case["hessian"], ~weight.any(0)) if own_factor else case["hinv_chol_upper"]
    assert upper is not None
    torch.testing.assert_close(upper, case["hinv_chol_upper"], rtol=1e-3, atol=1e-4)
    codes = gptq_codes(weight, case["export.weight_scale"], scale_2, upper, block=32 if "bs32" in name else 128)
    assert torch.equal(pack(codes), case["export.weight"])


def problem(rank: int | None, seed: int = 0) -> tuple[torch.Tensor, Statistics]:
    """A weight and inputs, of full rank or on a few directions, with a few large columns as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(40, 96, generator=generator)
    x = torch.randn(300, 96, generator=generator)
    if rank is not None:
        x = torch.randn(300, rank, generator=generator) @ torch.randn(rank, 96, generator=generator)
    x[:, :3] *= 8
    return weight, Statistics(x.T @ x, x.abs().max(), len(x))


@pytest.mark.parametrize("rank", [None, 8])
def test_gptq_loses_less_than_a_search_and_that_less_than_rounding(rank: int | None) -> None:
    weight, seen = problem(rank)
    loss = {}
    for method in ("max", "search", "gptq"):
        packed, note = _quantize(weight, amax([weight]), seen, Settings(method))  # type: ignore[arg-type]
        assert note == ""
        loss[method] = proxy_loss(weight, packed.dequantize(), seen.hessian)
    assert loss["gptq"] < 0.7 * loss["max"]
    assert loss["search"] < loss["max"]


def test_weighing_inputs_lowers_the_loss_that_is_weighed() -> None:
    weight, seen = problem(None)
    scale_2, diagonal = tensor_scale(amax([weight])), seen.hessian.diagonal()

    def loss(scale: torch.Tensor) -> float:
        error = decode(encode(weight, scale, scale_2), scale, scale_2) - weight
        return float((error.square() * diagonal).sum())

    assert (
        loss(searched_scales(weight, scale_2, diagonal))
        < loss(searched_scales(weight, scale_2))
        < loss(max_scales(weight, scale_2))
    )


def test_rows_are_independent_so_chunks_change_nothing() -> None:
    weight, seen = problem(None)
    scale_2 = tensor_scale(amax([weight]))
    scale, order = max_scales(weight, scale_2), seen.hessian.diagonal().argsort(descending=True)
    upper = inverse_factor(seen.hessian[order][:, order], torch.zeros(96, dtype=torch.bool))
    assert upper is not None
    whole = gptq_codes(weight, scale, scale_2, upper, order)
    assert torch.equal(whole, gptq_codes(weight, scale, scale_2, upper, order, elements=7 * 96))


def test_a_hessian_without_an_inverse_says_so_and_rounds_to_nearest() -> None:
    weight, seen = problem(None)
    broken = Statistics(-seen.total, seen.amax, seen.tokens)
    packed, note = _quantize(weight, amax([weight]), broken, Settings("gptq", search=False))
    assert "not positive definite" in note
    assert torch.equal(packed.dequantize(), _quantize(weight, amax([weight]), seen, Settings("max"))[0].dequantize())


@pytest.mark.parametrize("values", [{"method": "awq"}, {"damping": 0.0}, {"damping": 1.5}])
def test_settings_that_cannot_be_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Settings(**values)  # type: ignore[arg-type]
