"""Prompts of text, images and audio as the engine takes them, and what transformers computes for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from families import VOCAB
from multimodal import AUDIO, IMAGE, own_media_forward

from flashdraft.engine.request import Request, SamplingParams, Span
from flashdraft.targets.target import Target


def text(seed: int, length: int) -> list[int]:
    return torch.randint(3, VOCAB - 10, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class MediaPrompt:
    """Ids with placeholders, the media in order of appearance, and their spans."""

    ids: list[int] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    sounds: list[np.ndarray] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @classmethod
    def of(cls, target: Target, *pieces: Any) -> MediaPrompt:
        """pieces: lists of ids, Pillow images, arrays of samples."""
        prompt = cls()
        assert target.media is not None
        for piece in pieces:
            if isinstance(piece, list):
                prompt.ids += piece
                continue
            kind = "audio" if isinstance(piece, np.ndarray) else "image"
            (prompt.sounds if kind == "audio" else prompt.images).append(piece)
            encoded, mark = target.media.encode(kind, piece), target.media.marks[kind]
            length = len(encoded.embeddings)
            prompt.spans.append(Span(len(prompt.ids) + 1, length, encoded.key, encoded.embeddings, encoded.whole))
            prompt.ids += [mark.begin, *[mark.placeholder] * length, mark.end]
        return prompt

    def request(self, **params: Any) -> Request:
        return Request(
            list(self.ids), SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **params}), media=tuple(self.spans)
        )

    def own_forward(self, model: Any, behind: list[int] = []):  # noqa: B006 (never changed)
        """transformers' logits [T, V] and layer outputs [T, layers, H] of the prompt and the tokens behind it.

        A random model may answer with placeholders, which it then takes for padding.
        """
        behind = [0 if token in (IMAGE, AUDIO) else token for token in behind]
        return own_media_forward(model, self.ids + behind, self.images, self.sounds)

    def rows(self) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """What Target.forward and packed_attend are given: media rows, and how far each row sees."""
        n = len(self.ids)
        where, reach = torch.zeros(n, dtype=torch.bool), torch.full((n,), -1)
        rows = torch.zeros(n, 64)
        for span in self.spans:
            here = slice(span.start, span.start + span.length)
            where[here], rows[here] = True, span.embeddings
            if span.whole:
                reach[here] = here.stop - 1
        return (where, rows), reach
