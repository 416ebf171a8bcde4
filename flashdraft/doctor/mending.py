"""How to put right what was found: the exact keys of config.json, or a command where that file alone cannot."""

from __future__ import annotations

import copy
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from flashdraft.config_json import config_sha256, dump_config, parse_config
from flashdraft.doctor.files import HEAD, Files
from flashdraft.doctor.variations import Variation, changed
from flashdraft.draft import DFlashConfig
from flashdraft.errors import FlashdraftError
from flashdraft.speculators import from_dflash, is_speculators

ABSENT = object()
Edit = tuple[tuple[str, ...], Any]  # a key of config.json, by its path, and its value; ABSENT: without the key


def mend(files: Files, config: DFlashConfig, forms: Sequence[Variation], one: Variation) -> list[str]:
    """What to do about one of the variations that were found together."""
    place = files.folder
    if one.weights == "float32":
        return ["serve it in a type of more range: --dtype bfloat16, or --dtype float32"]
    if one.weights == "ones for zeros":
        return [f"copy these tensors from the checkpoint as it was trained into {place}: nothing else knows their values"]
    if one.weights is not None:
        return [_command(files, {name: value for v in forms for name, value in v.config}, one.weights)]
    weights = [v for v in forms if v.weights in ("target head", "embeddings as head", "target embeddings")]
    whole = changed(config, forms)
    if weights or (files.stamp is not None and files.stamp != config_sha256(whole)):
        # The weights name the configuration they were saved with, and are refused beside another.
        return [_command(files, {name: value for v in forms for name, value in v.config}, *(v.weights for v in weights))]
    return [f"in {place / 'config.json'} {words(edit)}" for edit in edits(files, config, changed(config, [one]))]


def words(edit: Edit) -> str:
    path, value = edit
    key = ".".join(path)
    return f"remove {key}" if value is ABSENT else f"set {key} to {json.dumps(value)}"


def edits(files: Files, before: DFlashConfig, after: DFlashConfig) -> list[Edit]:
    """The keys to change in config.json so that it reads as `after`: few, and all that is needed."""
    old, new = (_dumped(files, config) for config in (before, after))
    wanted = [edit for edit in _differences(old, new) if _value(files.raw, edit[0]) != edit[1]]
    wanted += [edit for edit in _outranking(files.raw, before, after) if edit[0] not in {path for path, _ in wanted}]
    if _reads_as(files, wanted, after):
        least = list(wanted)
        # Those that say again what another says; a value that is there is never left to contradict it.
        for edit in (e for e in wanted if _value(files.raw, e[0]) is ABSENT):
            fewer = [e for e in least if e is not edit]
            least = fewer if _reads_as(files, fewer, after) else least
        return least
    return list(_differences(files.raw, new))


def edited(raw: dict[str, Any], changes: Sequence[Edit]) -> dict[str, Any]:
    """A config.json with the changes made."""
    made = copy.deepcopy(raw)
    for path, value in changes:
        section = made
        for key in path[:-1]:
            section = section.setdefault(key, {})
        if value is ABSENT:
            section.pop(path[-1], None)
        else:
            section[path[-1]] = value
    return made


def _dumped(files: Files, config: DFlashConfig) -> dict[str, Any]:
    raw = dump_config(config, str(files.raw.get("dtype", "bfloat16")))
    return from_dflash(raw) if is_speculators(files.raw) else raw


def _differences(old: dict[str, Any], new: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[Edit]:
    for key in [*new, *(key for key in old if key not in new)]:
        here, mine, theirs = (*path, key), old.get(key, ABSENT), new.get(key, ABSENT)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            yield from _differences(mine, theirs, here)
        elif mine != theirs:
            yield here, theirs


def _value(raw: dict[str, Any], path: tuple[str, ...]) -> Any:
    section: Any = raw
    for key in path:
        section = section.get(key, ABSENT) if isinstance(section, dict) else ABSENT
    return section


def _outranking(raw: dict[str, Any], before: DFlashConfig, after: DFlashConfig) -> Iterator[Edit]:
    """Other spellings of what changes, wherever they are, which would outrank or contradict the usual ones."""
    spelt: dict[str, Any] = {}
    if before.rope_theta != after.rope_theta:
        spelt["rope_theta"] = after.rope_theta
    if before.causal != after.causal:
        spelt["is_causal"] = after.causal[0] if len(set(after.causal)) == 1 else ABSENT
    if before.windows != after.windows:
        spelt["use_swa"] = any(w is not None for w in after.windows)
        spelt["swa_window_size"] = max((w for w in after.windows if w is not None), default=ABSENT)
    for path, key in _keys(raw):
        if key in spelt and _value(raw, path) != spelt[key]:
            yield path, spelt[key]


def _keys(section: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in section.items():
        yield (*path, key), key
        if isinstance(value, dict):
            yield from _keys(value, (*path, key))


def _reads_as(files: Files, changes: Sequence[Edit], after: DFlashConfig) -> bool:
    try:
        found = parse_config(edited(files.raw, changes), files.names or None)
    except FlashdraftError:
        return False
    # Without weights of another kind nobody asks how many layers the target is said to have, if they are enough.
    return found.with_(num_target_layers=after.num_target_layers) == after


def _command(files: Files, fields: dict[str, Any], *weights: str | None) -> str:
    """A line of Python that saves the draft again, mended, in its own directory."""
    lines = [f"d = load_draft({str(files.folder)!r}, packed=True, stamped=False)"]
    shown = {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
    changes = ", ".join(f"{name}={value!r}" for name, value in shown.items())
    modules = {"target head": "lm_head", "target embeddings": "embed_tokens"}
    lines += [f"d.{modules[kind]} = None" for kind in weights if kind in modules]
    imports = "from flashdraft.checkpoint import load_draft, save_draft"
    if "embeddings as head" in weights:
        return (
            f"train with the target as it is now, or save its embedding table as {HEAD} of the draft with has_own_lm_head true "
            f"(in {files.folder})"
        )
    code = "; ".join([imports, *lines, f"d.config = d.config.with_({changes})", f"save_draft(d, {str(files.folder)!r})"])
    return f"python -c {shlex.quote(code)}"
