"""The DFlash draft: its configuration and its equations, nothing else.

Shape letters: T context tokens, S sequences, R rows of a block, H hidden, n captured layers, D head size, V vocabulary.
The format and the equations are those of the published DFlash drafts (docs/draft.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashdraft.errors import ConfigError

# attend(layer, q [..., heads, D], k [..., kv heads, D], v [..., kv heads, D]) -> [..., heads, D]: the caller's attention over
# the context keys it holds and the block's own keys; draft code never sees pages, masks or caches.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DFlashConfig:
    """Everything that decides a draft's equations. Layer ids are 0-based decoder layers of the target, kept ascending.

    Raises ConfigError for sizes that do not fit together.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 8
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 131072
    windows: tuple[int | None, ...] = ()  # per draft layer; None sees every position
    causal: tuple[bool, ...] = ()  # per draft layer
    attention_bias: bool = False
    input_embedding_scale: float = 1.0
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    draft_vocab_size: int | None = None  # a head over fewer tokens, mapped by d2t
    has_own_lm_head: bool = False
    has_own_embeddings: bool = False

    def __post_init__(self) -> None:
        n = self.num_hidden_layers
        set_ = object.__setattr__
        set_(self, "target_layer_ids", tuple(sorted(self.target_layer_ids)))
        set_(self, "windows", tuple(self.windows) or (None,) * n)
        set_(self, "causal", tuple(self.causal) or (False,) * n)
        for name in _POSITIVE:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"draft config: {name} must be a positive integer, got {value!r}")
        if self.block_size < 2:
            raise ConfigError(f"draft config: block_size must be at least 2 (anchor and one mask), got {self.block_size}")
        if len(self.windows) != n or len(self.causal) != n:
            raise ConfigError(f"draft config: windows and causal need one entry for each of the {n} layers")
        if any(w is not None and w < 1 for w in self.windows):
            raise ConfigError(f"draft config: sliding_window must be positive, got {self.windows}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"draft config: {self.num_attention_heads} attention heads are not a multiple of "
                f"{self.num_key_value_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ConfigError(f"draft config: head_dim must be even for RoPE, got {self.head_dim}")
        ids = self.target_layer_ids
        if not ids or len(set(ids)) != len(ids) or ids[0] < 0 or ids[-1] >= self.num_target_layers:
            raise ConfigError(
                f"draft config: target_layer_ids {list(ids)} must be distinct layers of 0..{self.num_target_layers - 1}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(
                f"draft config: mask_token_id {self.mask_token_id} lies outside the vocabulary of {self.vocab_size}; "
                "it must be an existing embedding row"
            )

    @classmethod
    def for_target(
        cls,
        *,
        hidden_size: int,
        vocab_size: int,
        num_target_layers: int,
        mask_token_id: int,
        max_position_embeddings: int = 131072,
        num_hidden_layers: int = 5,
        num_features: int = 5,
        window: int | None = 1024,
        **overrides: object,
    ) -> DFlashConfig:
        """A good configuration for any target: five layers, window 1,024, bidirectional, MLP twice the hidden size.

        Heads follow the Qwen3 shape: of 128 (of 64 under a hidden size of 1,024), a power of two of them (4 or more), in sum
        at least 1.25 times the hidden size, with a quarter as many key-value heads. For hidden size 2,560 this is the
        reference draft's shape (32 heads, 8 KV).
        """
        num_features = min(num_features, num_target_layers)
        head_dim = 128 if hidden_size >= 1024 else 64
        heads = 4
        while heads * head_dim < 1.25 * hidden_size:
            heads *= 2
        values: dict[str, object] = dict(
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            head_dim=head_dim,
            vocab_size=vocab_size,
            num_target_layers=num_target_layers,
            target_layer_ids=default_layer_ids(num_target_layers, num_features),
            mask_token_id=mask_token_id,
            max_position_embeddings=max_position_embeddings,
            windows=(window,) * num_hidden_layers,
            causal=(False,) * num_hidden_layers,
        )
        unknown = set(overrides) - {f.name for f in fields(cls)}
        if unknown:
            raise ConfigError(f"draft config: unknown fields {sorted(unknown)}")
        return cls(**{**values, **overrides})  # type: ignore[arg-type]

    def with_(self, **changes: object) -> DFlashConfig:
        """A copy with some fields changed (checked again)."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def num_proposals(self) -> int:
        return self.block_size - 1

    @property
    def num_features(self) -> int:
        return len(self.target_layer_ids)


_POSITIVE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "num_target_layers",
    "block_size",
    "max_position_embeddings",
)


def default_layer_ids(num_target_layers: int, num_features: int) -> tuple[int, ...]:
    """Evenly spread feature layers: [L//2] for one, else round(1 + i (L-4) / (n-1)), half to even."""
    if num_features == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = tuple(round(1 + i * span / (num_features - 1)) for i in range(num_features))
    if not ids or len(set(ids)) != num_features or min(ids) < 0:
        raise ConfigError(
            f"{num_features} feature layers cannot be spread over {num_target_layers} target layers: "
            "give target_layer_ids, or fewer features"
        )
    return ids


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x32.to(x.dtype)


def rope_tables(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of shape [..., 1, D] for absolute positions [...], in the Llama half-rotation layout."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.float()[..., None] * (1.0 / theta ** (half / head_dim))
    angles = torch.cat((angles, angles), -1)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., heads, D] by tables [..., 1, D]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.attention_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.attention_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.attention_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=c.attention_bias)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def query(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return apply_rope(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        k = self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim)))
        return apply_rope(k, cos, sin), self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class MLP(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, index: int) -> Tensor:
        h = self.input_layernorm(x)
        q = self.self_attn.query(h, cos, sin)
        k, v = self.self_attn.keys_values(h, cos, sin)
        x = x + self.self_attn.o_proj(attend(index, q, k, v).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashDraft(nn.Module):
    """The draft model. It holds no target: embeddings, features and (unless its own) the head come from the caller.

    Parameter names are those of the checkpoint format. Source: the DFlash block-diffusion drafts (docs/draft.md).
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        c = self.config = config
        self.fc = nn.Linear(c.num_features * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        head_rows = c.draft_vocab_size or c.vocab_size
        self.lm_head = nn.Linear(c.hidden_size, head_rows, bias=False) if c.has_own_lm_head else None
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size) if c.has_own_embeddings else None
        self.d2t: Tensor | None
        # offsets: target id = draft id + d2t[draft id]
        self.register_buffer("d2t", torch.zeros(head_rows, dtype=torch.long) if c.draft_vocab_size else None)

    def context(self, features: Tensor) -> Tensor:
        """features [..., n*H] (captured layers ascending, concatenated) -> context [..., H], shared by all draft layers."""
        return self.hidden_norm(self.fc(features))

    def context_keys_values(self, context: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values [..., kv heads, D] of context [..., H] at absolute positions [...]."""
        cos, sin = self.rope(positions, context.dtype)
        return [layer.self_attn.keys_values(context, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rope_tables(positions, self.config.head_dim, self.config.rope_theta, dtype)

    def forward(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Raw embedding rows [..., H] of blocks [anchor, MASK x (B-1)] at positions [...] -> normed hidden states [..., H].

        The hidden state of slot k predicts the token at slot k's own position; slot 0 is unused.
        """
        x = embeddings * self.config.input_embedding_scale if self.config.input_embedding_scale != 1.0 else embeddings
        cos, sin = self.rope(positions, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, attend, index)
        return self.norm(x)

    def logits(self, hidden: Tensor, head: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """hidden [..., H] -> draft logits [..., V_draft] by the draft's own head, or else by the target's `head`."""
        own = self.lm_head if self.lm_head is not None else head
        if own is None:
            raise ConfigError("this draft has no output head of its own: pass the target's head")
        return self.scaled(own(hidden))

    def scaled(self, z: Tensor) -> Tensor:
        """Draft logits from the head's products: scale and soft cap."""
        if self.config.logit_scale != 1.0:
            z = z * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return torch.tanh(z / cap) * cap if cap is not None else z

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Map ids of the draft's vocabulary to the target's (the identity without d2t)."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]


def dense_visibility(
    query_positions: Tensor, key_positions: Tensor, window: int | None, causal: bool, valid: Tensor | None = None
) -> Tensor:
    """Boolean [..., Q, K]: the visibility rule of the format, |q - k| < W, and k <= q where causal."""
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    visible = torch.ones_like(distance, dtype=torch.bool) if window is None else distance.abs() < window
    if causal:
        visible = visible & (distance >= 0)
    return visible if valid is None else visible & valid[..., None, :]


def propose_offline(
    draft: DFlashDraft,
    features: Tensor,
    anchor: int,
    embed: Callable[[Tensor], Tensor],
    head: Callable[[Tensor], Tensor] | None = None,
    block_size: int | None = None,
) -> Tensor:
    """Draft logits [B-1, V] for one block from features [T, n*H] of the T tokens before the anchor: the plain definition.

    The engine computes the same over pages; tests hold the two together.
    """
    c = draft.config
    device, length = features.device, features.shape[0]
    size = block_size or c.block_size
    context_positions = torch.arange(length, device=device)
    positions = torch.arange(length, length + size, device=device)
    context = draft.context_keys_values(draft.context(features), context_positions)
    ids = torch.tensor([anchor] + [c.mask_token_id] * (size - 1), device=device)
    groups = c.num_attention_heads // c.num_key_value_heads

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat((context[layer][0], k)).repeat_interleave(groups, 1).transpose(0, 1)
        v = torch.cat((context[layer][1], v)).repeat_interleave(groups, 1).transpose(0, 1)
        keys = torch.cat((context_positions, positions))
        mask = dense_visibility(positions, keys, c.windows[layer], c.causal[layer])
        return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)

    hidden = draft(embed(ids), positions, attend)
    return draft.logits(hidden[1:], head)


def count_parameters(draft: DFlashDraft) -> dict[str, int]:
    """Parameters by part: fc, layers, norms (hidden_norm and norm), lm_head, embed_tokens, all."""
    size: Callable[[Sequence[nn.Module | None]], int] = lambda modules: sum(  # noqa: E731
        p.numel() for m in modules if m is not None for p in m.parameters()
    )
    parts = {
        "fc": size([draft.fc]),
        "layers": size([draft.layers]),
        "norms": size([draft.hidden_norm, draft.norm]),
        "lm_head": size([draft.lm_head]),
        "embed_tokens": size([draft.embed_tokens]),
    }
    return {**parts, "all": sum(parts.values())}


__all__ = [
    "DFlashConfig",
    "DFlashDraft",
    "count_parameters",
    "default_layer_ids",
    "dense_visibility",
    "propose_offline",
]
