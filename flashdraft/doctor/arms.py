"""Causes that change what the target is asked, or the target: each takes answers of its own to measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from flashdraft import builtin
from flashdraft.doctor.files import Files
from flashdraft.errors import FlashdraftError
from flashdraft.prompts import Prompt
from flashdraft.targets import load_tokenizer
from flashdraft.targets.load import adapter_hash
from flashdraft.train.commands_synthesize import Where
from flashdraft.train.conversations import Renderer
from flashdraft.train.identity import tokenizer_hash

THINKING, TOKENIZER, TARGET = "thinking mode", "tokenizer or chat template", "another target"
Ids = Callable[[Prompt], list[int]]


@dataclass(frozen=True)
class Arm:
    """The same prompts asked otherwise, or of another target."""

    cause: str
    says: str
    mend: str
    ids: Ids
    where: Where | None = None  # of another target


def asking(tokenizer: PreTrainedTokenizerBase, thinking: bool | None = None) -> Ids:
    """Prompt ids by the chat template; of a tokenizer without one, of the plain text."""

    def ids(prompt: Prompt) -> list[int]:
        if not getattr(tokenizer, "chat_template", None):
            return list(tokenizer(prompt.turns[0])["input_ids"])
        messages = [*prompt.opening, {"role": "user", "content": prompt.turns[0]}]
        kwargs: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, **kwargs)
        return list(encoded["input_ids"])

    return ids


def arms(files: Files, tokenizer: PreTrainedTokenizerBase, where: Where, thinking: bool | None, weights: str) -> Iterator[Arm]:
    """What may be measured of these causes with what is on this disk. weights: the target's hash."""
    yield from _thinking(files, tokenizer, thinking)
    yield from _tokenizers(files, tokenizer, where, thinking)
    if files.stated("target_hash") != weights:
        yield from _targets(files, where, thinking)


def _thinking(files: Files, tokenizer: PreTrainedTokenizerBase, thinking: bool | None) -> Iterator[Arm]:
    renderer = Renderer(tokenizer) if getattr(tokenizer, "chat_template", None) else None
    if renderer is None or not renderer.switches:
        return
    now = renderer.by_default if thinking is None else thinking
    if (("on" if now else "off") in files.trained_modes) or files.trained_modes == {"on", "off"}:
        return
    other = "off" if now else "on"
    known = f"it was trained with thinking {other}" if files.trained_modes else f"it knows answers with thinking {other} better"
    yield Arm(
        THINKING,
        f"the target is asked with thinking {'on' if now else 'off'}, and {known}",
        f'ask as it was trained, chat_template_kwargs {{"enable_thinking": {str(not now).lower()}}} (`flashdraft chat '
        f"{'--no-thinking' if now else '--thinking'}`), or train on both: `flashdraft synthesize --thinking mixed`",
        asking(tokenizer, not now),
    )


def _tokenizers(files: Files, tokenizer: PreTrainedTokenizerBase, where: Where, thinking: bool | None) -> Iterator[Arm]:
    if not any((files.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")):
        return
    theirs = tokenizer
    try:
        if (files.folder / "tokenizer_config.json").is_file():
            theirs = load_tokenizer(files.folder)
        if (template := files.folder / "chat_template.jinja").is_file():
            theirs = theirs if theirs is not tokenizer else load_tokenizer(where.source, revision=where.revision)
            theirs.chat_template = template.read_text(encoding="utf-8")
    except (FlashdraftError, OSError, ValueError):
        return
    if tokenizer_hash(theirs) != tokenizer_hash(tokenizer):
        yield Arm(
            TOKENIZER,
            "the target's tokenizer or chat template is not the one that the draft's directory holds",
            f"put the tokenizer files of {files.folder} in place of the target's ({where.name})",
            asking(theirs, thinking),
        )


def _targets(files: Files, where: Where, thinking: bool | None) -> Iterator[Arm]:
    """The target that training.json names, where it is another one and on this disk."""
    name, lora = files.stated("target"), files.training.get("lora")
    adapter = lora.get("name") if isinstance(lora, dict) else None
    target = where.target
    if name is not None and name != where.name and (name == builtin.NAME or Path(name).expanduser().exists()):
        target = name
    if "lora" in files.training and where.lora is not None and adapter is None:
        says = f"the draft belongs to the base model, and the target has the adapter {where.lora}"
        mend = f"train a draft for the adapter: `flashdraft train {where.name} --lora {where.lora} --init {files.folder} ...`"
    elif adapter is not None and _is_another(adapter, where.lora):
        says = f"the draft was trained for the adapter {adapter}, and the target is {where.lora or 'the base model'}"
        mend = f"serve it with --lora {adapter}, or train a draft for this target"
    elif target != where.target:
        says = f"the draft was trained for {name}, and the target is {where.name}"
        mend = f"serve {name}, or train on: `flashdraft train {where.name} --init {files.folder} --data ANSWERS --output DIR`"
    else:
        return
    theirs = Where(target=target, dtype=where.dtype, device=where.device, revision=where.revision, lora=adapter)
    try:
        tokenizer = load_tokenizer(theirs.source, revision=theirs.revision, lora=adapter)
    except FlashdraftError:
        return
    yield Arm(TARGET, says, mend, asking(tokenizer, thinking), theirs)


def _is_another(adapter: str, given: str | None) -> bool:
    """Whether an adapter is on this disk, and not the one given."""
    if not Path(adapter).expanduser().is_dir():
        return False
    return given is None or adapter_hash(given) != adapter_hash(adapter)


def usable(ids: Sequence[int], vocab_size: int) -> bool:
    return bool(ids) and max(ids) < vocab_size
