"""Tiny pairs for tests: a random target, and a draft of it that is right some of the time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.request import Output, Request, SamplingParams
from flashdraft.targets.target import Target

VOCAB = 96
ASYNC_SCHEDULING = False  # of small_engine; a fixture of tests/engine sets it


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float32, window: int | None = None, layers: int = 3) -> Target:
    """A random causal LM of hidden size 64; with `window`, alternate layers are sliding."""
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,  # products of 64 inputs or a multiple: deterministic ones need it
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.15,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    if window is None:
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        config = Qwen3Config(**sizes, use_sliding_window=True, sliding_window=window, layer_types=kinds)
        model = Qwen3ForCausalLM(config)
    return Target(model.to(dtype), check=False)


class OftenRight(DFlashDraft):
    """A draft whose head is overruled at some positions by the token the target will choose (known to the test).

    Everything else is the real draft: its layers run, its keys are stored, and its own proposals stand at the other positions.
    """

    truth: dict[int, int]  # absolute position -> token
    hit_rate = 0.75

    def forward(self, embeddings: Tensor, positions: Tensor, attend) -> Tensor:  # type: ignore[no-untyped-def, override]
        self.last = super().forward(embeddings, positions, attend), positions
        return self.last[0]

    def positions_of(self, hidden: Tensor) -> list[int]:
        """Where the rows of `hidden`, some of the last pass, stand."""
        states, positions = self.last
        return positions[(hidden[:, None] == states).all(-1).int().argmax(1)].tolist()

    def logits(self, hidden: Tensor, head=None) -> Tensor:  # type: ignore[no-untyped-def, override]
        z = super().logits(hidden, head).clone()
        for row, position in enumerate(self.positions_of(hidden)):
            if position in self.truth and (position * 2654435761 % 1000) / 1000 < self.hit_rate:
                z[row, self.truth[position]] = z[row].max() + 100  # whatever the noise
        return z


def tiny_draft(
    target: Target, seed: int = 1, window: int | None = 8, causal: bool = False, block_size: int = 8, kind: type = DFlashDraft
) -> DFlashDraft:
    torch.manual_seed(seed)
    config = DFlashConfig(
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=target.vocab_size,
        num_target_layers=target.num_layers,
        target_layer_ids=(0, target.num_layers - 1),
        mask_token_id=2,
        block_size=block_size,
        max_position_embeddings=2048,
        windows=(window, None),
        causal=(causal, causal),
    )
    draft = kind(config)
    for parameter in draft.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.15)
    return draft.requires_grad_(False)


def run(engine: Engine, requests: list[Request], hook=None) -> list[Output]:  # type: ignore[no-untyped-def]
    """Serve requests to the end; `hook(engine, step)` runs before each step."""
    outputs = [engine.add(r) for r in requests]
    step = 0
    while engine.has_work:
        if hook is not None:
            hook(engine, step)
        engine.step()
        step += 1
        assert step < 5000, "the engine makes no progress"
    return outputs


def small_engine(target: Target, draft: DFlashDraft | None = None, **options) -> Engine:  # type: ignore[no-untyped-def]
    """An engine whose unwritten and freed KV memory is NaN, so that any read of it shows."""
    defaults = {"max_model_len": 256, "kv_cache_memory_bytes": 8 << 20, "max_num_batched_tokens": 24}
    options = {**defaults, "async_scheduling": ASYNC_SCHEDULING, **options}
    engine = Engine(target, draft, EngineConfig(**options))
    engine.pool.poison()
    return engine


def prompts(count: int, seed: int = 7, longest: int = 60) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def request(prompt: list[int], stop_ids: frozenset[int] = frozenset(), **params) -> Request:  # type: ignore[no-untyped-def]
    return Request(list(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **params}), stop_ids=stop_ids)
