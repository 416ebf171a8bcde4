"""The tables of a card: every figure in them is of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashdraft.card.markdown import (
    Markdown,
    at,
    bullets,
    code,
    decimal,
    escape,
    interval,
    number,
    percent,
    table,
    text_of,
    whole,
)
from flashdraft.card.measured import SUITES, Measured, conditions, settings_of, setup_of, spread
from flashdraft.card.subject import Subject
from flashdraft.errors import counted
from flashdraft.eval.display import CONVENTIONS
from flashdraft.eval.metrics import FEWEST

OTHER_SUITES = {"mgsm": "MGSM"}
PARTS = {
    "fc": "feature projection (fc)",
    "layers": "layers",
    "norms": "norms of context and output",
    "lm_head": "own output head",
    "embed_tokens": "own embeddings",
}


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def parameters(subject: Subject) -> Markdown:
    counts, config = subject.main.parameters, subject.main.config
    inputs = len(config["target_layer_ids"]) * config["hidden_size"]
    vocabulary = config["draft_vocab_size"] or config["vocab_size"]
    shapes = {
        "fc": f", {inputs:,} to {config['hidden_size']:,}",
        "layers": f", {subject.main.layers} of {whole(subject.main.parameters_per_layer)}",
        "lm_head": f", {vocabulary:,} x {config['hidden_size']:,}",
        "embed_tokens": f", {config['vocab_size']:,} x {config['hidden_size']:,}",
    }
    rows = [(f"{words}{shapes.get(part, '')}", f"{counts[part]:,}") for part, words in PARTS.items() if counts[part]]
    return table(("part", "parameters"), [*rows, (Markdown("**all**"), Markdown(f"**{counts['all']:,}**"))])


def architecture(subject: Subject) -> Markdown:
    main, config = subject.main, subject.main.config
    rows: list[tuple[str, object]] = [
        ("layers", main.layers),
        ("hidden size", f"{config['hidden_size']:,}"),
        ("intermediate size", f"{config['intermediate_size']:,}"),
        (
            "attention heads, of keys and values, size",
            f"{config['num_attention_heads']}, {config['num_key_value_heads']}, {config['head_dim']}",
        ),
        ("vocabulary", f"{config['vocab_size']:,}"),
        ("block", f"{config['block_size']} slots: the anchor and {subject.proposals} proposals"),
        (
            "target layers whose outputs it reads",
            f"{', '.join(map(str, main.feature_layers))} of {config['num_target_layers']} (from 0)",
        ),
        ("attention by layer", _attention(subject)),
        ("RoPE base", f"{config['rope_theta']:g}"),
        ("mask token", config["mask_token_id"]),
        ("output head", "its own" if config["has_own_lm_head"] else "the target's"),
        ("embeddings", "its own" if config["has_own_embeddings"] else "the target's"),
    ]
    return table(("property", "value"), rows, text=2)


def _attention(subject: Subject) -> str:
    kinds = list(dict.fromkeys(zip(subject.main.windows, subject.main.causal, strict=True)))
    words = [
        f"{'all positions' if window is None else f'window of {window:,} tokens'}, {'causal' if causal else 'bidirectional'}"
        for window, causal in kinds
    ]
    return words[0] if len(words) == 1 else "mixed: " + "; ".join(words)


def versions(subject: Subject) -> Markdown:
    rows = [
        (
            code(r.name),
            r.inspection.quantization or "none",
            r.inspection.dtype or "-",
            code(r.digest),
            f"{r.inspection.size_on_disk or 0:,}",
        )
        for r in subject.revisions
    ]
    header = ("revision", "quantization", "types of its tensors", "hash of its files", "bytes")
    return table(header, rows, text=4)


def summary(measured: Sequence[Measured], told_apart: Sequence[Sequence[str]]) -> Markdown:
    """told_apart: of `differences`."""
    rows = []
    for one, parts in zip(measured, told_apart, strict=True):
        convention, length = one.headline or ("", {})
        ratio = at(one.draft, "speed", "speedup")
        how = "" if convention in ("request_mean", "") else f" ({CONVENTIONS[convention]})"
        rows.append(
            (
                one.named,
                _revision(one),
                ", ".join(dict.fromkeys([*conditions(one.results), *parts])),
                f"{decimal(at(length, 'value'))}{how}",
                spread(length),
                whole(at(length, "n")),
                decimal(at(ratio, "value")),
                spread(ratio),
            )
        )
    return table(("suite", "revision", "settings", "AL", "95 %", "n", "speed-up", "95 %"), rows, text=3)


def _revision(one: Measured) -> Markdown:
    return Markdown("not recorded") if one.revision is None else code(one.revision)


def evaluation(one: Measured, told_apart: Sequence[str] = ()) -> Markdown:
    """One draft on one suite: what was done, the table by category, and what stands below it."""
    parts = ["".join([f"#### {escape(one.named)}, revision {_revision(one)}", *(f", {escape(part)}" for part in told_apart)])]
    parts.append(_how(one))
    if one.limited is not None:
        parts.append("Only a part of the suite was asked: these are no figures of the suite.")
    if not one.complete:
        left = number(one.results.get("left"))
        missing = "some answers are" if left is None else f"{counted(round(left), 'answer')} {'is' if left == 1 else 'are'}"
        parts.append(f"**Incomplete: {missing} missing.** These figures are of those that there are.")
    if one.revision is None:
        parts.append("The results do not record which files were measured: that it was this draft is the publisher's word.")
    if note := text_of(one.draft.get("note")):
        parts.append(f"{escape(note[0].upper() + note[1:])}.")
    parts += [_categories(one), _conventions(one), _below(one)]
    return Markdown("\n\n".join(part for part in parts if part))


def _how(one: Measured) -> str:
    """The day, the settings and the machine."""
    started = (text_of(at(one.results, "provenance", "started")) or "")[:10]
    day = f" On {escape(started)}." if started else ""
    settings = escape(settings_of(one.results))
    load = number(at(one.results, "provenance", "load_average"))
    busy = "" if load is None else f" Load average of the machine: {load:g}."
    return f"{settings[:1].upper()}{settings[1:]}. {escape(setup_of(one.results))}.{busy}{day}"


def _categories(one: Measured) -> str:
    entries = at(one.draft, "by_category")
    rows = [
        _row(name, entry, at(entry, "request_mean"), at(entry, "speedup"))
        for name, entry in _items(entries)
        if isinstance(entry, dict)
    ]
    convention, length = one.headline or ("", None)
    if not rows and length is None:
        return "No acceptance length and no category was measured."
    last = _row("all", one.draft, length, at(one.draft, "speed", "speedup"))
    if convention not in ("request_mean", ""):
        last[0] = f"all, {CONVENTIONS[convention]}"
    header = ("category", "answers", "looping", "AL", "95 %", "speed-up", "95 %")
    return table(header, [*rows, [Markdown(f"**{escape(last[0])}**"), *last[1:]]])


def _row(name: str, entry: Any, length: Any, ratio: Any) -> list[Any]:
    counts = at(entry, "answers")
    return [
        name,
        whole(at(counts, "count")),
        whole(at(counts, "looping")),
        decimal(at(length, "value")),
        spread(length),
        decimal(at(ratio, "value")),
        spread(ratio),
    ]


def _conventions(one: Measured) -> str:
    both = {"all": at(one.draft, "acceptance", "all"), "clean": at(one.draft, "acceptance", "without_loops")}
    rows = [
        (
            f"{name}: {words}{' (n: categories)' if name == 'category_mean' else ''}",
            decimal(at(found, "value")),
            # Of category_mean n counts categories.
            interval(at(found, "low"), at(found, "high")) if name == "category_mean" else spread(found),
            whole(at(found, "n")),
            decimal(at(both["clean"], name, "value")),
        )
        for name, words in CONVENTIONS.items()
        if number(at(found := at(both["all"], name), "value")) is not None
    ]
    return table(("convention", "AL", "95 %", "n", "without loops"), rows) if rows else ""


def _below(one: Measured) -> str:
    """Positions, texts and what is to be known of the answers."""
    lines = []
    joint = at(one.draft, "acceptance", "positions", "joint")
    if isinstance(joint, list) and joint:
        lines.append(f"Steps that accept at least 1, 2, ... proposals: {', '.join(percent(share, 0) for share in joint)}.")
    narrower = number(at(one.draft, "acceptance", "places", "narrower_steps"))
    if narrower is not None and narrower > 0.01:
        lines.append(f"{percent(narrower, 0)} of the steps verified fewer proposals than the draft makes, which lowers AL.")
    speed = at(one.draft, "speed")
    rates = [decimal(at(speed, arm, "user_tokens_per_second"), 1) for arm in ("with", "without")]
    if rates[0] != "-":
        off = "" if rates[1] == "-" else f", {rates[1]} without it"
        lines.append(f"Tokens/s of one reader: {rates[0]} with the draft{off}.")
    texts = at(one.draft, "texts")
    if number(at(texts, "compared")):
        lines.append(
            f"Texts with and without the draft: {whole(at(texts, 'differing'))} of {whole(at(texts, 'compared'))} differ."
        )
    counts = at(one.draft, "answers")
    lines.append(
        f"Answers cut at the longest length: {whole(at(counts, 'cut'))}; of at most one token: "
        f"{whole(at(counts, 'one_token'))}; refused: {whole(at(counts, 'refused'))}."
    )
    return bullets(lines)


def quantization_cost(report: dict[str, Any]) -> Markdown:
    arms = report.get("acceptance")
    rows = [
        (
            str(at(arm, "name")),
            whole(at(arm, "answers")),
            decimal(at(arm, "acceptance_length"), 3),
            percent(at(arm, "loss")),
            percent(at(arm, "loss_at_most")),
        )
        for arm in (arms if isinstance(arms, list) else [])
    ]
    return table(("form", "answers", "AL", "loss", "loss at most (one-sided 95 %)"), rows) if rows else Markdown("")


def quantization_bytes(report: dict[str, Any]) -> Markdown:
    sizes, layers = at(report, "bytes"), at(report, "layers")
    rows = []
    for name, size in _items(sizes):
        linears = at(layers, name)
        linears = linears if isinstance(linears, list) else []
        errors = [found for one in linears if (found := number(at(one, "error"))) is not None]
        flushed = [found for one in linears if (found := number(at(one, "flushed_share"))) is not None]
        rows.append(
            (
                "before" if name == "before" else code(name),
                whole(size),
                whole(len(linears)) if linears else "-",
                percent(max(errors, default=None), 3),
                percent(max(flushed, default=None)),
            )
        )
    header = ("revision", "bytes of weights", "linears in four bits", "largest error of an output", "scales below 2^-6 at most")
    return table(header, rows) if rows else Markdown("")


def held_out(training: dict[str, Any]) -> Markdown:
    """AL on the prompts kept out of training, as training measured it."""
    held = training.get("heldout")
    if number(at(held, "acceptance_length")) is None:
        return Markdown("")
    languages = dict(_items(at(held, "by_language")))
    rows, alike, notes = [], [], []
    for kind, key in (("category", "by_category"), ("language", "by_language"), ("thinking", "by_thinking")):
        groups = [(name, group) for name, group in _items(at(held, key)) if name != "all"]
        if len(groups) == 1 and kind != "category":  # all of them: no row of its own
            alike.append(f"{kind} {groups[0][0] or '(none)'}")
            continue
        few = [(name, group) for name, group in groups if (number(at(group, "requests")) or 0) < FEWEST]
        groups = [
            (name, group)
            for name, group in groups
            if not (kind == "category" and name in languages and group == languages[name])
        ]
        shown = [(name, group) for name, group in groups if (name, group) not in few]
        rows += [
            (f"{kind} {name or '(none)'}", whole(at(group, "requests")), decimal(at(group, "acceptance_length")))
            for name, group in shown
        ]
        if few:
            notes.append(
                f"{counted(len(few), kind).replace('categorys', 'categories')} of fewer than {FEWEST} answers left out"
            )
        if kind == "category" and any(name.startswith("self/") for name, _ in shown):
            notes.append("`self/...`: prompts that the target wrote itself")
    last = (Markdown("**all**"), whole(at(held, "requests")), Markdown(f"**{decimal(at(held, 'acceptance_length'))}**"))
    said = [f"All answers: {escape(', '.join(alike))}." for _ in alike[:1]]
    said += ["Categories are named as in the files of prompts" + "".join(f"; {note}" for note in notes) + "."]
    return Markdown(f"{table(('answers of', 'answers', 'AL'), [*rows, last])}\n\n{' '.join(said)}")


def by_position(training: dict[str, Any]) -> Markdown:
    """Shares of all steps, where the table above is a mean over answers."""
    held = training.get("heldout")
    shares = at(held, "by_position")
    if not isinstance(shares, list) or not shares:
        return Markdown("")
    pooled = number(at(held, "over_steps"))
    length = "" if pooled is None else f" ({pooled:.2f} tokens a step, where long answers weigh more than in the table)"
    return Markdown(
        f"Share of all steps{length} that accept at least 1, 2, ... proposals: {', '.join(percent(s, 0) for s in shares)}."
    )


def trained_suites(training: dict[str, Any]) -> dict[str, list[tuple[object, ...]]]:
    """Suites that training.json has figures of, by the name that cards use: a row for each sampling."""
    found: dict[str, list[tuple[object, ...]]] = {}
    for sampling, suites in _items(training.get("acceptance_length")):
        for name, group in _items(suites):
            answers, loops = number(at(group, "answers")), number(at(group, "looping"))
            if name == "all" or ":" in name or name.startswith("language ") or answers is None or loops is None:
                continue
            key = name.replace("_", "-").removeprefix("deepspec-").removesuffix("-test")
            title = SUITES[key].title if key in SUITES else OTHER_SUITES.get(key, name)
            error = decimal(at(group, "standard_error"), 3)
            share = percent(loops / (answers + loops), 0) if answers + loops else "-"
            row = (title, sampling, whole(answers + loops), share, decimal(at(group, "acceptance_length")), error)
            found.setdefault(title, []).append(row)
    return found


def measured_in_training(training: dict[str, Any]) -> Markdown:
    rows = [row for rows in trained_suites(training).values() for row in rows]
    if not rows:
        return Markdown("")
    made = training["acceptance_length"]
    how = text_of(at(made, "what")) or "how is not recorded"
    command = text_of(at(made, "command"))
    by = f", by {code(command)}" if command else ""
    header = ("suite", "sampling", "answers", "of them looping", "AL of the others", "standard error")
    return Markdown(f"When it was trained{by}: {escape(how)}.\n\n{table(header, rows, text=2)}")


def decoded(training: dict[str, Any]) -> Markdown:
    """The speed that `fit` measured by decoding held-out prompts one at a time."""
    speed = training.get("speed")
    every, setup = at(speed, "all"), at(speed, "setup")
    if number(at(every, "speedup")) is None:
        return Markdown("")
    found = number(at(every, "acceptance_length"))
    temperature = number(at(setup, "sampling", "temperature"))
    warm = "" if temperature is None else f" at temperature {temperature:g}"
    machine = ", ".join(str(at(setup, key)) for key in ("device", "dtype") if at(setup, key))
    machine += f", torch {at(setup, 'torch')}" if at(setup, "torch") else ""
    rates = [decimal(at(every, f"tokens_per_second_{arm}"), 1) for arm in ("on", "off")]
    answers, length = whole(at(every, "answers")), "" if found is None else f", {found:.2f} tokens a step"
    return Markdown(
        f"Decoding {answers} answers to such prompts one at a time, {whole(at(every, 'tokens'))} tokens{warm}: **{rates[0]} "
        f"tokens/s** with this draft{length}, {rates[1]} without, ratio {decimal(at(every, 'speedup'))}; "
        f"{whole(at(every, 'identical'))} of {answers} texts identical. {escape(machine)}."
    )
