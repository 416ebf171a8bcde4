"""What a draft proposes: its likeliest tokens or, where a request samples, those that the target's own noise favours.

The target chooses output token i as argmax(log p / T + g) with noise g that only seed, choice and i decide (noise.py), so g is
known before p is. The draft proposes argmax(log q / T + c g), a Gumbel coupling of both choices (Daliri, Musco and Suresh,
"Coupling without Communication and Drafter-Invariant Speculative Decoding", 2024). The text stays the target's own, as a
proposal only counts where it equals the target's choice. c is below 1 since q, which does not know the tokens between, is
flatter than p: of the built-in draft 0.6 to 0.7 was best at temperature 0.7, and 0.8 at 1 (LOG.md).

Shape letters: T proposals, those of one sequence after those of another; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.engine.sampling import NO_FILTERS, SampleTable, arg_max, sample_line, sample_on_device, sample_sparse
from flashdraft.engine.scheduler import Sequence


def over_target(draft: DFlashDraft, logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits [..., V_draft] as logits [..., V] of the target's vocabulary, whose ids count the noise; -inf for others."""
    if draft.d2t is None:
        return logits
    ids = draft.to_target_ids(torch.arange(logits.shape[-1], device=logits.device))
    return logits.new_full((*logits.shape[:-1], vocab_size), float("-inf")).index_copy_(-1, ids, logits)


def is_coupled(sequences: SequenceOf[Sequence], share: float) -> bool:
    """Whether any of these proposals sees noise."""
    return share > 0 and not all(sequence.request.params.greedy for sequence in sequences)


def propose(
    draft: DFlashDraft,
    logits: Tensor,
    sequences: SequenceOf[Sequence],
    widths: SequenceOf[int],
    share: float,
    vocab_size: int,
) -> Tensor:
    """Proposals [T] of sequences, the first `widths` of each, from draft logits [T, V_draft]; 0 where they are not finite.

    share: c. The noise is what it is; all else is divided by c instead, which gives the same arg-max.
    """
    if not is_coupled(sequences, share):
        return draft.to_target_ids(arg_max(logits).clamp(min=0))
    requests = [sequence.request for sequence in sequences]
    lines = torch.tensor([sample_line(r.params, r.seed or 0, r.choice) for r in requests], dtype=torch.float64)
    lines[:, 0] *= share
    lines = lines.repeat_interleave(torch.tensor(widths), 0)
    index = torch.tensor([len(s.output.tokens) + i for s, width in zip(sequences, widths, strict=True) for i in range(width)])
    # Without filters: what they would drop is rarely proposed at the lower temperature c T.
    table = SampleTable.from_lines(lines.to(logits.device), index.to(logits.device), NO_FILTERS)
    sample = sample_sparse if logits.device.type == "cpu" else sample_on_device
    return sample(over_target(draft, logits, vocab_size).float(), table).clamp(min=0)
