"""`flashdraft doctor` finds what is wrong with a pair: each cause planted by editing files only, two at once, none at all."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from saved import TEMPLATE, Pair
from test_cli_lora import adapter
from trained import OPTIONS, copied, is_stamped, retensor, rewrite, trained_pair, unstamp

from flashdraft.checkpoint import load_draft, save_draft
from flashdraft.config_json import parse_config
from flashdraft.doctor.files import Files
from flashdraft.targets.load import adapter_hash

Plant = Callable[[Pair], None]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Pair:
    return trained_pair(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def doctor(flashdraft, healthy, tmp_path):
    """Runs the command on a pair; (exit code, its JSON, what it printed)."""

    def run(pair: Pair, *options: object) -> tuple[int, dict[str, Any], str]:
        report = tmp_path / "report.json"
        prompts = healthy.target.parent / "prompts.jsonl"
        code, out, err = flashdraft(
            "doctor", pair.target, pair.draft, "--prompts", prompts, "--json", report, *OPTIONS, *options
        )
        assert "Traceback" not in err
        return code, json.loads(report.read_text()), out

    return run


def config(change: Callable[[dict[str, Any]], Any]) -> Plant:
    return lambda pair: rewrite(pair.draft / "config.json", lambda raw: (change(raw), None)[1])


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Plant:
    return lambda pair: retensor(pair.draft / "model.safetensors", lambda found: (change(found), None)[1])


def random_head(pair: Pair) -> None:
    config(lambda raw: raw.update(has_own_lm_head=True))(pair)
    generator = torch.Generator().manual_seed(3)

    def add(found: dict[str, torch.Tensor]) -> None:
        rows = load_file(pair.target / "model.safetensors")["lm_head.weight"].shape
        found["lm_head.weight"] = torch.randn(rows, generator=generator).to(torch.bfloat16)

    retensor(pair.draft / "model.safetensors", add)


def unread_head(pair: Pair) -> None:
    """The head is in the weights, and the flag that readers go by says otherwise."""
    head = load_file(pair.target / "model.safetensors")["lm_head.weight"]
    retensor(pair.draft / "model.safetensors", lambda found: found.update({"lm_head.weight": head.to(torch.bfloat16)}))


def tied(pair: Pair) -> None:
    """Embeddings of its own that are said to be its head too, where it learned under the target's."""
    config(lambda raw: (raw.pop("has_own_lm_head"), raw.update(tie_word_embeddings=True)))(pair)
    table = load_file(pair.target / "model.safetensors")["model.embed_tokens.weight"]
    retensor(pair.draft / "model.safetensors", lambda found: found.update({"embed_tokens.weight": table.to(torch.bfloat16)}))


def ungated(raw: dict[str, Any]) -> None:
    raw.update(use_sliding_window=False, layer_types=["full_attention"] * raw["num_hidden_layers"])


shifted = config(lambda raw: raw["dflash_config"].update(target_layer_ids=[1, 2]))
scaled = config(lambda raw: raw.update(input_embedding_scale=48**0.5))
wide = config(ungated)
turned = config(lambda raw: raw.update(rope_theta=2.0))
CAUSES = {
    "shifted": (shifted, "layer ids", "dflash_config.target_layer_ids to [0, 1]"),
    "scaled": (scaled, "embedding scale", "input_embedding_scale"),
    "wide": (wide, "window", "use_sliding_window to true"),
    "turned": (turned, "RoPE theta", "rope_theta to "),
    "random head": (random_head, "head", "lm_head = None"),
    "wrong tying": (tied, "head", "lm_head = None"),
    "unread head": (unread_head, "head", "has_own_lm_head to true"),
    "zero norm": (tensors(lambda t: t["hidden_norm.weight"].zero_()), "norm", "hidden_norm"),
    "unset norm": (tensors(lambda t: t["layers.0.input_layernorm.weight"].fill_(1.0)), "norm", "again"),
    "zero product": (tensors(lambda t: t["fc.weight"].zero_()), "weights", "again"),
}


SLOW = {"scaled", "unset norm", "zero product", "unread head"}  # those like which others run


def test_a_healthy_pair_gets_a_clean_bill(doctor, healthy):
    code, report, out = doctor(healthy)
    assert (code, report["findings"]) == (0, []), out
    assert report["acceptance"]["acceptance_length"] > 3
    assert "nothing found" in out
    assert len(report["acceptance"]["by_position"]) == 3


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CAUSES])
def test_a_planted_cause_is_found_and_named_with_its_remedy(doctor, healthy, tmp_path, name):
    plant, cause, remedy = CAUSES[name]
    pair = copied(healthy, tmp_path)
    plant(pair)
    before = {path: path.read_bytes() for path in pair.draft.iterdir()}
    code, report, out = doctor(pair)
    assert code == 1
    assert [finding["cause"] for finding in report["findings"]] == [cause], out
    [finding] = report["findings"]
    assert any(remedy in line for line in (finding["says"], *finding["mend"])), finding
    assert {path: path.read_bytes() for path in pair.draft.iterdir()} == before, "nothing is edited"


@pytest.mark.parametrize(
    "plants",
    [
        (shifted, wide),
        *(pytest.param(two, marks=pytest.mark.slow) for two in [(scaled, turned), (shifted, scaled), (wide, random_head)]),
    ],
)
def test_two_causes_at_once_are_both_found(doctor, healthy, tmp_path, plants):
    pair = copied(healthy, tmp_path)
    for plant in plants:
        plant(pair)
    wanted = {cause for plant, cause, _ in CAUSES.values() if plant in plants}
    code, report, out = doctor(pair)
    assert code == 1
    assert {finding["cause"] for finding in report["findings"]} == wanted, out
    assert report["mended"]["acceptance_length"] > 3


def test_the_edits_it_names_make_the_configuration_what_it_was(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    shifted(pair)
    wide(pair)
    _, report, _ = doctor(pair)

    def follow(raw: dict[str, Any]) -> None:
        for line in (line for finding in report["findings"] for line in finding["mend"]):
            path, value = line.partition(" set ")[2].split(" to ")
            *sections, key = path.split(".")
            for section in sections:
                raw = raw[section]
            raw[key] = json.loads(value)

    rewrite(pair.draft / "config.json", follow)
    names = Files.of(pair.draft).names
    was, now = (parse_config(json.loads((p.draft / "config.json").read_text()), names) for p in (healthy, pair))
    assert now == was


def test_the_command_it_names_saves_the_draft_mended(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    random_head(pair)
    _, report, _ = doctor(pair)
    [line] = report["findings"][0]["mend"]
    _, _, code = shlex.split(line)
    exec(code, {})
    mended, was = load_draft(pair.draft), load_draft(healthy.draft)
    assert mended.config == was.config
    assert torch.equal(mended.fc.weight, was.fc.weight)


@pytest.mark.slow
def test_a_configuration_that_the_weights_were_not_saved_with_is_found_by_their_stamp(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    save_draft(load_draft(pair.draft), pair.draft)
    assert is_stamped(pair.draft)
    shifted(pair)
    code, report, _ = doctor(pair)
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["layer ids"])
    rewrite(pair.draft / "config.json", lambda raw: raw.update(rms_norm_eps=3e-6))
    code, report, _ = doctor(pair)
    assert code == 1
    assert "config.json" in [finding["cause"] for finding in report["findings"]]
    unstamp(pair.draft)


def test_values_beyond_sixteen_bits_are_found(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)

    def grow(found: dict[str, torch.Tensor]) -> None:
        found["layers.0.mlp.up_proj.weight"].mul_(2.0**16)  # exact in bfloat16, and undone by the next product
        found["layers.0.mlp.down_proj.weight"].mul_(2.0**-16)

    tensors(grow)(pair)
    code, report, out = doctor(pair, "--dtype", "float16")
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["16-bit overflow"]), out
    assert "--dtype bfloat16" in report["findings"][0]["mend"][0]
    assert doctor(pair)[0] == 0


def test_another_chat_template_is_found(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    (pair.target / "chat_template.jinja").write_text(TEMPLATE.replace("<|assistant|>", "<|system|>the the the"))
    code, report, out = doctor(pair)
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["tokenizer or chat template"]), out
    (pair.draft / "chat_template.jinja").write_text(TEMPLATE)
    code, report, out = doctor(pair)
    [finding] = report["findings"]
    assert finding["gain"]["after"] > finding["gain"]["before"] + 0.5, out


@pytest.mark.slow
def test_another_vocabulary_is_found(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(pair.target / name, pair.draft / name)

    def turn_round(content: dict[str, Any]) -> None:
        words = [word for word, number in content["model"]["vocab"].items() if number >= 6]
        content["model"]["vocab"] |= dict(zip(words, [content["model"]["vocab"][w] for w in reversed(words)], strict=True))

    rewrite(pair.target / "tokenizer.json", turn_round)
    code, report, out = doctor(pair)
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["tokenizer or chat template"]), out
    assert report["findings"][0]["gain"]["sure"]


@pytest.mark.slow
def test_a_draft_of_the_base_model_on_an_adapter_is_found_and_the_other_way_round(doctor, healthy, tmp_path):
    pair, lora = copied(healthy, tmp_path), adapter(tmp_path / "lora", 0.3)
    (lora / "chat_template.jinja").unlink()
    code, report, out = doctor(pair, "--lora", lora)
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["another target"]), out
    assert "base model" in report["findings"][0]["says"]
    assert report["findings"][0]["gain"]["sure"]
    named = {"name": str(lora), "hash": adapter_hash(lora)}
    rewrite(pair.draft / "training.json", lambda training: training.update(lora=named, target_hash="of the adapted one"))
    code, report, _ = doctor(pair)
    assert any("trained for the adapter" in note for note in report["notes"]), report["notes"]


@pytest.mark.slow
def test_a_template_and_a_shift_at_once_are_both_found(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    (pair.target / "chat_template.jinja").write_text(TEMPLATE.replace("<|assistant|>", "<|system|>the the the"))
    (pair.draft / "chat_template.jinja").write_text(TEMPLATE)
    shifted(pair)
    _, report, out = doctor(pair)
    assert {finding["cause"] for finding in report["findings"]} == {"tokenizer or chat template", "layer ids"}, out


def test_thinking_unlike_training_is_found(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    off = "{% if enable_thinking is defined and not enable_thinking %}" + TEMPLATE + "{% else %}"
    (pair.target / "chat_template.jinja").write_text(off + TEMPLATE.replace("<|assistant|>", "<|system|>lazy") + "{% endif %}")
    code, report, out = doctor(pair)
    assert code == 1
    assert report["findings"][0]["cause"] == "thinking mode", out
    code, report, out = doctor(pair, "--no-thinking")
    assert (code, report["findings"]) == (0, []), out


@pytest.mark.parametrize("known", [True, False])
def test_a_draft_of_another_target_is_found(doctor, healthy, tmp_path, known):
    pair = copied(healthy, tmp_path)
    generator = torch.Generator().manual_seed(1)

    def tune(found: dict[str, torch.Tensor]) -> None:
        for tensor in found.values():
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)

    retensor(pair.target / "model.safetensors", tune)
    if not known:
        rewrite(pair.draft / "training.json", lambda training: training.update(target="gone/base"))
    code, report, out = doctor(pair)
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["another target"]), out
    assert (report["findings"][0]["gain"] is not None) == known


@pytest.mark.slow
def test_a_draft_that_knows_nothing_is_not_called_healthy(doctor, healthy, tmp_path):
    pair = copied(healthy, tmp_path)
    (pair.draft / "training.json").unlink()
    tensors(lambda found: [t.normal_(std=0.1) for name, t in found.items() if t.dim() == 2])(pair)
    code, report, _ = doctor(pair)
    assert (code, [finding["cause"] for finding in report["findings"]]) == (1, ["training"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--json", "nowhere/report.json"), "nowhere"),
        (("--limit", 1), "at least 2"),
        (("--prompts", "nope.jsonl"), "nope.jsonl"),
        (("--max-tokens", 1), "at least 2"),
    ],
)
def test_bad_usage_is_one_sentence(flashdraft, healthy, options, words):
    code, _, err = flashdraft("doctor", healthy.target, healthy.draft, *options)
    assert (code, words in err) == (2, True), err
