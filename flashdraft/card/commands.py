"""How to use the draft, as commands and code that can be copied."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from flashdraft import builtin
from flashdraft.card.subject import MAIN, Subject

DIRECTORY, TARGET = "DIR", "TARGET"  # where no name is known


@dataclass(frozen=True)
class Usage:
    """Commands for one draft. repo: its hub id, None for a directory; target: a hub id or TARGET."""

    subject: Subject
    repo: str | None
    target: str

    @property
    def draft(self) -> str:
        """As flashdraft names it."""
        return self.repo or (builtin.NAME if self.subject.is_builtin else DIRECTORY)

    @property
    def needs_directory(self) -> bool:
        return self.repo is None

    def flashdraft(self, revision: str) -> list[str]:
        """Talk, serve, compare with the target alone, look into the files."""
        target, revised = self._target_options(), [] if revision == MAIN else ["--draft-revision", revision]
        # Without --target the built-in pair is meant, its draft too.
        draft = [] if self.subject.is_builtin and self.repo is None else ["--draft", self.draft]
        commands = [
            ["chat", *target, *draft, *revised],
            ["serve", *self._serve_target(), *self._serve_draft(revision, draft)],
            ["generate", *target, *draft, *revised, "--compare"],
            ["inspect", self.draft, "--target", builtin.NAME if self.subject.of_builtin_target else self.target],
        ]
        commands[-1] += [] if revision == MAIN else ["--revision", revision]
        return [shlex.join(["flashdraft", *command]) for command in commands]

    def evaluation(self, suite: str) -> str:
        """Of a suite by its name; of SPEED-Bench the prompts are fetched first."""
        if suite == "speed-bench":
            return f"flashdraft eval prepare speed-bench, then {self.evaluation('speed-bench-qualitative.jsonl')}"
        return shlex.join(["flashdraft", "eval", suite, *self._target_options(), "--draft", self.draft])

    def _target_options(self) -> list[str]:
        return [*([] if self.subject.of_builtin_target else ["--target", self.target]), *self._loading()]

    def _serve_target(self) -> list[str]:
        return [*([] if self.subject.of_builtin_target else [self.target]), *self._loading()]

    def _serve_draft(self, revision: str, draft: list[str]) -> list[str]:
        if revision == MAIN:
            return draft
        return ["--speculative-config", json.dumps({"model": self.draft, "revision": revision})]

    def _loading(self) -> list[str]:
        subject = self.subject
        found = ["--revision", subject.target_revision] if subject.target_revision else []
        return [*found, *(["--lora", subject.lora] if subject.lora else [])]

    def python(self, revision: str) -> str:
        arguments = [] if self.subject.of_builtin_target else [json.dumps(self.target)]
        arguments += [f"draft={json.dumps(self.draft)}"]
        arguments += [] if revision == MAIN else [f"draft_revision={json.dumps(revision)}"]
        arguments += [f"lora={json.dumps(self.subject.lora)}"] if self.subject.lora else []
        return "\n".join(
            [
                "from flashdraft import LLM, SamplingParams",
                "",
                f"llm = LLM({', '.join(arguments)})",
                '[answer] = llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(temperature=0))',
                "print(answer.text, answer.outputs[0].acceptance_length)",
            ]
        )

    def vllm(self, revision: str) -> str:
        """vLLM counts proposals: the block without its anchor."""
        model, revised = self._elsewhere(revision)
        config = {"method": "dflash", "model": model, "num_speculative_tokens": self.subject.proposals}
        config |= {"revision": revised} if revised else {}
        return shlex.join(["vllm", "serve", self.target, *self._pinned(), "--speculative-config", json.dumps(config)])

    def sglang(self, revision: str) -> str | None:
        """SGLang counts the whole block, its anchor too. None for a draft that it does not read whole (docs/vllm.md)."""
        found = next(one.inspection for one in self.subject.revisions if one.name == revision)
        config = found.config
        own = config["has_own_lm_head"] or config["has_own_embeddings"] or config["draft_vocab_size"] is not None
        if found.layout != "dflash" or found.quantization or own:
            return None
        model, revised = self._elsewhere(revision)
        command = ["python", "-m", "sglang.launch_server", "--model-path", self.target, *self._pinned()]
        command += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", model]
        command += ["--speculative-draft-model-revision", revised] if revised else []
        command += ["--speculative-draft-model-quantization", "unquant"]
        return shlex.join([*command, "--speculative-num-draft-tokens", str(self.subject.proposals + 1)])

    def _pinned(self) -> list[str]:
        return ["--revision", self.subject.target_revision] if self.subject.target_revision else []

    def _elsewhere(self, revision: str) -> tuple[str, str | None]:
        """Model and revision for engines that know revisions of a hub alone: a local one is its sub-directory."""
        if self.repo:
            return self.repo, None if revision == MAIN else revision
        return (DIRECTORY if revision == MAIN else f"{DIRECTORY}/{revision}"), None
