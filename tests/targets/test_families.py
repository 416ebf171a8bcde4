"""Every family we tried: over pages it agrees with its own forward, or it is refused in one sentence that says why."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import FAMILIES, MULTIMODAL, VOCAB, make
from paged import PagedRun, Rows, assert_close, own_forward
from pairs import request, run, small_engine, tiny_draft
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface, PreTrainedModel

from flashdraft.errors import UnsupportedModelError
from flashdraft.kernels.linear import make_rows_stable
from flashdraft.targets.discovery import ATTENTION, refuse_unsupported, window_of
from flashdraft.targets.shapes import layer_specs_of
from flashdraft.targets.target import Target, packed_attend

REFUSED = {
    "gpt-neo": "4 layers call transformers' attention interface 0 times",
    "falcon": "4 layers call transformers' attention interface 0 times",
    "falcon alibi": "4 layers call transformers' attention interface 0 times",
    "diffllama": "4 layers call transformers' attention interface 8 times",
    "bloom": "takes no position_ids",
    "mpt": "takes no position_ids",
    "rwkv": "its recurrent layers keep a state",
    "bert": "only decoder-only causal LMs",
    "t5": "is an encoder-decoder model",
    "mamba": "its linear_attention layers keep a state",
    "jamba": "its linear_attention layers keep a state",
    "recurrentgemma": "layers keep a state",
    "qwen3-next": "its linear_attention layers keep a state",
    "qwen3.5": "its linear_attention layers keep a state",
    "lfm2": "its conv layers keep a state",
    "falcon-h1": "its hybrid layers keep a state",
    "llama4": "layers of type chunked_attention",
    "doge": "computes attention masks of its own",
    "longrope": "'longrope' changes with the longest position",
    "dynamic rope": "'dynamic' changes with the longest position",
    "gemma3 bidirectional": "bidirectional attention over text",
}
STREAMS = "gemma3n"  # its layers pass on four hidden states a token
SUPPORTED = [name for name in (*FAMILIES, *MULTIMODAL) if name not in {*REFUSED, STREAMS}]
WINDOWED = {  # how many of the 4 layers have a window
    "qwen3 sliding": 2, "gemma2": 2, "gemma3": 3, "mistral": 4, "mixtral": 4, "phi3": 4, "phimoe": 4, "olmo3": 2, "cohere2": 3,
    "starcoder2": 4, "qwen2moe": 1, "exaone4": 3, "gpt-oss": 2, "gemma4": 4, "gemma3 multimodal": 3, "gemma4 multimodal": 4,
}  # fmt: skip
LENGTH = 61


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_supported_family_agrees_with_its_own_forward_over_pages(name):
    ids = torch.randint(0, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    own = make(name)
    own.set_attn_implementation("eager")  # scaled_dot_product_attention knows no soft cap (Gemma 2)
    expected = own_forward(own, ids)
    assert expected[0].std(0).max() > 1e-3, "flat logits would prove nothing"
    target = Target(make(name))
    assert sum(s.window == 24 for s in target.layer_specs) == WINDOWED.get(name, 0)
    if name == "qwen3-vl":  # its text model stands in no class of its own
        with pytest.raises(UnsupportedModelError, match="no text model can be made of its configuration"):
            layer_specs_of(target.config)
    else:
        assert layer_specs_of(target.config) == target.layer_specs, "what its configuration tells without weights"
    run = PagedRun(target, max_tokens=128, slots=2)
    [whole] = run.advance(Rows(run.sequence(), 0, ids))
    assert_close(whole, expected, slice(0, LENGTH), rtol=1e-5)  # features of some families reach 100
    sequence, start = run.sequence(), 0
    for count in (19, 26, 1, 8, 7):  # two chunks, decoding, verifying
        [got] = run.advance(Rows(sequence, start, ids[start : start + count]))
        assert_close(got, expected, slice(start, start + count), rtol=1e-5)
        start += count
    assert start == LENGTH


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_we_cannot_run_is_refused_in_one_sentence(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]) as refusal:
        Target(make(name))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 300


RECURRENT = [
    "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2", "minimax",
    "nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba2",
]  # fmt: skip


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_state_that_cannot_be_rolled_back_is_refused_with_the_reason_and_the_remedy(kind):
    kinds = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"]) if kind.startswith("lfm2") else {}
    with pytest.raises(UnsupportedModelError) as refusal:
        refuse_unsupported(transformers.AutoConfig.for_model(kind, **kinds).get_text_config())
    sentence = str(refusal.value)
    assert sentence.startswith(f"{kind}: its ")
    assert "layers keep a state that every token changes, and a rejected guess cannot be taken out of it again" in sentence
    assert sentence.endswith("use a target all of whose layers attend (Qwen3 for Qwen3.5, for example)")


DATA_DEPENDENT = {"nonzero", "_local_scalar_dense", "masked_select", "_unique2", "unique_dim", "bincount", "item"}


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss", "mixtral", "qwen2moe", "olmoe", "deepseek v3"])
def test_experts_are_grouped_so_that_a_step_looks_at_no_value(name):
    """What a CUDA graph cannot hold: sizes and loops that depend on which experts a row chose."""
    target, ids = Target(make(name), check=False), torch.arange(24)
    assert target.config._experts_implementation == "grouped_mm"
    attend = packed_attend(ids * 0, ids)
    with Ops() as ops:
        target.forward(ids, ids, attend)
    assert not ops.names & DATA_DEPENDENT


@pytest.mark.parametrize("name", ["qwen3moe", "gpt-oss"])
def test_a_mixture_of_experts_decodes_losslessly_with_a_draft(name):
    target, prompts = Target(make(name)), [list(range(3, 33)), [7, 5]]
    draft = tiny_draft(target, window=24)
    outputs = run(small_engine(target, draft), [request(prompt, max_tokens=24) for prompt in prompts])
    own = make(name)
    own.set_attn_implementation("eager")
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = own_forward(own, prompt + output.tokens)[0]
        assert output.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("name", MULTIMODAL)
def test_the_encoders_of_a_multimodal_model_keep_their_own_attention(name):
    model = make(name)
    Target(model)
    assert model.config.get_text_config()._attn_implementation == ATTENTION
    assert model.config.vision_config._attn_implementation in ("sdpa", "eager")


def test_a_model_whose_layers_pass_on_several_streams_is_served_but_takes_no_draft():
    target, ids = Target(make(STREAMS)), torch.arange(30)
    own = make(STREAMS)(input_ids=ids[None], use_cache=False).logits[0]
    torch.testing.assert_close(target.forward(ids, ids, packed_attend(ids * 0, ids))[0], own, atol=1e-4, rtol=0)
    with pytest.raises(UnsupportedModelError, match="cannot have a draft"):
        target.capture([1])


class Ops(TorchDispatchMode):
    """Counts operations, and keeps their names."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.names = 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_forward_makes_no_mask_which_leaves_every_bit_of_the_logits(name, monkeypatch):
    target, ids = Target(make(name), check=False), torch.arange(24)
    attend = packed_attend(ids * 0, ids)
    with Ops() as without:
        logits, _ = target.forward(ids, ids, attend)
    # As transformers goes about it where there is a mask function, even one that makes none.
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, ATTENTION, lambda **kwargs: None)
    with Ops() as with_masks:
        expected, _ = target.forward(ids, ids, attend)
    assert torch.equal(logits, expected)
    least = 0 if name in ("gpt-oss", "opt", "biogpt") else 6  # their masks look at no positions
    assert without.count <= with_masks.count - least


# What a family could do behind its attention call. Each is planted in a Llama, and must be refused at load.


class IgnoresPositions(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **kwargs)


class ShiftsTokens(transformers.LlamaForCausalLM):
    """Mixes each embedding with the row before it, as token-shift models do."""

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **kwargs):
        x = self.model.embed_tokens(input_ids)
        x = x + 0.5 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        return super().forward(inputs_embeds=x, position_ids=position_ids, logits_to_keep=logits_to_keep, **kwargs)


class ScalesScoresUnderItsOwnAttention(transformers.LlamaForCausalLM):
    """Does something to attention that the interface's arguments do not tell."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        own = self.config._attn_implementation == "eager"
        for layer in self.model.layers:
            layer.self_attn.scaling = 0.4 if own else 0.25
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class AddsABias(transformers.LlamaForCausalLM):
    """Hands its layers a mask that holds more than who sees whom."""

    def __init__(self, config) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._add, with_kwargs=True)

    @staticmethod
    def _add(module, args, kwargs):
        mask = kwargs["attention_mask"]
        return args, {**kwargs, "attention_mask": None if mask is None else mask.float() * 0.5}


class LooksAhead(transformers.LlamaForCausalLM):
    """A prefix language model: the first tokens of a sequence see each other."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        mask = transformers.masking_utils.create_causal_mask(
            self.config,
            self.model.embed_tokens(input_ids),
            None,
            None,
            or_mask_function=lambda b, h, q, kv: (q < 5) & (kv < 5),
        )
        return super().forward(input_ids=input_ids, attention_mask=mask, position_ids=position_ids, **kwargs)


def planted(kind: type[PreTrainedModel], **changes) -> PreTrainedModel:
    torch.manual_seed(0)
    return kind(make("llama", **changes).config)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (IgnoresPositions, "ignores positions, mixes rows"),
        (ShiftsTokens, "ignores positions, mixes rows"),
        (ScalesScoresUnderItsOwnAttention, "attends in a way that is not implemented"),
        (AddsABias, "computes attention masks of its own"),
        (LooksAhead, "neither causal nor a causal sliding window"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_model_does_behind_its_attention_call_is_found_at_load(kind, reason, dtype):
    with pytest.raises(UnsupportedModelError, match=reason):
        Target(planted(kind).to(dtype))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4", "qwen3moe", "deepseek v3", "gpt2"])
def test_the_self_check_passes_in_16_bits(name):
    for dtype in (torch.bfloat16, torch.float16):
        assert Target(make(name, dtype)).dtype == dtype


@pytest.mark.parametrize("name", SUPPORTED)
def test_row_stable_products_change_no_bit_of_a_family(name):
    target, ids = Target(make(name, torch.bfloat16), check=False), torch.arange(24)
    target.capture([1])
    attend = packed_attend(ids * 0, ids)
    before = target.forward(ids, ids, attend)
    make_rows_stable(target.model)
    after = target.forward(ids, ids, attend)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(after, before, strict=True))


@pytest.mark.parametrize("name", SUPPORTED)
def test_features_are_handed_over_before_the_last_layers_run(name):
    target, ids = Target(make(name), check=False), torch.arange(12)
    target.capture([0, 1])
    attend, order = packed_attend(ids * 0, ids), []
    logits, features = target.forward(ids, ids, attend)
    handed = []
    hook = target.layers[-1].register_forward_hook(lambda *_: order.append("the last layer"))
    again, none = target.forward(ids, ids, attend, on_features=lambda parts: (order.append("features"), handed.extend(parts)))
    hook.remove()
    assert none is None
    assert torch.equal(torch.cat(handed, -1), features)
    assert torch.equal(again, logits)
    assert order == ["features", "the last layer"]
    assert torch.equal(target.forward(ids, ids, attend)[1], features), "the next pass returns them again"


def test_a_target_keeps_its_model_usable_only_through_itself():
    model = make("llama")
    target = Target(model)
    with pytest.raises(RuntimeError, match=r"call Target\.forward"):
        model(input_ids=torch.zeros((1, 2), dtype=torch.long))
    ids = torch.arange(4)
    attend = packed_attend(torch.zeros(4), ids)
    again, _ = Target(model).forward(ids, ids, attend)  # a second target of one model
    torch.testing.assert_close(again, own_forward(make("llama"), ids.tolist())[0], atol=1e-4, rtol=0)
    with pytest.raises(RuntimeError):
        target.forward(ids, ids, attend)


def test_a_head_that_returns_every_row_is_cut_to_the_rows_asked_for():
    class EveryRow(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)

    target, ids = Target(planted(EveryRow)), torch.arange(5)
    attend = packed_attend(torch.zeros(5), ids)
    logits, _ = target.forward(ids, ids, attend, torch.tensor([4, 1]))
    torch.testing.assert_close(logits, target.forward(ids, ids, attend)[0][[4, 1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "scale"),
    [("llama", 1.0), ("gemma2", 1.0), ("gemma4", 1.0), ("cohere", 0.5), ("granite", 1 / 3), ("granitemoe", 1 / 3)],
)
def test_the_factor_between_head_and_logits_is_measured(name, scale, dtype):
    assert Target(make(name, dtype)).logit_scale == pytest.approx(scale, rel=5e-3)


def test_logits_that_are_no_multiple_of_the_heads_are_refused():
    class Squares(transformers.LlamaForCausalLM):
        def forward(self, input_ids=None, position_ids=None, **kwargs):
            out = super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)
            out.logits = out.logits.square()
            return out

    with pytest.raises(UnsupportedModelError, match="not a multiple of its output embedding's"):
        _ = Target(planted(Squares)).logit_scale


def test_windows_are_read_off_mask_rules():
    def causal(b, h, q, kv):
        return kv <= q

    def sliding(b, h, q, kv):
        return (kv <= q) & (kv > q - 7)

    def chunked(b, h, q, kv):
        return (kv <= q) & (kv // 16 == q // 16)

    assert window_of(causal, 300) is None
    assert window_of(sliding, 300) == 7
    assert window_of(sliding, 7) is None  # never shorter than what it is asked about
    for other in (chunked, lambda b, h, q, kv: q >= 0, lambda b, h, q, kv: (kv <= q) | (kv < 4)):
        with pytest.raises(ValueError, match="another mask"):
            window_of(other, 300)
