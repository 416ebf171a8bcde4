"""A draft on its target without an engine: its statistics on recorded answers, and the acceptance length of its proposals."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashdraft.draft import DFlashDraft
from flashdraft.errors import ConfigError
from flashdraft.quant.calibrate import Calibration
from flashdraft.quant.linear import QuantizedLinear, expand, swap
from flashdraft.targets.target import Target
from flashdraft.train.anchors import sample_anchors
from flashdraft.train.data import Batch, FeatureCache, Records, lay_out, make_batch, pack_rows
from flashdraft.train.distributed import World
from flashdraft.train.features import block_hidden, packed_forward
from flashdraft.train.loss import chunk_rows
from flashdraft.train.validation import acceptance


class LastFeatures:
    """The target's features of the rows asked for last: several drafts in turn are measured on the same ones."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._asked: tuple[Records, Sequence[Sequence[int]], int] | None = None
        self._found: tuple[Tensor, Tensor]

    def rows(self, records: Records, rows: Sequence[Sequence[int]], row_length: int) -> tuple[Tensor, Tensor]:
        """See data.FeatureCache."""
        last = self._asked
        if last is None or last[0] is not records or last[1:] != (rows, row_length):
            layout = lay_out(records, rows, row_length)
            none = torch.zeros(len(rows), 1, dtype=torch.long)
            batch = make_batch(layout, none, none.bool(), 2).to(self.target.device)
            self._asked, self._found = (records, rows, row_length), packed_forward(self.target, batch)
        return self._found


@dataclass
class Guesses:
    """A draft with its target's features, embeddings and, where it has none of its own, head."""

    target: Target
    draft: DFlashDraft
    world: World = field(default_factory=World)
    cache: FeatureCache | None = None

    def __post_init__(self) -> None:
        self.target.capture(self.draft.config.target_layer_ids)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def hidden(self, batch: Batch, features: Tensor, windowed: bool = True) -> Tensor:
        """See validation.Proposer."""
        return block_hidden(self.target, self.draft, batch, features, windowed)

    def choose(self, hidden: Tensor) -> Tensor:
        """See validation.Proposer."""
        parts = hidden.split(chunk_rows(self.draft.config.vocab_size))
        return torch.cat([self.draft.to_target_ids(self.draft.logits(part, self._head).argmax(-1)) for part in parts])

    def _head(self, hidden: Tensor) -> Tensor:
        weight = target_head(self.target)
        return hidden.to(weight.dtype) @ weight.T


def target_head(target: Target) -> Tensor:
    """The weight [V, H] of the target's output head."""
    return target.model.get_output_embeddings().weight.detach()


def with_own_head(draft: DFlashDraft, target: Target) -> DFlashDraft:
    """A draft's weights with the target's output head as its own. Raises ConfigError for a head that is more than a weight."""
    if getattr(target.model.get_output_embeddings(), "bias", None) is not None:
        raise ConfigError("the target's output head has a bias, which a draft's cannot have: leave out --own-head")
    with torch.device("meta"):
        own = DFlashDraft(draft.config.with_(has_own_lm_head=True))
    weight = target_head(target).to(draft.norm.weight.dtype)
    own.load_state_dict({**draft.state_dict(), "lm_head.weight": weight}, assign=True)
    return own.requires_grad_(False).eval()


def without_head(draft: DFlashDraft) -> DFlashDraft:
    """A copy of a draft that uses its target's head."""
    made = copy.deepcopy(draft)
    made.config, made.lm_head = draft.config.with_(has_own_lm_head=False), None
    return made


def with_quantized(draft: DFlashDraft, layers: Mapping[str, QuantizedLinear]) -> DFlashDraft:
    """A copy of a draft with these of its linears in NVFP4."""
    made = copy.deepcopy(draft)
    for name, layer in layers.items():
        swap(made, name, layer)
    return made


def computing(draft: DFlashDraft, dtype: torch.dtype) -> DFlashDraft:
    """A copy of a draft to compute with: its QuantizedLinears expanded, all of it in `dtype`."""
    made = copy.deepcopy(draft)
    expand(made, dtype)
    return made.to(dtype)


@dataclass(frozen=True)
class Rows:
    """How records are packed: rows of so many tokens, so many at once, each with so many anchors at a time."""

    length: int
    at_once: int
    anchors: int

    @classmethod
    def of(cls, records: Records, device: torch.device, block_size: int) -> Rows:
        length = -(-int(records.lengths.max()) // 64) * 64
        return cls(length, 8 if device.type == "cuda" else 1, max(1, length // 2 // block_size))


def acceptance_of(guesses: Guesses, records: Records, rows: Rows) -> list[list[int]]:
    """Accepted proposals of every verify step, for each record."""
    training = guesses.draft.training
    found = acceptance(guesses, records, seq_length=rows.length, rows=rows.at_once, anchors=rows.anchors)
    guesses.draft.train(training)
    return found


def calibration_run(
    guesses: Guesses, records: Records, rows: Rows, report: Callable[[int, int], None]
) -> Callable[[Calibration], None]:
    """Runs the draft over blocks of all records, on the target's features; `report` is given batches done and all of them.

    Padding does not count: of the context all real tokens, of the blocks all slots of real ones, of an own head the rows that
    predict a token.
    """
    packed, size = pack_rows(records.lengths, rows.length), guesses.draft.config.block_size
    assert rows.anchors * size != rows.length, "context and blocks are told apart by their number of rows"

    def run(calibration: Calibration) -> None:
        generator = torch.Generator().manual_seed(0)
        for first in range(0, len(packed), rows.at_once):
            members = packed[first : first + rows.at_once]
            members += [[]] * (rows.at_once - len(members))
            layout = lay_out(records, members, rows.length)
            draws = torch.rand(layout[0].shape, generator=generator)
            anchors, real = sample_anchors(layout[3], layout[2], rows.anchors, draws)
            batch = make_batch(layout, anchors, real, size).to(guesses.device)
            features, _ = packed_forward(guesses.target, batch)
            slots = real[:, :, None].expand(-1, -1, size).flatten().to(guesses.device)
            with calibration.only({batch.ids.numel(): (batch.documents >= 0).flatten(), slots.numel(): slots}):
                hidden = guesses.hidden(batch, features)
            if guesses.draft.lm_head is not None and len(batch.rows):
                guesses.draft.lm_head(hidden[:, :, 1:].flatten(0, 2)[batch.rows])
            report(min(first + rows.at_once, len(packed)), len(packed))

    return run
