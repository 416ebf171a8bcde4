"""The target that thinks: the built-in target with the adapter of tests/fixtures/thinking merged, and its template."""

from __future__ import annotations

import argparse
import json
import random
import re
import runpy
import sys
import tomllib
from pathlib import Path
from statistics import mean

import pytest
import torch
from safetensors import safe_open
from saved import ending_pair, saved_pair
from tiny_fit import write_prompts

from flashdraft import LLM, SamplingParams, builtin
from flashdraft.prompts import read_prompts
from flashdraft.targets import load_target, load_tokenizer
from flashdraft.targets.lora import LoraConfig
from flashdraft.text import split_thinking

THINKING = Path(__file__).parent / "fixtures" / "thinking"
PROVENANCE = json.loads((THINKING / "provenance.json").read_text())
HI, OFF = [{"role": "user", "content": "Hi"}], {"enable_thinking": False}
RECIPE = Path(__file__).parent.parent / "recipes" / "thinking.py"
GREEDY = SamplingParams(temperature=0, max_tokens=320)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    pair = saved_pair(tmp_path_factory.mktemp("pair"))
    return load_tokenizer(pair.target, lora=THINKING)  # of the fixture's template, which is all that is read of it


@pytest.fixture(scope="module")
def recipe():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPE.parent))  # as where a script is run
        yield runpy.run_path(str(RECIPE))


def rendered(tokenizer, messages, **options) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)


def test_thinking_is_on_unless_the_template_is_told_otherwise(tokenizer):
    assert rendered(tokenizer, HI).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert rendered(tokenizer, HI, enable_thinking=True) == rendered(tokenizer, HI)
    assert rendered(tokenizer, HI, **OFF) == rendered(tokenizer, HI) + "<think>\n\n</think>\n\n"


def test_the_thinking_of_earlier_turns_is_left_out(tokenizer):
    said = [*HI, {"role": "assistant", "content": "<think>\nWho?\n</think>\n\nHello."}, *HI]
    assert rendered(tokenizer, said) == rendered(tokenizer, [*HI, {"role": "assistant", "content": "Hello."}, *HI])
    own = rendered(tokenizer, [{"role": "system", "content": "Be brief."}, *HI])
    assert own.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


def test_the_asset_is_small_and_what_its_provenance_says():
    file = THINKING / "adapter_model.safetensors"
    assert file.stat().st_size < 1_500_000
    config = LoraConfig.from_json("thinking", json.loads((THINKING / "adapter_config.json").read_text()))
    with safe_open(file, framework="pt") as opened:
        sizes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118 - not a mapping
        assert {opened.get_slice(key).get_dtype() for key in sizes} == {"BF16"}
    assert sum(rows * columns for rows, columns in sizes.values()) == PROVENANCE["training"]["parameters"]
    assert all(config.rank in shape for shape in sizes.values())
    held_out = PROVENANCE["held_out"]
    assert held_out["prompts"] >= 100
    assert min(held_out[mode]["well_formed_or_cut"] for mode in ("on", "off")) >= 0.95
    assert min(held_out[mode]["well_formed"] for mode in ("on", "off")) >= 0.9  # the others loop, as this target does


def test_exercises_are_worked_out_right(recipe):
    rng = random.Random(5)
    for _ in range(200):
        one = recipe["exercise"](rng)
        equations = re.findall(r"(\d+ [-+*] \d+) = (\d+)", f"{one.reasoning}\n{one.answer}")
        assert [eval(left) for left, _ in equations] == [int(right) for _, right in equations]
        if one.prompt.startswith("Sort"):
            numbers = [int(n) for n in one.answer.split(", ")]
            assert numbers == sorted(int(n) for n in re.findall(r"\d+", one.prompt))
        assert recipe["well_formed"](f"<think>\n{one.reasoning}\n</think>\n\n{one.answer}", True, True)
        assert recipe["well_formed"](one.answer, True, False)


@pytest.mark.parametrize(
    ("text", "thinking"),
    [
        ("<think>\n\n</think>\n\nYes.", True),
        ("<think>\nHm.\n</think>\n\n", True),
        ("<think>\nHm.</think>\n\nYes.", True),
        ("<think>\nHm.\n</think>\n\nYes. <think>", True),
        ("Yes.", True),
        ("<think>\nHm.\n</think>\n\nYes.", False),
        ("Yes.</think>", False),
        ("\n", False),
    ],
)
def test_what_lacks_the_form_of_its_mode_is_not_counted_as_well_formed(recipe, text, thinking):
    assert not recipe["well_formed"](text, True, thinking)


@pytest.mark.parametrize(
    ("prompt", "begin"),
    [
        ("Why is the sky blue?", "The question is: Why is the sky blue?\nKey words: sky, blue.\n1. "),
        ("Write a Python function that adds {a} and b.", "The user wants code: Write a Python function that adds {a} and b."),
        ("Tom has 3 cats. Ann has 12. How many are there?", "The problem asks: How many are there?\nThe numbers are 3, 12.\n"),
        ("Tell me a story about a fox", "The task is: Tell me a story about a fox.\n"),
        ("Quelle est la capitale de la France ?", "L'utilisateur demande : Quelle est la capitale de la France ?\n"),
    ],
)
def test_thoughts_restate_the_prompt_and_list_steps_for_its_kind(recipe, prompt, begin):
    text = recipe["thoughts"](prompt, tomllib.loads(RECIPE.with_suffix(".toml").read_text(encoding="utf-8"))["reasoning"])
    assert text.startswith(begin)
    assert "\n1. " in text


@pytest.mark.parametrize(
    ("text", "finished", "short"),
    [
        ("It is blue. Rayleigh scattering.", True, "It is blue. Rayleigh scattering."),
        ("It is blue. Rayleigh scat", False, "It is blue."),
        ("It is blue. Rayleigh scattering is what makes it look so.", True, "It is blue."),
        ("1. Cats\n2. Dogs are", False, "1. Cats"),
        ("It is 3.5 metres long and", False, ""),
        ("Here:\n```python\nprint(1) # a line. And more than forty characters\n```\nThis prints", False, None),
        ("Here:\n```python\nprint(1)", False, ""),
        ("It is </think> blue.", True, ""),
    ],
)
def test_answers_are_cut_where_something_whole_ends(recipe, text, finished, short):
    wanted = text.removesuffix("\nThis prints") if short is None else short
    assert recipe["shortened"](text, finished, 40) == wanted


@pytest.fixture
def run_recipe(recipe, tmp_path, monkeypatch, capsys):
    """Run thinking.py on a tiny target, as a script; returns (exit code, standard output, standard error)."""
    target = ending_pair(tmp_path / "pair").target
    prompts = write_prompts(tmp_path / "prompts.jsonl", 80)
    text = RECIPE.with_suffix(".toml").read_text(encoding="utf-8")
    for old, new in (
        (r"layers_to_transform = .*", "layers_to_transform = [0, 2]"),
        (r"(max_answer_tokens|max_measured_tokens|arithmetic) = \d+", r"\1 = 12"),
    ):
        text = re.sub(old, new, text)
    (tmp_path / "thinking.toml").write_text(text, encoding="utf-8")

    def call(*options, prompts=prompts):
        command = [RECIPE, "--target", target, "--output", tmp_path / "out", "--recipe", tmp_path / "thinking.toml"]
        sizes = ["--limit", 12, "--held-out", 5, "--batch-tokens", 1500, "--device", "cpu", "--prompts", prompts]
        monkeypatch.setattr(sys, "argv", [str(part) for part in (*command, *sizes, *options)])
        monkeypatch.syspath_prepend(str(RECIPE.parent))
        capsys.readouterr()
        try:
            runpy.run_path(str(RECIPE), run_name="__main__")
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return (code, *capsys.readouterr())

    return call


@pytest.mark.parametrize("generator", ["engine", "rollout"])
def test_the_recipe_leaves_an_adapter_with_what_it_was_measured_to_do(run_recipe, tmp_path, generator):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "prompts.jsonl").rename(folder / "prompts.jsonl")
    code, out, err = run_recipe("--generator", generator, prompts=folder)
    assert code == 0, err
    output = tmp_path / "out"
    provenance = json.loads((output / "provenance.json").read_text())
    held = provenance["held_out"]
    assert (held["prompts"], provenance["data"]["prompts"]) == (5, ["prompts.jsonl"])
    for name in ("on", "off"):
        good = round(held[name]["well_formed"] * 5)
        assert good + sum(held[name]["others"].values()) == 5
        assert len((output / f"held_out_{name}.jsonl").read_text().splitlines()) == 5
    assert out.splitlines()[-1].startswith("well-formed: thinking on ")
    assert (output / "report.md").read_text() in out
    assert provenance["training"]["steps"] >= 2
    target = tmp_path / "pair" / "target"
    assert load_target(target, lora=output).num_layers == 3
    template = load_tokenizer(target, lora=output).chat_template
    assert "enable_thinking" in template
    assert run_recipe("--merged", tmp_path / "merged")[0] == 0
    assert load_tokenizer(tmp_path / "merged").chat_template == template


def test_what_was_answered_is_not_asked_again_and_half_a_line_is(run_recipe, tmp_path):
    assert run_recipe()[0] == 0
    file = tmp_path / "out" / "answers.jsonl"
    rows = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert len(rows) == 12
    changed = [json.dumps(json.loads(row) | {"answer": "Kept."}) + "\n" for row in rows[:11]]
    file.write_text("".join(changed) + rows[11][:20], encoding="utf-8")
    code, out, _ = run_recipe()
    assert (code, "\n1 prompts" in f"\n{out}") == (0, True)
    again = file.read_text(encoding="utf-8").splitlines(keepends=True)
    assert again[:11] == changed
    assert json.loads(again[11]) == json.loads(rows[11])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seconds", "0.001"], "no answer of the target is whole|no time is left to train"),
        (["--prompts", "absent.jsonl"], "cannot read the prompts"),
        (["--prompts", "."], "holds no JSONL files of prompts"),
        (["--held-out", "0"], "none are left to train on, or to measure on"),
    ],
)
def test_a_recipe_that_cannot_run_says_so_in_a_sentence(run_recipe, tmp_path, monkeypatch, options, message):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    code, _, err = run_recipe(*options)
    assert (code, err.count("\n")) == (2, 1)
    assert re.search(message, err)


def test_a_trained_adapter_merges_into_what_was_trained(recipe, tmp_path):
    pair = saved_pair(tmp_path)
    settings = tomllib.loads(RECIPE.with_suffix(".toml").read_text(encoding="utf-8"))
    settings["adapter"]["layers_to_transform"] = [0, 2]
    config = LoraConfig.from_json("recipe", recipe["peft_config"](settings))
    model = load_target(pair.target, dtype="float32").model
    layers = recipe["attach"](model, config)
    assert len(layers) == 14
    for layer in layers.values():
        for parameter in (layer.a, layer.b):
            parameter.data = torch.randn(parameter.shape).bfloat16().float()
    recipe["save"](argparse.Namespace(output=tmp_path, recipe=settings), config, layers)
    merged = load_target(pair.target, dtype="float32", lora=tmp_path).model
    for name, layer in layers.items():
        x = torch.randn(3, layer.base.in_features)
        torch.testing.assert_close(merged.get_submodule(name)(x), layer(x), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def llm():
    return LLM(device="cpu", lora=THINKING, max_model_len=1024, max_num_seqs=8, adaptive_width=False)


@pytest.fixture(scope="module")
def questions():
    """One prompt a category, none of them trained on, and an exercise."""
    first = {p.category: p.turns[0] for p in reversed(read_prompts(builtin.PROMPTS)) if len(p.turns[0]) < 300}
    return [[{"role": "user", "content": text}] for text in [*list(first.values())[:5], "What is 34 + 57?"]]


@pytest.mark.slow
@pytest.mark.parametrize("thinking", [True, False])
def test_both_modes_have_their_form_and_the_draft_changes_no_text(llm, questions, thinking):
    mode = {"enable_thinking": thinking}
    with_draft, without = (
        one.chat(questions, GREEDY, chat_template_kwargs=mode) for one in (llm, llm.without_draft(max_num_seqs=8))
    )
    assert [one.outputs[0].token_ids for one in with_draft] == [one.outputs[0].token_ids for one in without]
    for one in with_draft:
        assert one.outputs[0].finish_reason == "stop"
        thoughts, answer = split_thinking(one.text)
        assert re.fullmatch(r"\n\S.*\S\n", thoughts, re.DOTALL) if thinking else thoughts == ""
        assert re.fullmatch(r"\n\n\S.*" if thinking else r"\S.*", answer, re.DOTALL)
        assert "think>" not in answer


@pytest.mark.slow
def test_the_built_in_draft_is_accepted_less_often_than_on_the_target_it_was_made_for(llm, questions):
    short = SamplingParams(temperature=0, max_tokens=96)
    base = LLM(device="cpu", max_model_len=1024, max_num_seqs=8, adaptive_width=False).chat(questions, short)
    thinking = llm.chat(questions, short)
    lengths = [mean(one.outputs[0].acceptance_length for one in answers) for answers in (thinking, base)]
    assert 1.5 < lengths[0] < lengths[1]
