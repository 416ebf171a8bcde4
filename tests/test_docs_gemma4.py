"""docs/gemma4.md: its commands parse, its code gives the numbers that stand there, its requests are answered."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
import typer
from gemma4_chat import gemma4_pair
from gemma4_e4b import E4B, RECIPE, planned
from media_saved import encoded, saved_media_target, wav
from multimodal import picture, sound
from scripted import scripted, serving
from transformers import AutoModelForCausalLM, Gemma4TextConfig

from flashdraft.cli import app
from flashdraft.draft import DFlashDraft, count_parameters
from flashdraft.engine.cache import shapes_of
from flashdraft.engine.memory import request_bytes
from flashdraft.llm import LLM
from flashdraft.targets.shapes import layer_specs_of
from flashdraft.train.plan import memory_estimate
from flashdraft.train.recipe import read_recipe

ROOT = Path(__file__).parent.parent
DOCUMENT = (ROOT / "docs" / "gemma4.md").read_text(encoding="utf-8")
FENCES = re.findall(r"^```(\w*)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
COMPUTED, TOOLS, MEDIA = (content for language, content in FENCES if language == "python")
SHELL = "".join(content for language, content in FENCES if not language).replace("\\\n", " ")
COMMANDS = [line for line in SHELL.splitlines() if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_one_that_there_is(command):
    words = shlex.split(command, comments=True)
    if words[0] == "pip":
        return
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    assert words[0] == "flashdraft"
    found = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    options = found.make_context(words[1], list(words[2:])).params
    recipe = options.get("recipe")
    assert recipe is None or read_recipe(ROOT / recipe)
    if options.get("max_model_len"):
        assert options["max_model_len"] <= 131_072


def computed() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(COMPUTED, "docs/gemma4.md", "exec"), names)
    return names


def test_the_table_is_what_the_code_beside_it_computes():
    table = DOCUMENT.partition("| quantity (computed) | value |\n|---|---|\n")[2].partition("\n\n")[0]
    assert [f"| {name} | {value} |" for name, value in computed()["results"].items()] == table.splitlines()


def test_the_numbers_it_begins_with_are_those_of_the_project():
    names = computed()
    (scaling,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "scaling.md").read_text(), re.MULTILINE | re.DOTALL)
    rates: dict[str, Any] = {}
    exec(compile(scaling, "docs/scaling.md", "exec"), rates)
    assert names["training_rate"] == round(rates["your_training"])
    performance, quantization = ((ROOT / "docs" / name).read_text() for name in ("performance.md", "quantization.md"))
    assert f"| without, batch 16 | {1000 * names['step_16']:.2f} |" in performance
    told = f"(without a draft {1000 * names['step_alone']:.2f} ms) | {1000 * names['step_with_draft']:.2f} ms |"
    assert told in quantization
    config = planned()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Gemma4TextConfig(**E4B), dtype=torch.bfloat16)
        draft = DFlashDraft(config)
    assert names["target"] == sum(p.numel() for p in model.parameters())
    assert names["draft"] == count_parameters(draft)["all"]
    assert names["head"] == config.vocab_size * config.hidden_size
    assert names["norms"] == sum(p.numel() for p in draft.parameters() if p.dim() == 1)
    shapes = shapes_of(layer_specs_of(model.config), config)
    assert names["kv_cache"] == request_bytes(shapes, torch.bfloat16, 131_072 + config.block_size)
    recipe = read_recipe(RECIPE).train
    plan = SimpleNamespace(
        config=SimpleNamespace(optimizer=recipe.optimizer), micro_rows=1, seq_length=recipe.seq_length, anchors=recipe.anchors
    )
    memory = memory_estimate(SimpleNamespace(model=model, device=torch.device("cuda")), draft, plan)  # type: ignore[arg-type]
    assert " + ".join(f"{size / 1e9:.1f}" for size in memory.values()) == "14.9 + 4.3 + 15.9"
    assert "{14.9 + 4.3 + 15.9:.0f} GB" in COMPUTED


def run(code: str, url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The code of the document, with another address and model."""
    real = openai.OpenAI
    monkeypatch.setattr(openai, "OpenAI", lambda base_url, api_key: real(base_url=f"{url}/v1", api_key=api_key, max_retries=0))
    names: dict[str, Any] = {}
    exec(compile(code.replace('model="TARGET"', 'model="tiny"'), "docs/gemma4.md", "exec"), names)
    return names


def test_the_request_with_an_image_and_a_clip_is_answered(tmp_path, monkeypatch, capsys):
    folder = saved_media_target(tmp_path / "target")
    (tmp_path / "photo.png").write_bytes(encoded(picture(1)))
    (tmp_path / "speech.wav").write_bytes(wav(sound(1)))
    monkeypatch.chdir(tmp_path)
    limits = dict(max_model_len=512, max_num_batched_tokens=300)
    with serving(lambda: LLM(folder, dtype="float32", device="cpu", **limits)) as client:
        names = run(MEDIA, client.url, monkeypatch)
    details = names["answer"].usage.prompt_tokens_details.model_dump()
    assert (details["image_tokens"], details["audio_tokens"]) == (63, 13)
    assert "image_tokens=63" in capsys.readouterr().out


def test_the_agent_calls_tools_and_answers(tmp_path, monkeypatch, capsys):
    pair = gemma4_pair(tmp_path)
    said = [
        '<|channel>thought\nboth\n<channel|><|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
        '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|><|tool_response>',
        "Rome, as ever.<turn|>",
    ]
    with scripted(LLM(pair.target, pair.draft, dtype="float32", device="cpu", max_model_len=2048)) as client:
        tokenizer, launch = client.llm.tokenizer, client.runner.launch
        prompts: list[str] = []

        def saying(batch):
            if batch.prefill and batch.prefill[0].last:
                prompts.append(tokenizer.decode(batch.prefill[0].sequence.request.prompt))
                client.runner.script = tokenizer(said[len(prompts) - 1], add_special_tokens=False)["input_ids"]
            return launch(batch)

        client.runner.launch = saying
        names = run(TOOLS, client.url, monkeypatch)
        client.wait_idle()
    assert capsys.readouterr().out == "Rome, as ever.\n"
    assert [m["role"] for m in names["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert prompts[1].startswith(prompts[0] + said[0].removesuffix("<|tool_response>"))
    assert prompts[1].count('<|tool_response>response:weather{value:<|"|>21 degrees<|"|>}<tool_response|>') == 2
