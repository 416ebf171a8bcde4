"""Asks every turn of every prompt, with the draft and without, and records what comes back."""

from __future__ import annotations

import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeVar

from flashdraft.client import RETRIED, Client, ServerError
from flashdraft.errors import ConfigError
from flashdraft.eval import counters
from flashdraft.eval.records import Log
from flashdraft.eval.reply import Reply, ask
from flashdraft.eval.suites import Suite
from flashdraft.prompts import Prompt

Item = TypeVar("Item")
Found = TypeVar("Found")

REFUSALS = (400, 413, 422)  # of this request; the next one may do
MOST_ROUNDS = 8
TRIES, PAUSE = 4, 1.0  # of a request that fails for a reason that may pass; seconds before the second try
PATIENCE = 20  # when so many requests were refused and none was answered, none will be


@dataclass(frozen=True)
class Settings:
    """How answers are asked for. thinking: None leaves it to the chat template."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    samples: int = 1
    thinking: bool | None = None
    concurrency: int = 16


@dataclass
class Served:
    """A server, and what it can do. switches: it is ours, whose requests may turn the draft off."""

    client: Client
    model: str
    engine: str
    switches: bool
    gives_ids: bool = True  # until it refuses to be asked for them

    @classmethod
    def at(cls, client: Client, model: str | None) -> Served:
        """Raises ServerError where nothing answers, ConfigError where the model has to be named."""
        names = client.models()
        if model is None and len(names) != 1:
            shown = ", ".join(names[:5]) or "none"
            raise ConfigError(f"{client.base} serves {len(names)} models ({shown}): name the target among them with --model")
        metrics = client.text("/metrics") or ""
        known = {"flashdraft": "flashdraft:", "vllm": "vllm:", "sglang": "sglang:"}
        engine = next((name for name, mark in known.items() if f"\n{mark}" in f"\n{metrics}"), "unknown")
        return cls(client, model or names[0], engine, engine == "flashdraft")


@dataclass(frozen=True)
class Arm:
    """One way to answer: with a draft (`pinned`: all proposals verified in each step), or by the target alone."""

    draft: str
    kind: Literal["draft", "pinned", "none"]

    @property
    def name(self) -> str:
        return self.draft + {"draft": "", "pinned": ", all proposals verified", "none": ", not used"}[self.kind]


@dataclass(frozen=True)
class Conversation:
    """One sample of one prompt. Prompts that are equal but for case and space are told apart by their samples."""

    prompt: Prompt
    sample: int

    @property
    def hash(self) -> str:
        return f"{self.prompt.hash:016x}"


def conversations(suite: Suite, samples: int) -> list[Conversation]:
    seen: dict[int, int] = {}
    found = []
    for prompt in suite.prompts:
        before = seen.get(prompt.hash, 0)
        seen[prompt.hash] = before + samples
        found += [Conversation(prompt, before + i) for i in range(samples)]
    return found


def in_parallel(items: Iterable[Item], work: Callable[[Item], Iterator[Found]], count: int) -> Iterator[Found]:
    """What `work` yields for each item, by so many threads, in the order it comes. `items` is read by one thread at a time.

    The first failure ends it: what the other threads have under way is not waited for.
    """
    source, lock, stop = iter(items), threading.Lock(), threading.Event()
    done: queue.SimpleQueue[list[Found] | Exception | None] = queue.SimpleQueue()

    def taken() -> list[Item]:
        with lock:
            return [] if stop.is_set() else list(itertools.islice(source, 1))

    def run() -> None:
        try:
            while item := taken():
                for found in work(item[0]):
                    done.put([found])
                    if stop.is_set():
                        break
        except Exception as error:  # raised again by the thread that reads `done`
            done.put(error)
        done.put(None)

    for _ in range(count):
        threading.Thread(target=run, daemon=True).start()
    try:
        while count:
            result = done.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                count -= 1
            else:
                yield result[0]
    finally:
        stop.set()


class Runner:
    """Answers conversations, several at once, in rounds that the arms take in turns; what the log holds is not asked again.

    report is called with each record. Raises ServerError when a server is gone or answers nothing; what came before it is
    in the log.
    """

    def __init__(
        self, log: Log, talks: Sequence[Conversation], settings: Settings, report: Callable[[dict[str, Any]], None]
    ) -> None:
        self.log, self.talks, self.settings, self.report = log, talks, settings, report
        self._refused = 0

    def left(self, arm: Arm) -> int:
        """Turns that are still to be asked."""
        return sum(len(list(self._left(arm, talk))) for talk in self.talks)

    def run(self, arms: Sequence[tuple[Arm, Served]]) -> None:
        """The same piece of the prompts by every arm, then the next piece; another arm begins each time."""
        rounds = max(1, min(MOST_ROUNDS, len(self.talks) // self.settings.concurrency))
        size = -(-len(self.talks) // rounds)
        warmed: set[str] = set()
        for round_ in range(rounds):
            piece = self.talks[round_ * size : (round_ + 1) * size]
            at = round_ % len(arms)
            for arm, served in [*arms[at:], *arms[:at]]:
                todo = [talk for talk in piece if any(self._left(arm, talk))]
                if not todo:
                    continue
                if arm.name not in warmed:
                    warmed.add(arm.name)
                    self._try(served, {**self._body(served, arm, todo[0], 0), "max_tokens": 8})
                self._piece(arm, served, todo, round_)

    def _piece(self, arm: Arm, served: Served, talks: Sequence[Conversation], round_: int) -> None:
        flushed = served.client.flush_cache()
        before = counters.read(served.client.text("/metrics"))
        piece, count, tokens = secrets.token_hex(8), 0, 0
        begun = time.perf_counter()
        for answer in self._answers(arm, served, talks, piece):
            self.report(answer)
            if "refused" not in answer:
                count += 1
                tokens += answer["tokens"] or 0
        seconds = time.perf_counter() - begun
        counted = counters.difference(before, counters.read(served.client.text("/metrics")))
        record = {"kind": "piece", "arm": arm.name, "piece": piece, "round": round_, "answers": count, "tokens": tokens}
        self.log.add({**record, "seconds": seconds, "flushed": flushed, "counters": counted})

    def _answers(self, arm: Arm, served: Served, talks: Sequence[Conversation], piece: str) -> Iterator[dict[str, Any]]:
        """Records as threads log them."""

        def work(talk: Conversation) -> Iterator[dict[str, Any]]:
            for record in self._talk(arm, served, talk, piece):
                self.log.add(record)
                yield record

        for record in in_parallel(talks, work, min(self.settings.concurrency, len(talks))):
            self._watch(served, record)
            yield record

    def _watch(self, served: Served, record: dict[str, Any]) -> None:
        self._refused += "refused" in record
        if self._refused >= PATIENCE and all("refused" in answer for answer in self.log.answers.values()):
            raise ServerError(f"{served.client.base} refused the first {self._refused} requests: {record['refused']}")

    def _left(self, arm: Arm, talk: Conversation) -> Iterator[int]:
        """Numbers, from 1, of the turns of a conversation that are not recorded; none behind one that was refused."""
        for turn in range(len(talk.prompt.turns)):
            record = self.log.answers.get((arm.name, talk.hash, talk.sample, turn))
            if record is None:
                yield turn + 1
            elif "refused" in record:
                return

    def _talk(self, arm: Arm, served: Served, talk: Conversation, piece: str) -> Iterator[dict[str, Any]]:
        messages, prompt = talk.prompt.opening, talk.prompt
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            found = self.log.answers.get((arm.name, talk.hash, talk.sample, turn))
            if found is None:
                body = {**self._body(served, arm, talk, turn), "messages": messages}
                found = {"kind": "answer", "arm": arm.name, "prompt": talk.hash, "sample": talk.sample, "turn": turn}
                found |= {"id": prompt.id, "category": prompt.category, "piece": piece, **self._try(served, body)}
                yield found
            if "refused" in found:
                return
            # A server that does not tell thinking apart leaves it in the text; the next turn carries the answer alone.
            messages.append({"role": "assistant", "content": found["text"].rpartition("</think>")[2].lstrip()})

    def _body(self, served: Served, arm: Arm, talk: Conversation, turn: int) -> dict[str, Any]:
        s, prompt = self.settings, talk.prompt
        body: dict[str, Any] = {"model": served.model, "messages": [{"role": "user", "content": prompt.turns[0]}]}
        body |= {"max_tokens": s.max_tokens, "temperature": s.temperature}
        # The arms draw alike: of equal seeds the target's text is the same with any draft.
        body["seed"] = (prompt.hash + 1_000_003 * s.seed + 10_007 * talk.sample + turn) % 2**31
        body |= {name: value for name, value in (("top_p", s.top_p), ("top_k", s.top_k)) if value is not None}
        body |= {"return_token_ids": True} if served.gives_ids else {}
        if s.thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": s.thinking}
        if served.switches:
            body["speculation"] = {"enabled": arm.kind != "none"}
        return body

    def _try(self, served: Served, body: dict[str, Any]) -> dict[str, Any]:
        """The fields of a record. Raises ServerError when the server is gone, or will not have us."""
        attempt = 0
        while True:
            try:
                return fields(ask(served.client, body))
            except ServerError as error:
                if error.status in REFUSALS and "return_token_ids" in error.detail and "return_token_ids" in body:
                    served.gives_ids = False
                    body = {name: value for name, value in body.items() if name != "return_token_ids"}
                    continue
                if error.status in REFUSALS:
                    return {"refused": (error.detail[:300] or str(error)).encode(errors="replace").decode()}
                attempt += 1
                if (error.status is not None and error.status not in RETRIED) or attempt == TRIES:
                    raise
                time.sleep(PAUSE * 2 ** (attempt - 1))


def fields(reply: Reply) -> dict[str, Any]:
    """What a record keeps of an answer."""
    times = {name: None if value is None else round(value, 6) for name, value in (("first", reply.first), ("last", reply.last))}
    return {
        "prompt_tokens": reply.prompt_tokens,
        "tokens": reply.tokens,
        "thinking_tokens": reply.thinking_tokens,
        **times,
        "seconds": round(reply.seconds, 6),
        "finish_reason": reply.finish_reason,
        "repetition": round(reply.repetition, 4),
        "text": reply.text,
        "speculation": None if reply.speculation is None else asdict(reply.speculation),
    }
