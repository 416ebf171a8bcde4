"""What a draft was trained, calibrated and tested on, as training.json, quantization.json and the results say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdraft.card.facts import Facts
from flashdraft.card.markdown import NONE, Markdown, at, bullets, code, escape, number, one_line, table, whole, words
from flashdraft.card.measured import Measured
from flashdraft.errors import counted
from flashdraft.train.display import duration


def _count(value: Any, noun: str) -> str | None:
    found = number(value)
    return None if found is None else counted(round(found), noun)


def _sentence(*parts: str | None) -> Markdown:
    return Markdown(", ".join(part for part in parts if part))


def training_data(training: Mapping[str, Any]) -> Markdown:
    """Size, collection and labelling of the answers; empty without training.json."""
    data, prompts, sampling = (at(dict(training), key) for key in ("data", "prompts", "answers"))
    sampling = at(sampling, "sampling")
    trained = number(at(data, "records_trained_on"))
    size = _sentence(
        _count(at(data, "records"), "answer"),
        None if trained is None else f"{whole(trained)} of them trained on",
        None if at(data, "answer_tokens") is None else f"{whole(at(data, 'answer_tokens'))} answer tokens",
        None
        if at(data, "tokens_with_prompts") is None
        else f"{whole(at(data, 'tokens_with_prompts'))} tokens with their prompts",
    )
    if not size:
        return Markdown("")
    lines = [
        Markdown(f"**Size:** {size}."),
        Markdown("**Data collection method:** Synthetic: the target answered prompts; no other model's answers."),
        Markdown("**Labelling method:** Automated: the labels are the target's own tokens and probabilities."),
        Markdown(
            "**Properties:** text, as token ids of the target's tokenizer" + _hash(at(dict(training), "tokenizer_hash")) + "."
        ),
    ]
    asked = _sentence(
        None
        if at(prompts, "count") is None
        else f"{whole(at(prompts, 'count'))} prompts were asked" + _hash(at(prompts, "hash")),
        None if at(data, "prompts_trained_on") is None else f"{whole(at(data, 'prompts_trained_on'))} prompts trained on",
    )
    if asked:
        lines.append(Markdown(f"**Prompts:** {asked}. `training_prompts.npy` holds the hashes of those trained on."))
    temperatures = at(sampling, "temperatures")
    if isinstance(temperatures, list) and temperatures:
        said = ", ".join(f"{t:g}" for t in temperatures if number(t) is not None)
        lines.append(Markdown(f"**Sampling:** temperature {said}" + _thinking(at(sampling, "thinking")) + "."))
    for note in at(data, "notes") if isinstance(at(data, "notes"), list) else ():
        lines.append(Markdown(f"Note: {escape(note)}."))
    return bullets(lines)


def _thinking(value: Any) -> str:
    return f"; thinking {escape(value)}" if isinstance(value, str) else ""


def _hash(value: Any) -> str:
    return f" (hash {code(value)})" if isinstance(value, str) and value else ""


def training_run(training: Mapping[str, Any]) -> Markdown:
    """Steps, settings, machine and command."""
    run, device = at(dict(training), "training"), training.get("device")
    config = at(run, "config")
    lines = []
    done = _sentence(
        _count(at(run, "steps"), "step"),
        None if number(at(run, "epochs")) is None else f"{at(run, 'epochs'):.1f} epochs",
        None if number(at(run, "seconds")) is None else f"in {duration(at(run, 'seconds'))}",
        None
        if not isinstance(device, str)
        else f"on {_count(at(run, 'processes'), 'process') or 'a process'} of {escape(device)}",
    )
    lines += [Markdown(f"{done}.")] if done else []
    rows = _sentence(
        *(
            f"{words} {whole(at(run, key))}"
            for key, words in (
                ("rows", "rows a step"),
                ("seq_length", "tokens a row"),
                ("anchors", "anchors a row"),
                ("seed", "seed"),
            )
            if number(at(run, key)) is not None
        ),
        *(
            f"{words} {escape(at(config, key))}"
            for key, words in (("optimizer", "optimizer"), ("learning_rate", "learning rate"))
            if at(config, key) is not None
        ),
        *(
            f"loss {words} {escape(at(config, 'loss', key))}"
            for key, words in (("weighting", "weighting"), ("beta", "beta"))
            if at(config, "loss", key) is not None
        ),
    )
    lines += [Markdown(f"{rows[0].upper()}{rows[1:]}.")] if rows else []
    if start := training.get("started_from"):
        named = at(start, "draft") or (start if isinstance(start, str) else None)
        lines += [Markdown(f"Started from the draft {escape(named)}.")] if named else []
    spent = at(dict(training), "fit", "seconds")
    if isinstance(spent, dict):
        seconds = sum(found for value in spent.values() if (found := number(value)) is not None)
        lines.append(Markdown(f"Answers, training and measuring took {duration(seconds)} in all."))
    versions = training.get("versions")
    if isinstance(versions, dict) and versions:
        lines.append(Markdown(f"Versions: {escape(', '.join(f'{name} {version}' for name, version in versions.items()))}."))
    if isinstance(command := training.get("command"), str):
        lines.append(Markdown(f"Command: {code(one_line(command, None))}."))
    return bullets(lines) if lines else Markdown("")


def named_data(facts: Facts) -> Markdown:
    """The data sets that the prompts came from, which only people can name."""
    rows = facts.rows("training_data")
    if not rows:
        return facts.missing("training_data", "the data sets that the prompts came from", '[[training_data]] name = "..."')
    keys = ("name", "link", "size", "collection", "labelling", "properties")
    return table(keys, [[words(row[key]) if row.get(key) else NONE for key in keys] for row in rows], text=len(keys))


def evaluation_data(measured: Sequence[Measured]) -> Markdown:
    """The suites of the results, each once."""
    rows: dict[str, tuple[object, ...]] = {}
    for one in measured:
        suite, found = one.suite, at(one.results, "suite")
        link = Markdown("-") if suite.dataset is None else code(suite.dataset)
        size = _sentence(_count(at(found, "prompts"), "prompt"), _count(at(found, "turns"), "turn"))
        digest = at(found, "digest") if one.limited is None else None  # that is of the whole suite
        rows[f"{one.title} {one.limited} {at(found, 'digest')}"] = (
            one.title if one.limited is None else f"{one.title} (limited to {counted(one.limited, 'prompt')})",
            link,
            size or "-",
            suite.collection,
            suite.labelling,
            code(digest) if isinstance(digest, str) else "-",
        )
    header = ("suite", "data set", "size", "data collection", "labelling", "hash of the suite")
    return table(header, list(rows.values()), text=len(header)) if rows else Markdown("")
