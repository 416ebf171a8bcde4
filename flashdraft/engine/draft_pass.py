"""The draft's two jobs in a device step, in fused products: proposals for blocks, and keys and values of the context.

A layer is five products and attention: q/k/v behind the residual and its norm, output, gate and up with their activation, down.
The context's keys and values of all layers are one product. Shape letters: T rows, H hidden, D head size, L layers, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flashdraft.draft import DFlashDraft, Layer, RMSNorm, rope_tables
from flashdraft.kernels.fused import FusedOptions, Norm, add_norm, argmax_linear, fused_linear
from flashdraft.kernels.narrow_plan import STEP
from flashdraft.kernels.nvfp4 import TILE, Nvfp4Weight, repacked
from flashdraft.kernels.paged import ContextPages, Projection, Rows, store_context
from flashdraft.quant.linear import QuantizedLinear
from flashdraft.targets.recognition import Product

# attend(layer, projection) -> [T, heads, D]: stores the block's keys and values and attends over all that pages hold.
Attend = Callable[[int, Projection], Tensor]


class DraftPass:
    """A DFlashDraft as fused products over pages. Its weights are taken over: q/k/v and gate/up become one tensor each, and
    NVFP4 weights change to the kernels' storage.

    `max_tokens`: positions that RoPE tables are made for. `pdl`: see paged.Settings.
    """

    def __init__(self, draft: DFlashDraft, max_tokens: int, options: FusedOptions, pdl: bool) -> None:
        c = self.config = draft.config
        self.draft, self.options, self.pdl = draft, options, pdl
        like = draft.norm.weight
        device, dtype = like.device, like.dtype
        layers = [layer for layer in draft.layers if isinstance(layer, Layer)]
        # Views of q/k/v cannot be one product over all layers, so keys and values of the context have their own copy.
        pairs = [linear for layer in layers for linear in (layer.self_attn.k_proj, layer.self_attn.v_proj)]
        self.context_weight = _side_by_side(pairs, like)
        self.context_bias = torch.cat([linear.bias.detach() for linear in pairs]) if c.attention_bias else None
        self.layers = [_FusedLayer(layer, like) for layer in layers]
        self.hidden_norm, self.norm = _norm(draft.hidden_norm), _norm(draft.norm)
        self.fc = _joined(draft.fc, like=like)[0]
        self.head = None if draft.lm_head is None else _joined(draft.lm_head, like=like)[0]
        self.key_norms = torch.stack([layer.self_attn.k_norm.weight.float() for layer in layers])
        positions = torch.arange(max_tokens, device=device)
        cos, sin = rope_tables(positions, c.head_dim, c.rope_theta, dtype)
        self.turns = torch.cat((cos, sin), -1).squeeze(1)  # [max_tokens, 2 D]: one launch looks both up

    def store_context(self, features: Tensor, positions: Tensor, rows: Rows, pages: ContextPages) -> None:
        """Keys and values of features [T, n*H] at positions [T], all layers, into pages."""
        context, _ = fused_linear(self.fc, features, options=self.options)
        kv, _ = fused_linear(self.context_weight, context, norm=self.hidden_norm, bias=self.context_bias, options=self.options)
        kv = kv.view(len(kv), self.config.num_hidden_layers, 2, -1)
        cos, sin = self.turns[positions].chunk(2, -1)
        store_context(kv, self.key_norms, self.config.rms_norm_eps, True, cos, sin, rows, pages, pdl=self.pdl)

    def hidden(self, embeddings: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The last hidden states [T, H], normed, at every row of the blocks."""
        c, options = self.config, self.options
        x = embeddings * c.input_embedding_scale if c.input_embedding_scale != 1.0 else embeddings
        cos, sin = self.turns[positions].chunk(2, -1)
        sizes = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        y: Tensor | None = None
        for index, layer in enumerate(self.layers):
            qkv, x = fused_linear(layer.qkv, x, add=y, norm=layer.before, bias=layer.qkv_bias, options=options)
            o = attend(index, Projection(qkv, *sizes, layer.q_norm, layer.k_norm, None, cos, sin))
            y, _ = fused_linear(layer.out, o.flatten(1), bias=layer.out_bias, options=options)
            g, x = fused_linear(layer.gate_up, x, add=y, norm=layer.between, activation="silu", gated=True, options=options)
            y, _ = fused_linear(layer.down, g, options=options)
        return add_norm(x, y, None, 1.0, self.norm, options=options)[1]

    def best(self, hidden: Tensor, head: Tensor) -> Tensor:
        """The likeliest draft token [T] of hidden states; `head` [V, H] for a draft without its own."""
        x = hidden if self.config.logit_scale > 0 else -hidden  # a positive scale and a soft cap leave the arg-max where it is
        return argmax_linear(head if self.head is None else self.head, x, options=self.options)

    def products(self, hidden: Tensor, head: Tensor) -> Tensor:
        """The head's products [T, V_draft], before scale and soft cap."""
        return fused_linear(head if self.head is None else self.head, hidden, options=self.options)[0]


class _FusedLayer:
    """One layer's weights, concatenated, with its norms."""

    def __init__(self, layer: Layer, like: Tensor) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.before, self.between = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        self.q_norm, self.k_norm = _norm(attention.q_norm), _norm(attention.k_norm)
        self.qkv, self.qkv_bias = _joined(attention.q_proj, attention.k_proj, attention.v_proj, like=like)
        self.out, self.out_bias = _joined(attention.o_proj, like=like)
        self.gate_up, _ = _joined(mlp.gate_proj, mlp.up_proj, gated=True, like=like)
        self.down, _ = _joined(mlp.down_proj, like=like)


def _joined(*linears: nn.Module, like: Tensor, gated: bool = False) -> tuple[Tensor | Nvfp4Weight, Tensor | None]:
    """Weight and bias of linears on the same input, one below the other; gated: as [gate; up].

    NVFP4 weights get the kernels' storage and a copy in 16 bits, where `like` is and in its dtype. Those of the checkpoint move
    to the host's memory: another engine can be made of the draft, and the GPU does not hold them twice.
    """
    if not isinstance(linears[0], QuantizedLinear):
        product = Product.of(*linears)  # type: ignore[arg-type]
        return product.weight, product.bias
    whole = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    codes, scales = (
        torch.cat(parts).to(like.device) for parts in zip(*((x.weight, x.weight_scale) for x in whole), strict=True)
    )
    weight = repacked(codes, scales, float(whole[0].weight_scale_2), gated=gated).with_copy(like.dtype)
    for linear in whole:
        linear.weight, linear.weight_scale = linear.weight.cpu(), linear.weight_scale.cpu()
    biases = [x.bias.detach() for x in whole if x.bias is not None]
    return weight, torch.cat(biases) if biases else None


def _side_by_side(linears: Sequence[nn.Module], like: Tensor) -> Tensor | Nvfp4Weight:
    """A copy of their weights, one below the other."""
    if not isinstance(linears[0], QuantizedLinear):
        return torch.cat([linear.weight for linear in linears])  # type: ignore[misc]
    whole = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    parts = [(x.weight.to(like.device), x.weight_scale.to(like.device), float(x.weight_scale_2)) for x in whole]
    return Nvfp4Weight.concatenated([repacked(*part) for part in parts]).with_copy(like.dtype)


def _norm(norm: RMSNorm) -> Norm:
    return Norm(norm.weight.float(), norm.eps, round_first=True)


def fits(draft: DFlashDraft) -> bool:
    """Whether the fused pass computes what this draft does: not one of a class of its own, nor one with swapped leaves.

    NVFP4 leaves fit if the kernels' storage holds them and none rounds its inputs. Those of q/k/v and of gate/up are all NVFP4
    or none, as is checked where drafts are loaded; so must be the keys and values of all layers, which are one product.
    """
    packed = [m for m in draft.modules() if isinstance(m, QuantizedLinear)]
    linears = [m for m in draft.modules() if isinstance(m, nn.Linear)]
    return (
        type(draft) is DFlashDraft
        and all(type(m) is nn.Linear for m in linears)
        and len(linears) + len(packed) == _count(draft)
        and all(m.in_features % STEP == 0 and m.input_scale is None for m in packed)
        and (not packed or draft.config.num_key_value_heads * draft.config.head_dim % TILE == 0)
        and len({type(layer.self_attn.k_proj) for layer in draft.layers if isinstance(layer, Layer)}) == 1
    )


def _count(draft: DFlashDraft) -> int:
    return 1 + 7 * draft.config.num_hidden_layers + (draft.lm_head is not None)
