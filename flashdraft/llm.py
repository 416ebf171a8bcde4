"""LLM: tokenizer, target, draft and engine; text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, overload

import torch
from transformers import PreTrainedTokenizerBase

from flashdraft import builtin
from flashdraft.belonging import of_another_target
from flashdraft.checkpoint import check_pair, load_draft, read_config
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.memory import release_unused, saying_what_is_full
from flashdraft.engine.request import Constraint, FinishReason, Output, Request, SamplingParams, Span, TokenLogprobs
from flashdraft.errors import ConfigError, RequestError
from flashdraft.media import MediaLimits, TokensPrompt, place_media, read_media
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.template import checked, render
from flashdraft.text import TextStream

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, as in the OpenAI API


@dataclass(frozen=True)
class Completion:
    """One answer. `stop_reason` is the stop string or stop token id that ended it, None for the end-of-text token.

    acceptance_length is the mean of committed tokens over the verify steps that drafted, None without a draft.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    committed_per_step: list[int] = field(default_factory=list)
    drafted_per_step: list[int] = field(default_factory=list)
    acceptance_length: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """The answers to one prompt: `n` of them, by Completion.index. prompt_logprobs as in the engine's Output."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text


@dataclass(frozen=True)
class Delta:
    """What one step added to an answer: text that is safe to show, the new token ids, and how it ended once it has."""

    text: str
    token_ids: list[int]
    index: int = 0
    finish_reason: FinishReason | None = None
    completion: Completion | None = None  # the whole answer, with its last delta


@dataclass(eq=False)
class Live:
    """A request on its way: the engine's output and the text that follows it."""

    request: Request
    stream: TextStream
    output: Output  # an empty one until the engine has the request
    seen: int = 0
    closed: bool = False  # the last delta has been taken

    @property
    def has_news(self) -> bool:
        return len(self.output.tokens) > self.seen or (self.output.finished and not self.closed)

    def delta(self) -> Delta:
        """What is new; raises what ended the request, if that was an error."""
        if self.output.error is not None:
            raise self.output.error
        new = self.output.tokens[self.seen :]
        self.seen = len(self.output.tokens)
        if self.output.finished:
            self.stream.finish()
            self.closed = True
        completion = _completion(self) if self.output.finished else None
        return Delta(self.stream.take(), new, self.output.request.choice, self.output.finish_reason, completion)


class LLM:
    """A target with or without a draft, ready to answer.

    target: a directory, a hub id, a .gguf file, or None for the built-in pair. draft: a directory or hub id; None means the
    built-in draft for the built-in target and no draft for any other; False means none. lora: a LoRA adapter in PEFT's layout,
    directory or hub id, merged into the target. Engine limits are those of EngineConfig.

    `warning` is None, or a sentence on a draft that was trained for another target; `media_limits` bound images and audio.
    """

    warning: str | None = None
    media_limits = MediaLimits()

    def __init__(
        self,
        target: str | Path | None = None,
        draft: str | Path | Literal[False] | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        draft_revision: str | None = None,
        lora: str | Path | None = None,
        **limits: Any,
    ) -> None:
        builtin_target = target is None or target == builtin.NAME
        source = builtin.target_path() if builtin_target else target
        assert source is not None
        if draft == builtin.NAME or (draft is None and builtin_target):
            draft = builtin.draft_path()
        config = engine_config(limits)
        if draft is not None and draft is not False:
            draft_config = read_config(draft, revision=draft_revision)  # a wrong draft is refused before the target is read
        place = choose_device(device)
        config = config.for_serving(place)  # as is a GPU that is too old
        with saying_what_is_full():
            if place.type == "cuda":
                release_unused()
            self.target = load_target(source, dtype=dtype, device=place, revision=revision, lora=lora)
            self.tokenizer = load_tokenizer(source, revision=revision, lora=lora)
            model = None
            if draft is not None and draft is not False:
                t = self.target
                check_pair(draft_config, hidden_size=t.hidden_size, vocab_size=t.vocab_size, num_layers=t.num_layers)
                model = load_draft(draft, dtype=t.dtype, device=place, revision=draft_revision, packed=None)
                self.warning = of_another_target(draft, draft_revision, lora)
        self.engine = Engine(self.target, model, config)

    @classmethod
    def from_parts(cls, tokenizer: PreTrainedTokenizerBase, engine: Engine) -> LLM:
        """An LLM over an engine that already exists (tests, comparisons that share a target)."""
        self = cls.__new__(cls)
        self.target, self.tokenizer, self.engine = engine.target, tokenizer, engine
        return self

    def without_draft(self, **limits: Any) -> LLM:
        """The same target and tokenizer, no draft: the other arm of a comparison.

        On a GPU its engine takes memory beside this one's, which must have left some: see EngineConfig.kv_cache_share.
        """
        return LLM.from_parts(
            self.tokenizer, Engine(self.target, None, engine_config(limits) if limits else self.engine.config)
        )

    def generate(
        self, prompts: str | Sequence[int] | Sequence[str | Sequence[int]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Continue prompts (texts, or lists of token ids), all in one batch. Raises RequestError before anything runs."""
        encoded = [(prompt, TokensPrompt(self._encode(prompt))) for prompt in _as_list(prompts)]
        return self._run(encoded, sampling_params or SamplingParams())

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[False] = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: Literal[True],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Delta]: ...
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput] | Iterator[Delta]:
        """Answer one conversation, or several in one batch; with stream=True (one conversation) an iterator of deltas.

        The content of a message may be a list of parts: text, and where the target takes them images and audio (prompt).
        """
        if isinstance(messages, Mapping | str) or not messages:
            raise RequestError("chat takes a list of messages such as [{'role': 'user', 'content': 'Hello'}]")
        several = not isinstance(messages[0], Mapping)
        conversations: Sequence[Sequence[Message]] = messages if several else [messages]  # type: ignore[assignment, list-item]
        if stream and len(conversations) != 1:
            raise RequestError("stream=True takes one conversation at a time")
        found = [self.prompt(c, chat_template_kwargs) for c in conversations]
        if stream:
            return self._checked_stream(found[0], sampling_params)
        return self._run([(None, one) for one in found], sampling_params or SamplingParams())

    def stream(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None) -> Iterator[Delta]:
        """Continue one prompt, step by step, from the first `next` on; leaving the iterator early ends the request."""
        return self._checked_stream(TokensPrompt(self._encode(prompt)), sampling_params)

    def _checked_stream(self, prompt: TokensPrompt, sampling_params: SamplingParams | None) -> Iterator[Delta]:
        params = sampling_params or SamplingParams()
        if params.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs do not come with a stream: leave them out, or do not stream")
        live = self.prepare(prompt.ids, params, media=prompt.media)
        for one in live:
            self.engine.check(one.request)
        return self._stream(live)

    def _stream(self, live: list[Live]) -> Iterator[Delta]:
        try:
            for one in live:
                one.output = self.engine.add(one.request)
            while True:
                for one in live:
                    if one.has_news:  # perhaps from a step that another stream asked for
                        yield one.delta()
                if all(one.closed for one in live):
                    return
                self.engine.step()
        finally:
            self._abort(live)

    def prompt(self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None) -> TokensPrompt:
        """The prompt of a conversation, with its images and audio encoded by the target.

        Parts are OpenAI's image_url (data URLs) and input_audio, and {"type": "image", "image": Pillow's or bytes}, {"type":
        "audio", "audio": samples at the target's rate, or bytes}. Raises RequestError for more than `media_limits`.
        """
        clean, media = read_media(messages, self.target.media, self.media_limits)
        ids = self.render(clean, chat_template_kwargs)
        return place_media(ids, media, self.target.media) if media and self.target.media is not None else TokensPrompt(ids)

    def render(self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """The prompt ids of a conversation, by the target's chat template. Raises ConfigError if it has none."""
        return render(self.tokenizer, messages, chat_template_kwargs)

    def _encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) if isinstance(token, Integral) and not isinstance(token, bool) else token for token in prompt]
        return list(self.tokenizer(checked(prompt))["input_ids"])

    def _run(
        self, prompts: Sequence[tuple[str | Sequence[int] | None, TokensPrompt]], params: SamplingParams
    ) -> list[RequestOutput]:
        groups = [self.prepare(one.ids, params, media=one.media) for _, one in prompts]
        everyone = [one for group in groups for one in group]
        for one in everyone:
            self.engine.check(one.request)
        try:
            for one in everyone:
                one.output = self.engine.add(one.request)
            while any(not one.output.finished for one in everyone):
                self.engine.step()
        finally:
            self._abort(everyone)
        answers = [[one.delta().completion for one in group] for group in groups]
        return [
            RequestOutput(
                prompt=prompt if isinstance(prompt, str) else None,
                prompt_token_ids=given.ids,
                outputs=[answer for answer in answers_ if answer is not None],
                num_cached_tokens=group[0].output.cached_tokens,
                prompt_logprobs=group[0].output.prompt_logprobs,
            )
            for (prompt, given), group, answers_ in zip(prompts, groups, answers, strict=True)
        ]

    def prepare(
        self,
        ids: list[int],
        params: SamplingParams,
        *,
        markers: AbstractSet[int] = frozenset(),
        max_draft_tokens: int | None = None,
        constraint: Callable[[], Constraint] | None = None,
        media: tuple[Span, ...] = (),
    ) -> list[Live]:
        """The n requests of one prompt, none of them in the engine yet: they share a seed and differ by choice; the first
        scores the prompt.

        `markers` as in TextStream; `constraint` makes each of them a grammar. Raises RequestError for what is no token.
        """
        self.engine.check_tokens(ids)  # before their text is asked for
        eos = self.eos_token_ids
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
        seed, live = params.resolved_seed(), []
        for choice in range(params.n):
            text = TextStream(
                self.tokenizer,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                prompt_ids=ids,
                min_tokens=params.min_tokens,
                stop_ids=stop_ids,
                markers=markers,
            )
            request = Request(
                ids,
                params if choice == 0 else replace(params, prompt_logprobs=None),
                stop_ids=stop_ids,
                on_token=text.push,
                choice=choice,
                seed=seed,
                max_draft_tokens=max_draft_tokens,
                constraint=constraint() if constraint else None,
                media=media,
            )
            live.append(Live(request, text, Output(request)))
        return live

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end an answer unless it is to go on."""
        return self.target.eos_token_ids | ({self.tokenizer.eos_token_id} - {None})

    def _abort(self, live: list[Live]) -> None:
        for one in live:  # finished ones too: an interrupt may have come between a request's end and its leaving
            self.engine.abort(one.request.id)


def choose_device(name: str | torch.device | None) -> torch.device:
    """The device asked for, or the GPU if there is one, else the CPU. Raises ConfigError for one that is not there."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name is None else name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        cause = ", as this PyTorch is built without CUDA" if "not compiled with CUDA" in str(error) else ""
        raise ConfigError(
            f"device {name!r} cannot be used here{cause}: give cpu, or cuda on a machine with a CUDA GPU"
        ) from error
    return device


def engine_config(limits: Mapping[str, Any]) -> EngineConfig:
    unknown = set(limits) - set(EngineConfig.__dataclass_fields__)
    if unknown:
        raise ConfigError(
            f"unknown option {sorted(unknown)[0]}; engine options are {', '.join(EngineConfig.__dataclass_fields__)}"
        )
    return EngineConfig(**limits)


def _as_list(prompts: Any) -> list[str | Sequence[int]]:
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]
    return list(prompts)


def _completion(live: Live) -> Completion:
    output, params = live.output, live.output.request.params
    stop_token = output.stop_token if output.stop_token in params.stop_token_ids else None
    return Completion(
        index=output.request.choice,
        text=live.stream.text,
        token_ids=output.tokens,
        finish_reason=output.finish_reason,
        stop_reason=live.stream.stop_string or stop_token,
        logprobs=output.logprobs if params.logprobs is not None else None,
        committed_per_step=output.committed_per_step,
        drafted_per_step=output.drafted_per_step,
        acceptance_length=output.acceptance_length,
    )
