"""The commands, run as a user runs them: what they print, and one sentence with exit code 2 for what the user can mend."""

from __future__ import annotations

import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch

from flashdraft import __version__, builtin, terminal
from flashdraft.engine.memory import GIB, MemoryReport
from flashdraft.errors import ConfigError, as_options
from flashdraft.llm import LLM
from flashdraft.prompts import prompt_hash, read_prompts
from flashdraft.targets.fused import FusionReport
from flashdraft.terminal import round_robin

pytestmark = pytest.mark.usefixtures("no_gpu")


@pytest.fixture
def on_pair(pair):
    return ["--target", pair.target, "--draft", pair.draft, "--dtype", "float32"]


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [
        {"id": "a", "category": "x", "turns": ["the quick", "brown fox"]},
        {"category": "y", "messages": [{"role": "user", "content": "the lazy dog"}]},
        {"prompt": "jumps"},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_version(flashdraft):
    assert flashdraft("--version") == (0, f"flashdraft {__version__}\n", "")


def test_one_prompt_is_streamed_and_equals_the_answer_without_a_draft(flashdraft, pair, on_pair):
    code, with_draft, _ = flashdraft("generate", "the quick brown", *on_pair, "--max-tokens", 20)
    assert code == 0
    assert len(with_draft) > 5
    _, without, _ = flashdraft("generate", "the quick brown", "--target", pair.target, "--dtype", "float32", "--max-tokens", 20)
    assert with_draft == without


def test_several_prompts_as_json_lines(flashdraft, on_pair, prompt_file):
    code, out, _ = flashdraft("generate", "--prompts", prompt_file, *on_pair, "--max-tokens", 8, "--ignore-eos", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["prompt"] for row in rows] == ["the quick", "brown fox", "the lazy dog", "jumps"]
    assert all(row["completion_tokens"] == 8 and row["finish_reason"] == "length" for row in rows)
    assert all(row["acceptance_length"] >= 1 for row in rows)


def test_several_prompts_are_printed_with_their_answers(flashdraft, on_pair):
    code, out, _ = flashdraft("generate", "the quick", "lazy dog", *on_pair, "--max-tokens", 8)
    assert code == 0
    assert "the quick" in out
    assert "lazy dog" in out


def test_raw_continues_the_text_itself(flashdraft, on_pair):
    _, raw, _ = flashdraft("generate", "the quick", *on_pair, "--raw", "--max-tokens", 12)
    _, chat, _ = flashdraft("generate", "the quick", *on_pair, "--max-tokens", 12)
    assert raw != chat


def test_compare_prints_a_table_and_the_verdict(flashdraft, on_pair, prompt_file):
    code, out, _ = flashdraft("generate", "--compare", "--prompts", prompt_file, *on_pair, "--max-tokens", 16)
    assert code == 0
    for words in ("ratio", "acceptance by position", "identical", "8-row padding", "torch", f"draft {on_pair[3]}"):
        assert words in out
    assert "DIFFERENT" not in out
    assert "nearly tied" not in out


def test_compare_as_json_adds_up(flashdraft, on_pair, prompt_file):
    options = ("--prompts", prompt_file, *on_pair, "--max-tokens", 16, "--rounds", 2, "--json")
    code, out, _ = flashdraft("generate", "--compare", *options)
    report = json.loads(out)
    assert code == 0
    assert len(report["turns"]) == 2 * 4  # two rounds of 2 + 1 + 1 turns
    whole = report["all"]
    assert whole["identical"] == whole["answers"] == 8
    assert whole["tokens"] == sum(turn["tokens"] for turn in report["turns"])
    off = sum(turn["seconds_off"] for turn in report["turns"])
    assert whole["tokens_per_second_off"] == pytest.approx(whole["tokens"] / off)
    assert len(whole["acceptance_by_position"]) == 7
    assert set(report["by_category"]) == {"x", "y", ""}
    assert {"device", "threads", "torch", "transformers", "load_average"} <= set(report["setup"])
    named = {"target": str(on_pair[1]), "draft": str(on_pair[3]), "target_revision": None, "draft_revision": None}
    assert report["setup"].items() >= {**named, "dtype": "float32", "device_type": "cpu", "flashdraft": __version__}.items()


@pytest.mark.parametrize(("load", "warned"), [(0.5, False), (1000.0, True)])
def test_compare_warns_of_a_machine_with_more_to_do_than_cores(flashdraft, on_pair, prompt_file, monkeypatch, load, warned):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    options = ("--prompts", prompt_file, *on_pair, "--max-tokens", 4, "--limit", 1, "--json")
    code, out, err = flashdraft("generate", "--compare", *options)
    assert code == 0
    assert json.loads(out)["setup"]["load_average"] == load
    assert (f"the load average is 1000.0 on {os.cpu_count()} cores" in " ".join(err.split())) == warned


def test_compare_without_a_seed_draws_one_for_both_arms(flashdraft, on_pair, prompt_file):
    options = ("--prompts", prompt_file, *on_pair, "--max-tokens", 12, "--temperature", 1.0, "--json")
    code, out, _ = flashdraft("generate", "--compare", *options)
    report = json.loads(out)
    assert code == 0
    assert report["all"]["identical"] == 4
    assert report["setup"]["sampling"]["seed"] is not None


def test_without_proposals_there_is_no_acceptance_to_print(flashdraft, on_pair, prompt_file):
    options = ("--prompts", prompt_file, *on_pair, "--max-tokens", 6, "--num-speculative-tokens", 0)
    code, out, _ = flashdraft("generate", "--compare", *options)
    assert code == 0
    assert "acceptance length" not in out
    code, out, _ = flashdraft("generate", "--compare", *options[:-1], 2, "--json")
    assert len(json.loads(out)["all"]["acceptance_by_position"]) == 2


def test_markup_in_names_and_texts_is_printed_as_it_is(flashdraft, on_pair, tmp_path):
    path = tmp_path / "prompts.jsonl"
    text = "say [red] :smile:"
    path.write_text(json.dumps({"id": "x[/bold]", "category": "c[/red]", "turns": [text]}) + "\n" + '{"prompt": "hi"}')
    for extra in ((), ("--compare",)):
        code, out, _ = flashdraft("generate", "--prompts", path, *on_pair, "--max-tokens", 4, *extra)
        assert code == 0
        assert "c[/red]" in out
        assert extra or text in out
    code, _, err = flashdraft("generate", "x", "--target", "/nowhere/br[/a]t")
    assert code == 2
    assert "br[/a]t" in err


def test_system_prompt_and_later_turns_are_answered(flashdraft, on_pair, tmp_path):
    path = tmp_path / "prompts.jsonl"
    talk = [("system", "be brief"), ("user", "the quick"), ("assistant", "dropped"), ("user", "brown fox")]
    path.write_text("\ufeff" + json.dumps({"messages": [{"role": r, "content": c} for r, c in talk]}), encoding="utf-8")
    code, out, _ = flashdraft("generate", "--prompts", path, *on_pair, "--max-tokens", 6, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(row["turn"], row["prompt"]) for row in rows] == [(0, "the quick"), (1, "brown fox")]
    assert rows[1]["prompt_tokens"] > rows[0]["prompt_tokens"]
    [prompt] = read_prompts(path)
    assert prompt.opening == [{"role": "system", "content": "be brief"}]
    assert flashdraft("generate", "--prompts", path, *on_pair, "--raw")[0] == 2


def test_compare_refuses_prompts_the_draft_was_trained_on(flashdraft, pair, prompt_file, tmp_path):
    draft = tmp_path / "draft"
    shutil.copytree(pair.draft, draft)
    np.save(draft / "training_prompts.npy", np.array([prompt_hash("The LAZY  dog")], dtype=np.uint64))
    options = ("--target", pair.target, "--draft", draft, "--dtype", "float32")
    code, out, err = flashdraft("generate", "--compare", "--prompts", prompt_file, *options)
    assert (code, out) == (2, "")
    assert "trained on 1 of these 3 prompts" in err


def test_chat_answers_line_by_line_and_keeps_the_conversation(flashdraft, on_pair, monkeypatch):
    lines = iter(["the quick", "", "/reset", "brown fox", "/quit"])
    monkeypatch.setattr("rich.console.input", lambda *a: next(lines), raising=False)
    monkeypatch.setattr("builtins.input", lambda *a: next(lines))
    code, out, _ = flashdraft("chat", *on_pair, "--max-tokens", 8)
    assert code == 0
    assert out.count("acceptance length") == 2


@pytest.fixture
def typed(monkeypatch):
    """Type lines at the prompt of chat; an exception among them is raised there."""

    def type_lines(*lines: str | BaseException) -> None:
        left = iter(lines)

        def answer(prompt: str = "") -> str:
            line = next(left)
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", answer)

    return type_lines


def test_chat_says_what_its_commands_are_and_answers_none_of_them(flashdraft, on_pair, typed):
    typed("/help", "/nonsense", EOFError())
    code, out, _ = flashdraft("chat", *on_pair, "--max-tokens", 8)
    assert code == 0
    assert all(command in out for command in ("/reset", "/quit", "Ctrl-C", "Ctrl-D"))
    assert "there is no command /nonsense: /help lists them" in out
    assert "acceptance length" not in out


def test_chat_edits_lines_where_there_is_readline(flashdraft, on_pair, typed):
    pytest.importorskip("readline")
    sys.modules.pop("readline")
    typed("/quit")
    assert flashdraft("chat", *on_pair)[0] == 0
    assert "readline" in sys.modules


def test_ctrl_c_at_the_prompt_ends_the_line_and_the_chat(flashdraft, on_pair, typed):
    typed(KeyboardInterrupt())
    code, _, err = flashdraft("chat", *on_pair)
    assert code == 130
    assert err.endswith("\n")


def test_a_prompt_too_long_for_chat_names_the_option_and_the_way_out(flashdraft, on_pair, typed):
    typed("the quick " * 200, "fox", "/quit")
    code, out, err = flashdraft("chat", *on_pair, "--max-model-len", 64, "--max-tokens", 8)
    sentence = " ".join(err.split())
    assert code == 0
    assert "the context holds 64, the answer included: shorten the prompt or raise --max-model-len" in sentence
    assert "/reset starts a new conversation" in sentence
    assert out.count("acceptance length") == 1, "the conversation goes on without the line that was refused"


def test_inspect_prints_the_parameters_and_the_pair_check(flashdraft, pair, monkeypatch):
    code, out, _ = flashdraft("inspect", pair.draft, "--target", pair.target)
    assert code == 0
    assert "fits" in out
    monkeypatch.setattr(builtin, "target_path", lambda: pair.target)
    assert flashdraft("inspect", pair.draft, "--target", "builtin")[:2] == (0, out)
    code, out, _ = flashdraft("inspect", pair.draft, "--json")
    assert json.loads(out)["kind"] == "draft"


BAD = {
    "an unknown target": (["generate", "x", "--target", "/nowhere/at/all"], "no such directory"),
    "a missing GGUF": (["generate", "x", "--target", "/nowhere/model.gguf"], "no such GGUF file"),
    "a NaN temperature": (["generate", "x", "--temperature", "nan"], "temperature"),
    "a wrong top-p": (["generate", "x", "--top-p", "1.5"], "top_p"),
    "no tokens": (["generate", "x", "--max-tokens", "0"], "max_tokens"),
    "two sources of prompts": (["generate", "x", "--prompts", "y.jsonl"], "not both"),
    "a missing prompt file": (["generate", "--prompts", "/nowhere/y.jsonl"], "cannot read the prompts"),
    "an empty prompt": (["generate", " "], "empty"),
    "draft and no draft": (["generate", "x", "--draft", "d", "--no-draft"], "contradict"),
    "a comparison without a draft": (["generate", "x", "--compare", "--no-draft"], "--compare needs a draft"),
    "an unknown draft": (["generate", "x", "--target", "TARGET", "--draft", "/nowhere/draft"], "/nowhere/draft"),
    "an unknown device": (["generate", "x", "--target", "TARGET", "--device", "nonsense"], "cannot be used here"),
    "an unknown dtype": (["generate", "x", "--target", "TARGET", "--dtype", "int3"], "dtype must be"),
    "a context too long": (["generate", "x", "--target", "TARGET", "--max-model-len", "9999"], "--max-model-len 9999"),
    "a prompt too long": (["generate", "a b " * 9, "--target", "TARGET", "--max-model-len", "9", "--json"], "--max-model-len"),
    "nothing to inspect": (["inspect", "/nowhere/draft"], "/nowhere/draft"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_user_can_mend_is_one_sentence_and_exit_code_2(flashdraft, pair, name):
    arguments, words = BAD[name]
    code, out, err = flashdraft(*(str(pair.target) if a == "TARGET" else a for a in arguments))
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


@pytest.mark.skipif(torch.version.cuda is not None, reason="this PyTorch may find a GPU")
def test_a_gpu_asked_for_where_there_is_none_is_one_sentence(flashdraft, pair):
    code, out, err = flashdraft("generate", "x", "--target", pair.target, "--device", "cuda")
    assert (code, out) == (2, "")
    assert "device 'cuda' cannot be used here, as this PyTorch is built without CUDA: give cpu" in err


def test_an_old_gpu_is_refused_with_the_options_that_help(flashdraft, pair, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr("flashdraft.llm.choose_device", lambda name: torch.device("cuda"))
    for command in (("generate", "x"), ("generate", "--compare"), ("chat",)):
        code, out, err = flashdraft(*command, "--target", pair.target, "--draft", pair.draft)
        assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
        assert "Tesla T4 has compute capability 7.5" in err
        assert "set --no-async-scheduling, which needs none of our kernels, or run with --device cpu" in err


def test_a_gpu_that_is_full_is_one_sentence(flashdraft, pair, monkeypatch):
    def load(*a, **k):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (GIB, 24 * GIB))
    monkeypatch.setattr("flashdraft.llm.load_target", load)
    code, out, err = flashdraft("generate", "x", "--target", pair.target)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert "1.00 GiB of 24.0 are free" in err
    assert "lower --max-num-seqs or --max-model-len, set --enforce-eager, or run with --device cpu" in err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--rounds", 2), "--rounds is an option of --compare: add that, or leave --rounds out"),
        (("--compare", "--max-num-seqs", 4), "--compare answers one prompt at a time: leave out --max-num-seqs"),
    ],
)
def test_options_that_would_be_ignored_are_refused(flashdraft, on_pair, given, message):
    assert flashdraft("generate", "x", *on_pair, *given)[0] == 2
    assert message in flashdraft("generate", "x", *on_pair, *given)[2]


@pytest.mark.parametrize("option", [("--deterministic",), ("--enforce-eager",), ("--gpu-memory-utilization", 0.5)])
def test_options_of_the_gpu_are_refused_on_the_cpu(flashdraft, on_pair, option):
    code, _, err = flashdraft("generate", "x", *on_pair, *option)
    assert code == 2
    assert f"{option[0]} is an option of --async-scheduling, which is off (by default on the CPU)" in err
    code, out, _ = flashdraft("generate", "the quick", *on_pair, *option, "--async-scheduling", "--max-tokens", 8)
    assert code == 0
    assert out == flashdraft("generate", "the quick", *on_pair, "--max-tokens", 8)[1]


def test_of_a_gpu_the_fused_layers_and_the_memory_are_told_beside_the_answers(flashdraft, on_pair, typed, monkeypatch):
    asked = []

    def load(target, draft, **options):
        asked.append(options)
        llm = LLM(target, draft, **options)
        llm.engine.fusion = FusionReport((0, 1), {2: "it is unusual"})
        llm.engine.memory = MemoryReport(80 * GIB, 10 * GIB, GIB, 60 * GIB, GIB)
        return llm

    monkeypatch.setattr(terminal, "LLM", load)
    lines = [
        "2 of 3 layers fused; layer 2 as in the model, because it is unusual",
        "GPU memory 80.0 GiB: models 10.00, KV cache 60.00, steps 1.00, other 1.00, free 8.00",
    ]
    code, out, err = flashdraft("generate", "a", "b", *on_pair, "--max-tokens", 4, "--json", "--gpu-memory-utilization", 0.9)
    assert (code, err.splitlines()) == (0, lines)
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["a", "b"]
    assert flashdraft("generate", "--compare", *on_pair, "--limit", 1, "--max-tokens", 4)[0] == 0
    typed("/quit")
    assert flashdraft("chat", *on_pair)[2].splitlines() == lines
    assert [options["max_num_seqs"] for options in asked] == [2, 1, 1]
    assert [options.get("kv_cache_share", 1.0) for options in asked] == [1.0, 0.4, 1.0]


def test_options_are_named_as_on_the_command_line_but_not_inside_paths():
    message = "max_model_len is a/max_model_len.json; `deterministic` off, deterministics; set enforce_eager=True."
    expected = "--max-model-len is a/max_model_len.json; `--deterministic` off, deterministics; set --enforce-eager."
    assert as_options(ConfigError(message)) == expected


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"turns": []}', '{"turns": [3]}', '{"turns": [" "]}', '{"text": "x"}', "[" * 100_000]
)
def test_a_bad_line_of_a_prompt_file_is_named(flashdraft, tmp_path, line):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line)
    code, _, err = flashdraft("generate", "--prompts", path)
    assert code == 2
    assert "line 3" in err


def test_the_builtin_prompts_cover_eleven_categories_and_none_was_trained_on():
    prompts = read_prompts(builtin.PROMPTS)
    assert len({p.category for p in prompts}) == 11
    assert len({p.hash for p in prompts}) == len(prompts)
    assert builtin.trained_on(prompts) == []


def test_round_robin_takes_categories_in_turn():
    prompts = read_prompts(builtin.PROMPTS)
    assert len({p.category for p in round_robin(prompts, 11)}) == 11
    assert round_robin(prompts, 1000) != []


@pytest.mark.parametrize(
    "command",
    [["synthesize"], ["train", "--data", "d"], ["fit", "--hours", "1"], ["quantize", "builtin", "--calibration", "p.jsonl"]],
)
def test_an_empty_output_is_not_the_working_directory(flashdraft, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    code, _, err = flashdraft(*command, "--output", "")
    assert (code, err.count("\n")) == (2, 1)
    assert "--output is empty: give it a value, or leave it out" in err
    assert not list(tmp_path.iterdir())
