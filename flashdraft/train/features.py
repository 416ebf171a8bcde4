"""Features of packed rows by the target itself: the captured layers and the last hidden states, without pages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.errors import ConfigError
from flashdraft.kernels.packed_attention import DocumentAttention
from flashdraft.targets.target import Target
from flashdraft.train.anchors import block_ids, block_positions, draft_blocks, draft_masks
from flashdraft.train.data import Batch


@torch.no_grad()
def packed_forward(target: Target, batch: Batch, same_rows: bool = False) -> tuple[Tensor, Tensor]:
    """Features [B, S, n*H] of the captured layers and the last hidden states [B, S, H] of packed rows.

    Taken from the batch where they were cached. The processes that hold a target together all call this, each with rows of its
    own (or with `same_rows`): the target runs over those of all, and each is given its own.
    """
    if batch.features is not None and batch.last is not None:
        return batch.features, batch.last
    group = None if same_rows else target.group
    given = (batch.ids, batch.positions, batch.documents)
    ids, positions, documents = given if group is None else map(group.gather, given)
    with target.attending(DocumentAttention(documents)):
        # a ready 4-D mask, ignored by our attention, keeps transformers from inspecting the positions
        out = target.decoder(
            input_ids=ids.flatten()[None],
            position_ids=positions.flatten()[None],
            attention_mask=torch.zeros((1, 1, 1, 1), device=ids.device),
            use_cache=False,
        )
    features = target.take_features()
    assert features is not None, "capture the draft's feature layers first"
    found = features.view(*ids.shape, -1), out.last_hidden_state[0].view(*ids.shape, -1)
    return found if group is None else (group.own(found[0]), group.own(found[1]))


def block_hidden(
    target: Target,
    draft: DFlashDraft,
    batch: Batch,
    features: Tensor,
    windowed: bool = True,
    blocks: Callable[..., Tensor] = draft_blocks,
) -> Tensor:
    """Hidden states of all blocks of a batch, [B, N, Z, H]; `windowed` False leaves out the draft's windows.

    blocks: draft_blocks, or what it was compiled to.
    """
    c = draft.config
    ids = block_ids(batch.ids, batch.anchors, c.block_size, c.mask_token_id)
    slots = block_positions(batch.positions, batch.anchors, c.block_size)
    masks = draft_masks(draft, batch.anchors, batch.documents, windowed)
    embed = target.embed_rows if draft.embed_tokens is None else draft.embed_tokens
    device, dtype = batch.ids.device.type, draft.norm.weight.dtype
    embeddings = embed(ids).to(dtype)  # float32 keeps the residual stream so under autocast
    mixed = device == "cuda" and dtype == torch.float32
    with torch.autocast(device, torch.bfloat16, enabled=mixed):
        given = features if mixed else features.to(dtype)
        hidden = blocks(draft, given, batch.positions, embeddings, slots, masks)
    return hidden.unflatten(1, (-1, c.block_size))


def head_weight(target: Target, draft: DFlashDraft) -> Tensor:
    """The frozen head [V, H] that training uses. Raises ConfigError for a draft that would train one of its own."""
    c = draft.config
    own = {
        "head": c.has_own_lm_head,
        "embeddings": c.has_own_embeddings,
        "logit scale": c.logit_scale != 1.0,
        "soft cap": c.final_logit_softcapping is not None,
    }
    if found := [name for name, has in own.items() if has]:
        raise ConfigError(
            f"training uses the target's head and embeddings, and the draft has {' and '.join(found)} of its own: "
            "start from another draft, or from none"
        )
    return target.model.get_output_embeddings().weight.detach()
