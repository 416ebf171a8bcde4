"""A request in the engine: its tokens, its pages, and how far they are computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from flashdraft.engine.cache import SequencePages
from flashdraft.engine.request import Output, Request, TokenLogprobs


@dataclass(eq=False)
class Sequence:
    """A request in the engine. Position i of `tokens` is *computed* once its keys and values are in pages, target's and
    draft's.

    While decoding, the last token (the anchor) is the only one not computed. A step may be scheduled before the one before it
    is committed: `pending` counts the steps under way that will choose tokens for the sequence, one each at least and `ahead`
    in all at most, and `launched` the positions whose computation has been started.
    """

    request: Request
    output: Output
    arrival: int
    tokens: list[int]
    held: list[SequencePages]
    computed: int = 0
    keys: list[bytes] = field(default_factory=list)
    slot: int = -1  # the row of the runner's page tables; -1 while waiting
    launched: int = 0
    pending: int = 0
    ahead: int = 0
    room: int = 0  # positions that its pages are known to hold
    stays: int = 0  # before this position no page leaves a window

    may_need_host: bool = field(init=False)  # for some choice: host_choice.needs_host

    def __post_init__(self) -> None:
        p = self.request.params
        self.may_need_host = self.request.is_for_host or (p.min_tokens > 0 and bool(self.request.stop_ids))

    @property
    def prefill_goal(self) -> int:
        """All prompt tokens (the last one's logits give the first token); on resumption all but the anchor."""
        return len(self.tokens) - 1 if self.output.tokens else len(self.tokens)

    @property
    def decoding(self) -> bool:
        return bool(self.output.tokens or self.pending) and self.launched >= self.prefill_goal

    @property
    def unscored(self) -> int:
        """Prompt tokens whose log-probabilities are asked for and not committed yet."""
        scores = self.output.prompt_logprobs
        return 0 if scores is None else len(self.request.prompt) - len(scores)

    @property
    def cacheable(self) -> int:
        """So many first positions may come from the prefix cache: one at least is computed, and all that score tokens are."""
        return len(self.request.prompt) - self.unscored - 1 if self.unscored else len(self.tokens) - 1

    def scored(self, start: int, count: int) -> int:
        """So many of the `count` positions from `start` on score the prompt token behind them."""
        return max(0, min(count, len(self.request.prompt) - 1 - start)) if self.unscored else 0

    def score(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Commit what the positions from `start` on say; entries that are there already, as after a preemption, stay."""
        scores = self.output.prompt_logprobs
        assert scores is not None and start < len(scores)
        scores += entries[len(scores) - start - 1 :]

    def uncut(self, start: int, count: int) -> int:
        """So many of the `count` positions from `start` on that the next chunk cuts no media that must stay whole."""
        end = start + count
        cut = (span for span in self.request.media if span.whole and span.start < end < span.start + span.length)
        return next((span.start - start for span in cut), count)

    def ends_for_certain(self, max_model_len: int) -> bool:
        """Whether the steps under way end the request whatever they choose."""
        limit = self.request.params.max_tokens
        return len(self.tokens) + self.pending >= max_model_len or (
            limit is not None and len(self.output.tokens) + self.pending >= limit
        )
