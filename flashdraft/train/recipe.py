"""The recipe of a draft: a small TOML file whose keys are checked by name and type; what it leaves out is derived.

Sections: [draft] sizes and features, [train] budget, rows, optimizer and loss, [eval] what is held out. docs/training.md
explains every key. [synthesis] and [[seed]] belong to the making of answers and are passed over.
"""

from __future__ import annotations

import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

from flashdraft.errors import CheckpointError, ConfigError

UNIONS = (types.UnionType, typing.Union)
OTHERS = ("synthesis", "seed")  # sections read by others


@dataclass(frozen=True)
class DraftRecipe:
    """Sizes and features of the draft; None is derived from the target (DFlashConfig.for_target)."""

    num_hidden_layers: int | None = None
    num_features: int | None = None
    target_layer_ids: list[int] | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    block_size: int | None = None
    sliding_window: int | None = None  # of every layer; 0: none
    causal: bool | None = None
    mask_token: str | int | None = None  # text or id


@dataclass(frozen=True)
class TrainRecipe:
    """How it is trained; None is derived from the target, the data and the device (plan.py)."""

    steps: int | None = None
    hours: float | None = None
    rows: int | None = None  # packed rows an update, over all devices
    micro_rows: int | None = None  # rows of one forward pass on one device
    seq_length: int | None = None
    anchors: int | None = None  # a row
    optimizer: Literal["adamw", "muon"] = "muon"
    learning_rate: float | None = None
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float = 1.0
    warmup: float = 0.04
    final_rate: float = 0.1
    beta: float = 0.7
    weighting: Literal["dpace", "decay", "none"] = "dpace"
    alpha: float = 0.5
    gamma: float | None = None
    seed: int = 0
    log_every: int | None = None
    save_seconds: float = 60.0
    compile: bool = True
    quantization: Literal["w4a16", "w4a4"] | None = None  # round as `flashdraft quantize` will, in the forward pass


@dataclass(frozen=True)
class EvalRecipe:
    """What is held out (by prompt), and how often it is measured."""

    share: float | None = None  # of the prompts
    records: int | None = None  # measured each time; four times as many at the end
    evaluations: int = 10  # over the run; 0: only at the end


@dataclass(frozen=True)
class Recipe:
    draft: DraftRecipe = field(default_factory=DraftRecipe)
    train: TrainRecipe = field(default_factory=TrainRecipe)
    eval: EvalRecipe = field(default_factory=EvalRecipe)

    def with_budget(self, steps: int | None, hours: float | None) -> Recipe:
        """Another length of the run, from the command line."""
        if steps is None and hours is None:
            return self
        check_range("--steps", "steps", steps)
        check_range("--hours", "hours", hours)
        return checked(replace(self, train=replace(self.train, steps=steps, hours=hours)))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_recipe(path: Path) -> Recipe:
    """Raises CheckpointError for a file that is none, ConfigError that names the key for what it must not say."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # as some editors of Windows write it
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the recipe ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not a text in UTF-8 ({error.reason}): save it as one") from error
    except (ValueError, RecursionError) as error:  # TOML's own names line and column
        raise CheckpointError(f"{path} is not valid TOML ({error})") from error
    try:
        return parse_recipe(raw)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def parse_recipe(raw: Mapping[str, Any]) -> Recipe:
    sections: dict[str, type[Any]] = {"draft": DraftRecipe, "train": TrainRecipe, "eval": EvalRecipe}
    for name in raw:
        if name not in sections and name not in OTHERS:
            if homes := [section for section, kind in sections.items() if name in typing.get_type_hints(kind)]:
                raise ConfigError(f"{name} stands before all sections: put it under [{homes[0]}]")
            raise ConfigError(f"unknown section [{name}]{_nearest(name, [*sections, *OTHERS])}")
    parts: dict[str, Any] = {name: _section(name, kind, raw.get(name, {})) for name, kind in sections.items()}
    return checked(Recipe(**parts))


def _section(name: str, kind: type[Any], raw: object) -> Any:
    if not isinstance(raw, dict):
        raise ConfigError(f"[{name}] must be a section of keys, got {raw!r}")
    hints = typing.get_type_hints(kind)
    for key, value in raw.items():
        if key not in hints:
            raise ConfigError(f"unknown key {key!r} in [{name}]{_nearest(key, list(hints))}")
        if not _fits(value, hints[key]):
            raise ConfigError(f"[{name}] {key} must be {_shown(hints[key])}, got {shorten(repr(value), 80)}")
        check_range(f"[{name}] {key}", key, value)  # before a whole number too large for a float becomes one
    return kind(**{key: _widened(value, hints[key]) for key, value in raw.items()})


def _nearest(word: str, known: list[str]) -> str:
    found = [name for name in known if word in name] or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f": did you mean {found[0]!r}?" if found else f": known are {', '.join(known)}"


def _fits(value: object, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in UNIONS:
        return any(_fits(value, part) for part in typing.get_args(hint) if part is not type(None))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float) if hint is float else isinstance(value, hint)


def _widened(value: Any, hint: Any) -> Any:
    """Whole numbers as floats where floats are meant."""
    if isinstance(value, list):
        return [_widened(item, typing.get_args(hint)[0]) for item in value] if typing.get_origin(hint) is list else value
    return float(value) if isinstance(value, int) and (hint is float or float in typing.get_args(hint)) else value


def _shown(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    origin = typing.get_origin(hint)
    if origin in UNIONS:
        return " or ".join(_shown(part) for part in typing.get_args(hint) if part is not type(None))
    if origin is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(hint))
    if origin is list:
        return f"a list of {_shown(typing.get_args(hint)[0]).removeprefix('a ')}s"
    return names[hint]


# Every number of a recipe: the least and the most allowed, both included; of a list, its items.
RANGES: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 128),
    "num_features": (1, 64),
    "target_layer_ids": (0, 1023),
    "intermediate_size": (1, 1 << 18),
    "num_attention_heads": (1, 1024),
    "num_key_value_heads": (1, 1024),
    "head_dim": (2, 1024),
    "block_size": (2, 64),
    "sliding_window": (0, 1 << 20),
    "mask_token": (0, 1 << 24),
    "steps": (1, 10**9),
    "hours": (1e-4, 24 * 365),
    "rows": (1, 1 << 16),
    "micro_rows": (1, 1 << 16),
    "seq_length": (16, 1 << 20),
    "anchors": (1, 1 << 20),
    "learning_rate": (1e-9, 1),
    "betas": (0, 0.9999),
    "clip": (1e-6, 10**6),
    "warmup": (0, 0.99),
    "final_rate": (0, 1),
    "beta": (0, 1),
    "alpha": (0, 1),
    "gamma": (1e-3, 10**6),
    "seed": (0, 2**31 - 1),
    "log_every": (1, 10**6),
    "save_seconds": (0, 24 * 3600),
    "share": (0, 0.5),
    "records": (1, 10**6),
    "evaluations": (0, 1000),
}


def check_range(name: str, key: str, value: object) -> None:
    """Raises ConfigError that calls the value `name` where it, or an item of it, lies outside the range of its key."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, bool) or not isinstance(number, int | float):
            continue
        least, most = RANGES[key]
        if not least <= number <= most:  # so that nan is refused
            shown = "a number far beyond" if abs(number) >= 1e21 else number
            raise ConfigError(f"{name} must be {_plain(least)} to {_plain(most)}, got {shown}")


def _plain(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


def checked(recipe: Recipe) -> Recipe:
    """The recipe, if its values can work. Raises ConfigError that names the key."""
    for name in ("draft", "train", "eval"):
        section = getattr(recipe, name)
        for item in fields(section):
            check_range(f"[{name}] {item.name}", item.name, getattr(section, item.name))
    d, t = recipe.draft, recipe.train
    if t.steps is not None and t.hours is not None:
        raise ConfigError("[train] ends after steps or after hours: give one of them")
    if len(t.betas) != 2:
        raise ConfigError(f"[train] betas must be two numbers, got {t.betas}")
    if d.num_features is not None and d.target_layer_ids is not None:
        raise ConfigError("[draft] num_features and target_layer_ids say the same: give one of them")
    if t.seq_length is not None and t.anchors is not None and t.anchors > t.seq_length:
        raise ConfigError(f"[train] anchors must be at most seq_length, got {t.anchors} for {t.seq_length}")
    return recipe
