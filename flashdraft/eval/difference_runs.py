"""`flashdraft compare`: two runs of `flashdraft eval`, how their drafts differ, and whether like is compared with like."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.eval import results
from flashdraft.eval.difference import CONVENTIONS, between
from flashdraft.eval.records import Log
from flashdraft.eval.run import Arm
from flashdraft.train.files import read_object

KINDS = {", not used": "none", ", all proposals verified": "pinned"}
ROW = {"prompt", "sample", "turns", "category", "committed", "steps", "step_tokens", "verify_steps", "texts"}
ROW |= {"with", "without", "both"}
DRAFT = {"name", "statistics", "acceptance", "speed", "answers", "conversations", "arm"}
OLD = "it was written by an earlier version or by another program: the same `flashdraft eval` command again writes it anew"


@dataclass(frozen=True)
class Run:
    """name: as it was given. results: what results.json holds, or as much as is known without one."""

    name: str
    results: dict[str, Any]

    @property
    def drafts(self) -> dict[str, dict[str, Any]]:
        return {draft["name"]: draft for draft in self.results["drafts"]}


def read_run(path: Path) -> Run:
    """A directory of `flashdraft eval`, its results.json or its answers.jsonl; nothing is written there.

    Raises ConfigError where there is no run, CheckpointError for a damaged one.
    """
    whole = path / "results.json" if path.is_dir() else path
    answers = path / "answers.jsonl" if path.is_dir() else path
    if whole.suffix == ".json" and whole.is_file():
        found = read_object(whole)
        if found is None:
            raise CheckpointError(f"{whole} is damaged: the same `flashdraft eval` command again writes it anew")
        if not _is_results(found):
            raise CheckpointError(f"{whole} has not what is needed to compare; {OLD}")
        return Run(str(path), found)
    if answers.suffix == ".jsonl" and answers.is_file():
        return Run(str(path), _of_answers(answers))
    raise ConfigError(f"{path} is no run: give a directory that `flashdraft eval` wrote, or its results.json")


def _is_results(found: dict[str, Any]) -> bool:
    parts = [found.get(name) for name in ("suite", "settings", "provenance")]
    drafts = found.get("drafts")
    try:
        json.dumps(found, allow_nan=False)  # what Python reads as NaN or Infinity, and 1e999, is no JSON
    except ValueError:
        return False
    if (
        found.get("schema") != results.SCHEMA
        or not all(isinstance(part, dict) for part in parts)
        or not isinstance(drafts, list)
    ):
        return False
    if not drafts or not all(isinstance(draft, dict) and draft.keys() >= DRAFT for draft in drafts):
        return False
    if not all(isinstance(draft["name"], str) and isinstance(draft["conversations"], list) for draft in drafts):
        return False
    rows = [row for draft in drafts for row in draft["conversations"]]
    return all(isinstance(row, dict) and row.keys() >= ROW and isinstance(row["category"], str) for row in rows)


def _of_answers(path: Path) -> dict[str, Any]:
    """What the answers of a run that wrote no results yet say; sampling and suite from run.json, where that is beside them."""
    with tempfile.TemporaryDirectory() as copy:  # a log that is opened is one to go on with: its half line is cut off
        shutil.copyfile(path, Path(copy) / "answers.jsonl")
        try:
            log = Log(Path(copy))
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(copy, str(path.parent))) from error
        log.close()
    if not log.answers:
        raise ConfigError(f"{path} holds no answers yet: there is nothing to compare")
    drafts = results.gather(log, list(dict.fromkeys(_arms(record["arm"] for record in log.answers.values()))))
    begun = read_object(path.parent / "run.json") or {}
    suite, settings, pair = (
        found if isinstance(found := begun.get(name), dict) else {} for name in ("suite", "settings", "pair")
    )
    known = {"suite": suite, "settings": settings, "complete": None, "drafts": drafts}
    hashes = pair.get("drafts")
    return {"schema": results.SCHEMA, "provenance": {"draft_hashes": hashes} if hashes else {}, **known}


def _arms(names: Any) -> Iterator[Arm]:
    """Each arm, and the one with the draft even where it has no answers yet."""
    for name in names:
        suffix = next((suffix for suffix in KINDS if name.endswith(suffix)), "")
        draft = name.removesuffix(suffix)
        yield Arm(draft, "draft")
        if suffix:
            yield Arm(draft, "none" if KINDS[suffix] == "none" else "pinned")


def compare(first: Run, second: Run, drafts: Sequence[str] = ()) -> dict[str, Any]:
    """What docs/evaluation.md lists under "Comparing runs". drafts: one name for both runs, or one of each.

    Raises ConfigError for what cannot be compared, CheckpointError for figures that cannot be.
    """
    try:
        with np.errstate(over="raise"):
            found = _all_compared(first, second, drafts)
        json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{first.name} or {second.name} holds figures that cannot be; {OLD}") from error
    return found


def _all_compared(first: Run, second: Run, drafts: Sequence[str]) -> dict[str, Any]:
    chosen = _chosen(first, second, drafts)
    loads = [_load(run) for run in (first, second)]
    compared = [_compared(first, second, a, b) for a, b in chosen]
    left_out = sorted({*first.drafts, *second.drafts} - {draft["name"] for pair in chosen for draft in pair})
    return {
        "schema": 1,
        "runs": [first.name, second.name],
        "drafts": compared,
        "left_out": left_out,
        "other_loads": any(loads[0][name] != loads[1][name] for name in loads[0].keys() & loads[1].keys())
        or _busier(first, second),
        "differs": list(_differs(first, second, chosen)),
        "warnings": list(dict.fromkeys(_unlike(first, second, chosen))),
    }


BUSIER = 1.0  # programs more that wanted a core, from which speeds are taken to be of other loads


def _load(run: Run) -> dict[str, Any]:
    """What tokens/s depend on beside the draft, as far as the run says it."""
    made = {"concurrency": run.results["settings"].get("concurrency"), **run.results["provenance"]}
    return {name: made[name] for name in ("concurrency", "device", "engine", "engine_version", "serve") if name in made}


def _busier(first: Run, second: Run) -> bool:
    loads = [run.results["provenance"].get("load_average") for run in (first, second)]
    return all(isinstance(load, int | float) for load in loads) and abs(loads[0] - loads[1]) > BUSIER


def _chosen(first: Run, second: Run, names: Sequence[str]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    if len(names) > 2:
        raise ConfigError("--draft is given once for both runs, or twice: first of the first run, then of the second")
    if names:
        return [(_named(first, names[0]), _named(second, names[-1]))]
    same = first.results == second.results
    if same and len(first.drafts) == 1:
        raise ConfigError(f"{first.name} and {second.name} are the same run: give another one")
    if same:
        raise ConfigError(f"both are the same run: name two of its drafts with --draft ({', '.join(first.drafts)})")
    if shared := [name for name in first.drafts if name in second.drafts]:
        return [(first.drafts[name], second.drafts[name]) for name in shared]
    if len(first.drafts) == len(second.drafts) == 1:
        return list(zip(first.drafts.values(), second.drafts.values(), strict=True))
    said = "; ".join(f"{run.name}: {', '.join(run.drafts)}" for run in (first, second))
    raise ConfigError(f"the runs have no draft of one name ({said}): name one of each with --draft")


def _named(run: Run, name: str) -> dict[str, Any]:
    if name not in run.drafts:
        raise ConfigError(f"{run.name} has no draft {name!r}: it has {', '.join(run.drafts)}")
    return run.drafts[name]


def _compared(first: Run, second: Run, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    kinds = {a["statistics"], b["statistics"]}
    if kinds == {"per_request", "counters"}:
        counted, other = (first, second) if a["statistics"] == "counters" else (second, first)
        raise ConfigError(
            f"acceptance of {counted.name} is from its server's counters, that of {other.name} of each request: two "
            "conventions that are not to be compared. Measure both alike (vLLM: --per-request-spec-decode-metrics detailed)"
        )
    found = between(a["conversations"], b["conversations"])
    if not found["pairs"]:
        suites = " and ".join(str(run.results["suite"].get("name", run.name)) for run in (first, second))
        raise ConfigError(
            f"{first.name} and {second.name} have no conversation in common that both answered ({suites}): compare runs of "
            "the same prompts"
        )
    note = None
    if None in kinds:
        silent = [run.name for run, draft in ((first, a), (second, b)) if draft["statistics"] is None]
        note = f"the acceptance length is left out: the server of {' and '.join(silent)} said nothing of it"
    elif kinds == {"counters"}:
        note = _counters(found, a, b)
    hashes = [(run.results["provenance"].get("draft_hashes") or {}).get(d["name"]) for run, d in ((first, a), (second, b))]
    same = hashes[0] is not None and hashes[0] == hashes[1]
    return {"first": a["name"], "second": b["name"], "same_draft": same, **found, "note": note}


def _counters(found: dict[str, Any], a: dict[str, Any], b: dict[str, Any]) -> str:
    """Puts in the difference of counters, which are of all prompts: only where all of them pair."""
    if any(found["pairs"] != count for count in found["conversations"]):
        return "the acceptance length is left out: it is from counters over all prompts, and the runs do not have the same ones"
    for name in CONVENTIONS:
        values = [draft["acceptance"]["all"][name] for draft in (a, b)]
        if all(values):
            x, y = (entry["value"] for entry in values)
            found["acceptance"][name] = {"first": x, "second": y, "value": y - x, "low": None, "high": None, "n": None}
    if not any(found["acceptance"].values()):
        return "the acceptance length is left out: the servers count by different conventions"
    return "acceptance is from the servers' counters, over all answers: no interval"


def _differs(first: Run, second: Run, chosen: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for part in ("suite", "settings", "provenance"):
        a, b = first.results[part], second.results[part]
        for name in dict.fromkeys([*a, *b]):
            if name not in ("draft_hashes", "draft_bytes") and a.get(name) != b.get(name):
                yield {"part": part, "name": name, "first": a.get(name), "second": b.get(name)}
    for a, b in chosen:
        for name in ("draft_hashes", "draft_bytes"):
            x, y = ((run.results["provenance"].get(name) or {}).get(d["name"]) for run, d in ((first, a), (second, b)))
            if x != y:
                yield {"part": f"draft {a['name']}", "name": name.removeprefix("draft_"), "first": x, "second": y}
        if a["arm"] != b["arm"]:
            yield {"part": f"draft {a['name']}", "name": "arm", "first": a["arm"], "second": b["arm"]}


SAMPLING = ("temperature", "top_p", "top_k", "seed")
UNLIKE = (  # part, names of fields, what it does to the comparison
    ("settings", ("max_tokens",), "answers are cut at other lengths, and acceptance changes along an answer"),
    ("settings", ("thinking",), "thinking is not set alike: the texts are others"),
    ("settings", ("concurrency",), "other numbers of requests at once: the speeds are of other loads"),
    ("provenance", ("target", "target_hash", "model"), "the targets are not the same: acceptance is of other texts"),
    ("provenance", ("engine", "engine_version"), "other engines, or versions of one: they count and serve differently"),
    ("provenance", ("device",), "other devices: the speeds differ by them, too"),
    ("provenance", ("serve",), "served with other options"),
)


def _unlike(first: Run, second: Run, chosen: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """Where the comparison is not of like with like. What one of them does not say is not held against it."""
    suites = [run.results["suite"] for run in (first, second)]
    settings = [run.results["settings"] for run in (first, second)]
    if all(suites) and any(suites[0].get(name) != suites[1].get(name) for name in ("digest", "limit")):
        yield "not the same prompts: only those that both have are compared"
    warm = any(s.get("temperature") for s in settings)
    changed = [name for name in SAMPLING[: None if warm else 1] if settings[0].get(name) != settings[1].get(name)]
    if changed and all(settings):
        yield f"other sampling ({', '.join(_against(name, *settings) for name in changed)}): the texts are others"
    for part, names, text in UNLIKE:
        a, b = first.results[part], second.results[part]
        known = [name for name in names if name in a and name in b and a[name] != b[name]]
        if known:
            yield f"{text} ({_against(known[0], a, b)})"
    if _busier(first, second):
        loads = _against(
            "load average", *({"load average": run.results["provenance"]["load_average"]} for run in (first, second))
        )
        yield f"the machines were not as busy with other programs: the speeds differ by that, too ({loads})"
    for run in (first, second):
        if run.results.get("complete") is not True:
            why = "is not complete" if run.results.get("complete") is False else "was read from its answers, maybe not all"
            yield f"{run.name} {why}: only what both answered is compared"
    for a, b in chosen:
        if a["arm"] != b["arm"]:
            yield "acceptance with all proposals verified in one, with widths that the engine chose in the other"
        shares = [((d["acceptance"] or {}).get("places") or {}).get("narrower_steps") or 0.0 for d in (a, b)]
        if abs(shares[0] - shares[1]) > 0.01:
            percents = " against ".join(f"{100 * share:.0f} %" for share in shares)
            yield f"steps that verified fewer proposals than the draft makes: {percents}; they lower the acceptance length"
        if any(d["speed"].get("interrupted") for d in (a, b)):
            yield "a run was stopped and went on: its speeds are those of a run in one go only roughly"


def _against(name: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    return f"{name} {short(a.get(name))} against {short(b.get(name))}"


def short(value: Any) -> str:
    text = "nothing" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."
