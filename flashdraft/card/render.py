"""A card: the template with everything that is known."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from flashdraft.card import data, sections
from flashdraft.card.commands import TARGET, Usage
from flashdraft.card.facts import Facts
from flashdraft.card.front import front_matter
from flashdraft.card.known import known_facts
from flashdraft.card.markdown import (
    Markdown,
    address,
    at,
    bullets,
    code,
    decimal,
    escape,
    fence,
    number,
    one_line,
    table,
    text_of,
)
from flashdraft.card.measured import SUITES, Measured, differences, setup_of
from flashdraft.card.speeds import Benched, speeds
from flashdraft.card.subject import MAIN, Subject
from flashdraft.eval.metrics import FEWEST

EXPECTED = ("mt-bench", "speed-bench")  # suites that readers of cards look for


@dataclass(frozen=True)
class Card:
    """The text, and what is still a TODO in it: name -> how to give it."""

    text: str
    todo: dict[str, str]


def render(
    subject: Subject, given: Mapping[str, Any], measured: Sequence[Measured] = (), benches: Sequence[Benched] = ()
) -> Card:
    """given: facts as `read_facts` returns them."""
    facts = Facts(given, known_facts(subject.target, subject.is_builtin))
    target = facts.values.get("base_model")
    name = facts.values.get("name") or subject.name
    usage = Usage(subject, facts.values.get("repo"), target or TARGET)
    words = target or (one_line(subject.target_words) if subject.target_words else "its target")
    algorithms = [revision.inspection.quantization for revision in subject.revisions]
    runs = [*(one.results for one in measured), *(one.results for one in benches)]
    environment = Environment(
        loader=PackageLoader("flashdraft.card", "."),
        autoescape=False,  # that is HTML's; this is Markdown's:
        finalize=escape,
        undefined=StrictUndefined,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("card.md.jinja").render(
        subject=subject,
        facts=facts,
        fact=facts,
        given={key: facts.values.get(key) for key in ("license", "license_link", "terms", "use_case", "ethics")},
        front=front_matter(subject, facts, target, measured),
        name=name,
        target=target,
        target_name=words,
        target_link=Markdown(f"[{escape(target)}](https://huggingface.co/{target})") if target else words,
        quantized=any(algorithms),
        rounds_inputs="NVFP4" in algorithms,
        speculators=subject.main.layout == "speculators",
        in_sglang=any(usage.sglang(one.name) for one in subject.revisions),
        features=len(subject.main.feature_layers) * subject.main.config["hidden_size"],
        others=Markdown(", ".join(code(r.name) for r in subject.revisions[1:])),
        original=_original(subject),
        measured=measured,
        told_apart=differences(measured),
        fewest=FEWEST,
        engines=_joined(text_of(at(run, "provenance", "engine")) for run in runs),
        devices=_joined(setup_of(run) for run in runs),
        usage=usage,
        bench=speeds(benches),
        todos=_absent(subject, facts, measured, usage),
        limitations=_limitations(subject, facts, measured, words),
        explainability=_explainability(facts, words),
        bias=_bias(facts),
        safety=_safety(facts),
        privacy=_privacy(facts),
        sections=sections,
        data=data,
        **{f.__name__: f for f in (code, fence, table, bullets)},
        link=address,
    )
    text = _tidy(text)
    return Card(text, dict(sorted(facts.todo.items(), key=lambda item: text.find(f"TODO({item[0]})"))))


def _tidy(text: str) -> str:
    """No spaces at the ends of lines, no two empty lines in a row."""
    text = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _joined(words: Any) -> str:
    return "; ".join(dict.fromkeys(word for word in words if word))


def _original(subject: Subject) -> str:
    """The draft that a quantized one was made from, without the path it had."""
    name = str(subject.quantization.get("draft") or "a draft that is not recorded")
    return name.rstrip("/").rpartition("/")[2] if name.startswith(("/", "~", ".")) else name


def _absent(subject: Subject, facts: Facts, measured: Sequence[Measured], usage: Usage) -> list[Markdown]:
    """TODOs for the suites that every card has."""
    trained = sections.trained_suites(subject.training)
    found = []
    for key in EXPECTED:
        title, of_it = SUITES[key].title, [one for one in measured if one.key == key]
        if any(one.limited is None for one in of_it):
            continue
        known = "in part alone" if of_it else "in training (below), not yet by flashdraft eval" if title in trained else ""
        what = f"{title} was measured {known}" if known else f"{title} was not measured"
        found.append(facts.missing(key.replace("-", "_"), what, f"{usage.evaluation(key)} --output RUN, then --results RUN"))
    return found


def _limitations(subject: Subject, facts: Facts, measured: Sequence[Measured], target: str) -> list[object]:
    config = subject.main.config
    found: list[object] = [
        f"It was made for {target}. With another target, or a fine-tuned one, fewer proposals are accepted: the text stays "
        "right, the speed is lost.",
        "Acceptance depends on what is asked: on prompts unlike those it was trained on (other languages, domains, system "
        "prompts, thinking or not), it is lower.",
        f"Its positions end at {config['max_position_embeddings']:,} tokens; the target's context may end before.",
    ]
    windows = [window for window in subject.main.windows if window is not None]
    if windows and len(windows) == len(subject.main.windows):
        found.append(
            f"It sees the last {max(windows):,} tokens of the context directly, and what is before them only through the "
            "target's hidden states."
        )
    found += [line for one in measured if (line := _hardest(one))]
    found.append("The speed-up falls as more requests are answered at once; at high load a draft can cost more than it saves.")
    if "NVFP4" in [revision.inspection.quantization for revision in subject.revisions]:
        found.append("W4A4 saves time on NVIDIA Blackwell alone.")
    return [*found, *facts.rows("limitations")]


def _hardest(one: Measured) -> str | None:
    """The category of a suite that the draft guesses worst, of those with conversations enough."""
    entries = at(one.draft, "by_category")
    lengths = {
        name: found
        for name, entry in (entries.items() if isinstance(entries, dict) else ())
        if number(at(found := at(entry, "request_mean"), "value")) is not None and (number(at(found, "n")) or 0) >= FEWEST
    }
    if len(lengths) < 2:
        return None
    name = min(lengths, key=lambda name: lengths[name]["value"])
    revised = "" if one.revision in (MAIN, None) else f", revision {one.revision}"
    least = decimal(lengths[name]["value"])
    return f"Of the categories of {one.named}{revised}, {name} has the lowest acceptance length: {least}."


def _explainability(facts: Facts, target: str) -> list[tuple[object, object]]:
    return [
        ("Intended task or domain", f"Speculative decoding of {target}"),
        ("Model type", "Transformer (block diffusion)"),
        ("Intended users", "Developers who run language models"),
        ("Output", "Token ids, proposed to the target"),
        ("How the model works", "From the target's hidden states and the last token it fills a block of masks in one pass"),
        ("Groups for whom comparable outcomes were tested", facts("impacted_groups")),
        ("Technical limitations and mitigation", "See Limitations; every proposal is checked by the target"),
        ("Performance metrics", "Acceptance length, speed-up, latency"),
        ("Potential known risks", "Those of the target's text; slower answers where few proposals are accepted"),
        ("Licensing", facts("license")),
    ]


def _bias(facts: Facts) -> list[tuple[object, object]]:
    return [
        ("Participation of impacted groups in design and testing", facts("bias_participation")),
        ("Measures against unwanted bias", facts("bias_measures")),
        ("What the draft can change", "When tokens arrive, by content and language; not which tokens"),
    ]


def _safety(facts: Facts) -> list[tuple[object, object]]:
    return [
        ("Model application fields", "Text generation, wherever the target is used"),
        ("Life-critical impact", facts("life_critical")),
        ("Use case restrictions", facts("use_restrictions")),
        ("Model and data set restrictions", facts("data_restrictions")),
        ("Files", "safetensors and JSON: loading them runs no code"),
    ]


def _privacy(facts: Facts) -> list[tuple[object, object]]:
    return [
        ("Personal data that can be generated or recovered", facts("generatable_data")),
        ("Personal data used to create the model", facts("personal_data")),
        ("Consent for personal data used", facts("consent")),
        ("Inputs of users trained on", facts("user_data")),
        ("How often the data are reviewed", facts("data_review")),
        ("Provenance of all training data", facts("data_provenance")),
        ("Labelling complies with privacy laws", facts("labelling_privacy")),
        ("Requests to correct or delete data", facts("data_requests")),
        ("Privacy policy", facts("privacy_policy")),
    ]
