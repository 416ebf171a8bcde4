"""The YAML at the head of a card, which a hub indexes: https://huggingface.co/docs/hub/model-cards#model-card-metadata."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from flashdraft.card.facts import REPO, Facts
from flashdraft.card.markdown import Markdown, number, one_line
from flashdraft.card.measured import Measured, differences
from flashdraft.card.subject import MAIN, Subject
from flashdraft.eval.display import CONVENTIONS


def front_matter(subject: Subject, facts: Facts, target: str | None, measured: Sequence[Measured]) -> Markdown:
    """What is not known is left out: a TODO would be taken for a value."""
    given, found = facts.values, dict[str, Any]()
    base, relation = _base(subject, target)
    found |= {"base_model": base} if base else {}
    found |= {"base_model_relation": relation} if relation else {}
    found["library_name"] = "flashdraft"
    found["pipeline_tag"] = "text-generation"
    if license_ := given.get("license"):
        found["license"] = license_.lower()
        found |= {"license_link": given["license_link"]} if given.get("license_link") else {}
    found["tags"] = tags(subject)
    kept = [one for one in measured if one.stands_for_suite and one.revision is not None and one.headline is not None]
    if entries := [_entry(one, parts) for one, parts in zip(kept, differences(kept), strict=True)]:
        found["model-index"] = [{"name": one_line(given.get("name") or subject.name), "results": entries}]
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=100)
    return Markdown(f"---\n{text}---")


def tags(subject: Subject) -> list[str]:
    algorithms = [revision.inspection.quantization for revision in subject.revisions]
    return ["dflash", "speculative-decoding", "block-diffusion", *(["nvfp4"] if any(algorithms) else [])]


def _base(subject: Subject, target: str | None) -> tuple[str | None, str | None]:
    """A quantized draft is that of the draft it was made from, where that one is on the hub; any other belongs to its target.

    The hub's words for relations (adapter, finetune, merge, quantized) have none for a draft, so none is said then.
    """
    draft = subject.quantization.get("draft")
    if isinstance(draft, str) and REPO.fullmatch(draft) and not draft.startswith("."):
        return draft, "quantized"
    return target, None


def _entry(one: Measured, parts: Sequence[str]) -> dict[str, Any]:
    """One of the model-index: of a whole suite, measured of known files. parts: what tells it from others of the suite."""
    assert one.headline is not None
    convention, length = one.headline
    revised = "".join(f", {word}" for word in ([] if one.revision == MAIN else [f"revision {one.revision}"]) + list(parts))
    metrics = [
        {
            "type": "acceptance_length",
            "name": f"Acceptance length, {CONVENTIONS[convention]}{revised}",
            "value": rounded(length),
        }
    ]
    speedup = (one.draft.get("speed") or {}).get("speedup") if isinstance(one.draft.get("speed"), dict) else None
    if isinstance(speedup, dict) and number(speedup.get("value")) is not None:
        metrics.append({"type": "speedup", "name": f"Speed-up over the target alone{revised}", "value": rounded(speedup)})
    dataset = {"name": one_line(one.title), "type": one_line(one.suite.dataset or one.suite_name)}
    dataset |= {"config": one_line(one.configuration)} if one.configuration else {}
    return {"task": {"type": "text-generation", "name": "Speculative decoding"}, "dataset": dataset, "metrics": metrics}


def rounded(found: dict[str, Any]) -> float:
    return round(float(found["value"]), 3)
