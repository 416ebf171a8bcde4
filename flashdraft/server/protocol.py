"""What requests look like: OpenAI's fields and vLLM's, checked by pydantic where JSON comes in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from flashdraft.engine.request import SamplingParams

MAX_CHOICES, MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS, MAX_TOOLS = 128, 64, 1000, 4096, 1024

MAX_TOKENS = 1_000_000  # to decode at once

T = TypeVar("T")


class FirstError:
    """Of a list: end at the first wrong item. Megabytes of them would take a minute and gigabytes of error messages."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return {**handler(source), "fail_fast": True}  # pydantic's own FailFast cannot be hashed, hence not stand in a union


Many = Annotated[list[T], FirstError()]


class Model(BaseModel):
    """Types are taken as they are ("5" is no number); unknown fields are ignored, as clients send their own."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class StreamOptions(Model):
    include_usage: bool = False
    continuous_usage_stats: bool = False


# Numbers, which SamplingParams checks one by one: pydantic would collect all that are none
Bias = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}})]


class Speculation(Model):
    """Ours: whether and how far to draft for this request; `report` says in each chunk which tokens were accepted."""

    enabled: bool = True
    max_draft_tokens: int | None = Field(default=None, ge=0)
    report: bool = False


class JsonSchema(Model):
    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Model):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("response_format of type json_schema needs json_schema.schema")
        return self


class StructuredOutputs(Model):
    """vLLM's name for grammars: exactly one of them."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampling(Model):
    """What all endpoints have in common. Fields named in REFUSED would change the answer and are not there."""

    REFUSED: ClassVar[dict[str, str]] = {
        "guided_json": "use response_format or structured_outputs",
        "guided_regex": "use structured_outputs",
        "guided_choice": "use structured_outputs",
        "guided_grammar": "use structured_outputs",
        "use_beam_search": "beam search is not there: leave it out",
        "logits_processors": "they are not there: use logit_bias",
        "best_of": "leave it out, and use n",
        "bad_words": "it is not there: use logit_bias",
        "allowed_token_ids": "it is not there: use structured_outputs or logit_bias",
        "truncate_prompt_tokens": "shorten the prompt before sending it",
        "length_penalty": "beam search is not there: leave it out",
    }
    MAY_BE_ONE: ClassVar[tuple[str, ...]] = ("best_of", "length_penalty")
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    stop: str | Many[str] | None = None
    stop_token_ids: Many[int] | None = Field(default=None, max_length=MAX_STOP_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    prompt_logprobs: int | None = Field(default=None, ge=0)
    skip_special_tokens: bool = True
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    speculation: Speculation | None = None
    return_token_ids: bool | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            for name, remedy in cls.REFUSED.items():
                given = data.get(name)
                if not (given is None or given is False or given == [] or (name in cls.MAY_BE_ONE and given == 1)):
                    raise ValueError(f"{name} is not supported: {remedy}")
            if data.get("stream_options") is not None and not data.get("stream"):
                raise ValueError("stream_options needs stream: true")
        return data

    @model_validator(mode="after")
    def _bounds(self) -> Sampling:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop may hold at most {MAX_STOPS} strings")
        if any(len(stop) > MAX_STOP_CHARS for stop in ([self.stop] if isinstance(self.stop, str) else self.stop or ())):
            raise ValueError(f"stop: a stop string may hold at most {MAX_STOP_CHARS} characters")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs do not come with a stream: leave them out, or do not stream")
        return self

    @property
    def likeliest_of_prompt(self) -> int | None:
        """So many likeliest tokens are wanted at each place of the prompt; None: no log-probabilities of it."""
        return self.prompt_logprobs

    def sampling_params(self, defaults: Mapping[str, Any], logprobs: int | None, max_tokens: int | None) -> SamplingParams:
        """Raises RequestError for values out of range."""
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        given: dict[str, Any] = dict(defaults) | {n: v for n in names if (v := getattr(self, n)) is not None}
        return SamplingParams(
            **given,
            logit_bias=_token_ids(self.logit_bias or {}),
            seed=self.seed,
            n=self.n or 1,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=self.likeliest_of_prompt,
            skip_special_tokens=self.skip_special_tokens,
        )


def _token_ids(bias: Mapping[str, Any]) -> dict[Any, Any]:
    """JSON's keys are strings; what is no id is left for SamplingParams to refuse by name."""
    return {int(key) if key.isascii() and key.isdigit() and len(key) < 12 else key: value for key, value in bias.items()}


class FunctionSpec(Model):
    name: str = Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(Model):
    name: str


class NamedTool(Model):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """POST /v1/chat/completions."""

    REFUSED: ClassVar[dict[str, str]] = {
        **Sampling.REFUSED,
        "functions": "use tools",
        "function_call": "use tool_choice",
        "audio": "this server answers in text: leave it out",
        "documents": "put them into a message",
        "chat_template": "the server has one: --chat-template",
    }
    messages: Many[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0)
    tools: Many[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    thinking_token_budget: int | None = Field(default=None, ge=0)
    modalities: Many[Literal["text"]] | None = None

    @model_validator(mode="after")
    def _agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        choice = self.tool_choice
        if choice in ("auto", "required") and not self.tools:
            raise ValueError(f"tool_choice {choice} needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in {tool.function.name for tool in self.tools or ()}:
            raise ValueError(f"tool_choice names {choice.function.name!r}, which is not among the tools")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def tools_in_use(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else list(self.tools or ())


class CompletionRequest(Sampling):
    """POST /v1/completions: texts or token ids."""

    REFUSED: ClassVar[dict[str, str]] = {
        **Sampling.REFUSED,
        "suffix": "filling in is not there: leave it out",
        "prompt_embeds": "give text or token ids",
    }
    prompt: str | Many[str] | Many[int] | Many[Many[int]]
    max_tokens: int | None = Field(default=None, ge=0)  # 0, with echo: the prompt alone
    echo: bool | None = False
    logprobs: int | None = Field(default=None, ge=0)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _agree(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None and self.stream:
            raise ValueError("echo with logprobs does not come with a stream: leave one of them out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 together with echo")
        if self.max_tokens == 0 and self.min_tokens:
            raise ValueError("min_tokens must not be greater than max_tokens 0")
        if self.prompt == []:
            raise ValueError("the prompt is empty: give at least one token")
        return self

    @property
    def likeliest_of_prompt(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return self.prompt_logprobs if echoed is None else max(echoed, self.prompt_logprobs or 0)

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.prompt
        return [given] if isinstance(given, str) or isinstance(given[0], int) else given


class TokenizeRequest(Model):
    """POST /tokenize: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Many[dict[str, Any]] | None = None
    tools: Many[Tool] | None = Field(default=None, max_length=MAX_TOOLS)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(Model):
    """POST /detokenize."""

    model: str | None = None
    tokens: Many[int] = Field(max_length=MAX_TOKENS)
