from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.train.recipe import RANGES, DraftRecipe, EvalRecipe, Recipe, TrainRecipe, parse_recipe, read_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


OF_DRAFTS = sorted(path for path in RECIPES.glob("*.toml") if path.stem != "thinking")  # which is of a target


@pytest.mark.parametrize("path", OF_DRAFTS, ids=lambda path: path.stem)
def test_every_recipe_of_the_repository_is_valid(path: Path) -> None:
    recipe = read_recipe(path)
    assert (recipe == Recipe()) == (path.stem == "default")  # which names every key with what it is anyway


def test_every_key_of_the_default_recipe_is_a_key() -> None:
    lines = (RECIPES / "default.toml").read_text().splitlines()[2:]
    text = "\n".join(re.sub(r"^# (?=\w+ = )", "", line) for line in lines)
    written = {name for line in text.splitlines() if (name := line.split(" = ")[0]) and " = " in line}
    known = {item.name for kind in (DraftRecipe, TrainRecipe, EvalRecipe) for item in fields(kind)}
    assert written == known - {"hours", "target_layer_ids"}  # in remarks, as they exclude others
    recipe = parse_recipe(tomllib.loads(text))
    assert (recipe.draft.mask_token, recipe.train.gamma, recipe.eval.share) == ("<filename>", 4.0, 0.02)


def test_an_empty_recipe_leaves_everything_to_be_derived() -> None:
    assert parse_recipe({}) == Recipe()


def test_whole_numbers_do_for_numbers() -> None:
    recipe = parse_recipe({"train": {"hours": 2, "betas": [0, 0.9]}, "draft": {"mask_token": 7}})
    assert (recipe.train.hours, recipe.train.betas, recipe.draft.mask_token) == (2.0, [0, 0.9], 7)
    assert type(recipe.train.betas[0]) is float, "AdamW takes no others"
    assert parse_recipe({"draft": {"mask_token": "<mask>"}}).draft.mask_token == "<mask>"


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"train": {"learning_rat": 1e-3}}, r"unknown key 'learning_rat' in \[train\]: did you mean 'learning_rate'\?"),
        ({"draft": {"layers": 4}}, r"unknown key 'layers' in \[draft\]: did you mean 'num_hidden_layers'\?"),
        ({"train": {"zzz": 4}}, r"unknown key 'zzz' in \[train\]: known are steps, hours"),
        ({"training": {}}, r"unknown section \[training\]: did you mean 'train'\?"),
        ({"train": {"rows": "8"}}, r"\[train\] rows must be a whole number, got '8'"),
        ({"train": {"rows": True}}, r"\[train\] rows must be a whole number, got True"),
        ({"train": {"rows": 8.0}}, r"\[train\] rows must be a whole number, got 8.0"),
        ({"train": {"optimizer": "sgd"}}, r"\[train\] optimizer must be 'adamw' or 'muon', got 'sgd'"),
        ({"train": {"betas": [0.9, "x"]}}, r"\[train\] betas must be a list of numbers, got \[0.9, 'x'\]"),
        ({"train": {"betas": [0.9]}}, r"betas must be two numbers, got \[0.9\]"),
        ({"train": {"beta": 1.5}}, r"\[train\] beta must be 0 to 1, got 1.5"),
        ({"train": {"learning_rate": float("nan")}}, r"learning_rate must be 1e-09 to 1, got nan"),
        ({"train": {"steps": 0}}, r"\[train\] steps must be 1 to 1,000,000,000, got 0"),
        ({"train": {"steps": 5, "hours": 1}}, "steps or after hours: give one"),
        ({"train": {"seq_length": 64, "anchors": 65}}, "anchors must be at most seq_length"),
        ({"draft": {"causal": 1}}, r"\[draft\] causal must be true or false, got 1"),
        ({"draft": {"num_features": 3, "target_layer_ids": [1, 2]}}, "say the same: give one"),
        ({"steps": 5, "train": {}}, r"steps stands before all sections: put it under \[train\]"),
        ({"draft": 3}, r"\[draft\] must be a section of keys"),
        ({"eval": {"share": 0.9}}, r"\[eval\] share must be 0 to 0.5"),
    ],
)
def test_what_a_recipe_must_not_say_is_named(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_recipe(raw)


NUMBERS = [
    (section, item.name)
    for section, kind in (("draft", DraftRecipe), ("train", TrainRecipe), ("eval", EvalRecipe))
    for item in fields(kind)
    if "int" in str(item.type) or "float" in str(item.type)
]


def test_every_number_has_a_range_and_nothing_else_has() -> None:
    assert {name for _, name in NUMBERS} == set(RANGES)


@pytest.mark.parametrize(("section", "key"), NUMBERS)
def test_a_number_outside_of_its_range_is_refused_with_the_range(section: str, key: str) -> None:
    kind = {"draft": DraftRecipe, "train": TrainRecipe, "eval": EvalRecipe}[section]
    hint = str({item.name: item.type for item in fields(kind)}[key])
    least, most = RANGES[key]
    outside = [least - 1, most + 1, 10**30, *([float("nan"), float("inf"), 10**400] if "float" in hint else [])]
    for value in outside:
        with pytest.raises(ConfigError, match=rf"^\[{section}\] {key} must be [\d.,e-]+ to [\d.,]+, got \S.*$"):
            parse_recipe({section: {key: [value] if "list" in hint else value}})


@pytest.mark.parametrize("hours", [float("nan"), float("inf"), -1.0, 0.0, 1e20])
def test_the_command_line_is_held_to_the_same_ranges(hours: float) -> None:
    with pytest.raises(ConfigError, match=r"^--hours must be 0.0001 to 8,760, got"):
        Recipe().with_budget(None, hours)
    with pytest.raises(ConfigError, match=r"^--steps must be 1 to 1,000,000,000, got 0"):
        Recipe().with_budget(0, None)


def test_a_byte_order_mark_and_an_empty_file_are_read_and_other_encodings_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nrows = 3\n")
    assert read_recipe(path).train.rows == 3
    path.write_bytes(b"")
    assert read_recipe(path) == Recipe()
    path.write_bytes("[train]\nrows = 3\n".encode("utf-16"))
    with pytest.raises(CheckpointError, match=r"r\.toml is not a text in UTF-8 .*save it as one"):
        read_recipe(path)
    path.write_text(f"[train]\nrows = {'9' * 5000}\n")  # more digits than Python converts
    with pytest.raises(CheckpointError, match=r"r\.toml is not valid TOML"):
        read_recipe(path)
    with pytest.raises(CheckpointError, match=r"cannot read the recipe \(Is a directory\)"):
        read_recipe(tmp_path)


def test_a_file_that_is_no_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[train]\nrows = = 3\n")
    with pytest.raises(CheckpointError, match=r"r\.toml is not valid TOML .*line 2"):
        read_recipe(path)
    with pytest.raises(CheckpointError, match="cannot read the recipe"):
        read_recipe(tmp_path / "absent.toml")
    path.write_text("[train]\nrow = 3\n")
    with pytest.raises(ConfigError, match=r"r\.toml: unknown key 'row' in \[train\]: did you mean 'rows'"):
        read_recipe(path)


def test_the_command_line_sets_the_length_of_the_run() -> None:
    recipe = parse_recipe({"train": {"hours": 3, "rows": 2}})
    assert recipe.with_budget(None, None) is recipe
    changed = recipe.with_budget(7, None).train
    assert (changed.steps, changed.hours, changed.rows) == (7, None, 2)
    with pytest.raises(ConfigError, match="give one"):
        recipe.with_budget(7, 1.0)
