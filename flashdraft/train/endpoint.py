"""Answers by any OpenAI-compatible server that serves the target, as token ids of the target's tokenizer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from textwrap import shorten
from typing import Any

from transformers import PreTrainedTokenizerBase

from flashdraft.client import ChatReply, Client, ReplyError, ServerError
from flashdraft.errors import ConfigError
from flashdraft.train.jobs import Answer, Finish, Job, Jobs

PATIENCE = 20  # when so many answers cannot be used and none could, none will be
REFUSED, OTHER, EMPTY = "refused by the server", "no chat completion", "empty"
ENDINGS = ("content_filter", "tool_calls", "function_call", "abort")  # what servers name besides stop and length
MARK = "flashdraft-mark"


class EndpointSource:
    """Answers by a server, `concurrency` at once. model: its name there, which is not needed where it is the only one.

    Token ids are the server's own where it gives them (vLLM: return_token_ids); else prompt and answer are tokenized here, each
    by itself, and an answer counts only if its ids decode to its text. Raises ConfigError where the server has no such model,
    ServerError where it does not answer.
    """

    max_len: int | None = None

    target_hash: str | None = None

    def __init__(
        self, client: Client, tokenizer: PreTrainedTokenizerBase, *, model: str | None = None, concurrency: int = 64
    ) -> None:
        self.client, self.tokenizer, self.concurrency = client, tokenizer, concurrency
        self.model: str | None = model or _only_model(client)
        self._closing = _closing_token(tokenizer)
        self._gives_ids = True  # until it refuses to be asked for them
        self._used = False  # whether any answer could be used
        self._refusal = ""  # what the server said of the last request it refused

    def describe(self) -> str:
        return f"by {self.model} at {self.client.base}, {self.concurrency:,} requests at once"

    def run(self, jobs: Jobs) -> Iterator[Answer]:
        """See jobs.Source."""
        todo: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Job, ChatReply | Exception]] = queue.SimpleQueue()
        # Daemons: a program that ends does not wait for the server.
        workers = [threading.Thread(target=self._work, args=(todo, done), daemon=True) for _ in range(self.concurrency)]
        for worker in workers:
            worker.start()
        live, held = 0, list[Answer]()
        try:
            while jobs or live:
                while live < self.concurrency and jobs:
                    todo.put(jobs.popleft())
                    live += 1
                answer = self._answer(*done.get())
                live -= 1
                held.append(answer)
                self._used = self._used or not answer.problem
                if self._used:
                    yield from held
                    held = []
                elif len(held) >= PATIENCE:  # nothing was yielded: mended, the same prompts are asked again
                    raise self._nothing_usable(answer.problem, PATIENCE)
            if held and all(answer.problem in (OTHER, EMPTY) for answer in held):  # of few prompts: the server, not they
                raise self._nothing_usable(held[-1].problem, len(held))
            yield from held
        finally:
            for _ in workers:
                todo.put(None)

    def _work(self, todo: Any, done: Any) -> None:
        while (job := todo.get()) is not None:
            try:
                done.put((job, self._ask(job)))
            except Exception as error:  # raised again by run
                done.put((job, error))

    def _ask(self, job: Job) -> ChatReply:
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
        if self._gives_ids:
            try:
                return self.client.chat({**body, "return_token_ids": True})
            except ServerError as error:
                if error.status not in (400, 422) or "return_token_ids" not in error.detail:
                    raise
                self._gives_ids = False
        return self.client.chat(body)

    def _answer(self, job: Job, reply: ChatReply | Exception) -> Answer:
        if isinstance(reply, ServerError) and reply.status in (400, 413, 422):  # this request; the next may do
            self._refusal = reply.detail
            return Answer(job, [], "stop", REFUSED)
        if isinstance(reply, ReplyError):
            self._refusal = str(reply)
            return Answer(job, [], "stop", OTHER)
        if isinstance(reply, Exception):
            raise reply
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

    def _nothing_usable(self, problem: str, count: int) -> ConfigError:
        said = f": {shorten(self._refusal, 160)}" if problem in (REFUSED, OTHER) else ""
        return ConfigError(
            f"none of the first {count} answers of {self.client.base} can be used ({problem}{said}): check that model "
            f"{self.model!r} there is the target"
        )


def _only_model(client: Client) -> str:
    names = client.models()
    if len(names) == 1:
        return names[0]
    shown = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else "none"
    raise ConfigError(f"{client.base} serves {len(names)} models ({shown}): name the target among them with --model")


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
