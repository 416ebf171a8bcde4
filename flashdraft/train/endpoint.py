"""Answers by OpenAI-compatible servers of the target, as token ids of the target's tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import Any

from transformers import PreTrainedTokenizerBase

from flashdraft.client import ChatReply, Client, ReplyError, ServerError
from flashdraft.errors import ConfigError
from flashdraft.train.fleet import Fleet, Server
from flashdraft.train.jobs import Answer, Finish, Job, Jobs

PATIENCE = 20  # when so many answers cannot be used and none could, none will be
REFUSED, OTHER, EMPTY, FAILED = "refused by the server", "no chat completion", "empty", "the server failed over it"
ENDINGS = ("content_filter", "tool_calls", "function_call", "abort")  # what servers name besides stop and length
MARK = "flashdraft-mark"


class EndpointSource:
    """Answers by servers of one model. model: its name there, which is not needed where it is the only one.

    Each server is sent at most `concurrency` requests at once, and fewer where that is faster or it refuses some (fleet.py).
    Token ids are the server's own where it gives them (vLLM: return_token_ids); else prompt and answer are tokenized here, each
    by itself, and an answer counts only if its ids decode to its text. `say` is told of servers that are lost, or back.
    Raises ConfigError where a server has no such model, ServerError where none answers.
    """

    max_len: int | None = None

    target_hash: str | None = None

    def __init__(
        self,
        clients: Sequence[Client],
        tokenizer: PreTrainedTokenizerBase,
        *,
        model: str | None = None,
        concurrency: int = 64,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.tokenizer, self.concurrency = tokenizer, concurrency
        self.fleet = Fleet(clients, model, concurrency, say)
        self.model: str | None = self.fleet.model
        self._closing = _closing_token(tokenizer)
        self._used: set[Server] = set()  # those of which an answer could be used
        self._refusal = ""  # what a server said of the last request it refused

    def describe(self) -> str:
        names = [server.name for server in self.fleet.servers]
        where = ", ".join(names) + (f", {self.concurrency:,} requests at once" if len(names) == 1 else "")
        return f"by {self.model} at {where}" + (f", up to {self.concurrency:,} requests at once each" if len(names) > 1 else "")

    def status(self) -> str:
        """Tokens/s of each server; "" for only one."""
        return self.fleet.status() if len(self.fleet.servers) > 1 else ""

    def run(self, jobs: Jobs) -> Iterator[Answer]:
        """See jobs.Source. A server's answers are held back until one of them can be used."""
        held: dict[Server, list[Answer]] = {}
        for server, job, said, full in self.fleet.run(jobs, self._ask):
            answer = self._answer(job, said)
            server.answered(len(answer.tokens), full)
            if not answer.problem:
                self._used.add(server)
            mine = held.setdefault(server, [])
            mine.append(answer)
            if server in self._used:
                yield from held.pop(server)
            elif len(mine) >= PATIENCE:  # nothing was yielded: mended, the same prompts are asked again
                raise self._nothing_usable(server, answer.problem, PATIENCE)
        for server, mine in held.items():
            if all(answer.problem in (OTHER, EMPTY) for answer in mine):  # of few prompts: the server, not they
                raise self._nothing_usable(server, mine[-1].problem, len(mine))
            yield from mine

    def _ask(self, server: Server, job: Job) -> ChatReply:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": list(job.messages),
            "max_tokens": job.max_new,
            "temperature": job.temperature,
            "top_p": job.top_p,
            "seed": job.seed,
        }
        body |= {"top_k": job.top_k} if job.top_k else {}
        body |= {"chat_template_kwargs": dict(job.template)} if job.template else {}
        if server.gives_ids:
            try:
                return server.client.chat({**body, "return_token_ids": True}, retries=0)
            except ServerError as error:
                if error.status not in (400, 422) or "return_token_ids" not in error.detail:
                    raise
                server.gives_ids = False
        return server.client.chat(body, retries=0)

    def _answer(self, job: Job, reply: ChatReply | ServerError) -> Answer:
        if isinstance(reply, ServerError) and reply.status in (400, 413, 422):  # this request; the next may do
            self._refusal = reply.detail
            return Answer(job, [], "stop", REFUSED)
        if isinstance(reply, ReplyError):
            self._refusal = str(reply)
            return Answer(job, [], "stop", OTHER)
        if isinstance(reply, ServerError):  # to one job again and again, with others answered in between
            return Answer(job, [], "stop", FAILED)
        if reply.finish_reason not in ("stop", "length"):
            reason = reply.finish_reason if reply.finish_reason in ENDINGS else "an unknown reason"
            return Answer(job, [], "stop", f"ended by the server with {reason if reply.finish_reason else 'no reason'}")
        finish: Finish = "stop" if reply.finish_reason == "stop" else "length"
        if reply.token_ids is not None:
            return self._from_ids(job, reply, finish)
        if not reply.text and not reply.reasoning:
            return Answer(job, [], finish, EMPTY)
        if reply.reasoning:
            return Answer(job, [], finish, "thinking without its token ids")
        # A server takes the special tokens out of its text: where their names are left, the target spelled them.
        ids = self.tokenizer(reply.text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        same = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == reply.text
        return Answer(job, [*ids, self._closing] if finish == "stop" else ids, finish, "" if same else "text and tokens differ")

    def _from_ids(self, job: Job, reply: ChatReply, finish: Finish) -> Answer:
        ids = list(reply.token_ids or ())
        if reply.prompt_token_ids:
            job = replace(job, prompt=list(reply.prompt_token_ids))
        vocab = len(self.tokenizer)
        if any(not 0 <= token < vocab for token in (*ids, *job.prompt)):
            return Answer(job, ids, finish, "text and tokens differ")
        if not ids:
            return Answer(job, ids, finish, EMPTY if not reply.text else "text and tokens differ")
        text = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if reply.text.strip() not in text:
            return Answer(job, ids, finish, "text and tokens differ")
        if finish == "stop" and self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == reply.text:
            ids.append(self._closing)  # this server keeps the stop token to itself
        return Answer(job, ids, finish)

    def _nothing_usable(self, server: Server, problem: str, count: int) -> ConfigError:
        said = f": {shorten(self._refusal, 160)}" if problem in (REFUSED, OTHER) else ""
        return ConfigError(
            f"none of the first {count} answers of {server.name} can be used ({problem}{said}): check that model "
            f"{self.model!r} there is the target"
        )


def _closing_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends an answer: what the chat template writes behind one, else the tokenizer's end of text."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    ids = tokenizer(text.partition(MARK)[2].lstrip(), add_special_tokens=False)["input_ids"]
    if ids and ids[0] in tokenizer.all_special_ids:
        return int(ids[0])
    if tokenizer.eos_token_id is None:
        raise ConfigError("this target's tokenizer names no end-of-text token, which answers of a server need")
    return int(tokenizer.eos_token_id)
