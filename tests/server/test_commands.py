"""`flashdraft serve` and `flashdraft chat --endpoint`, as a user runs them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from saved import saved_pair
from scripted import scripted

from flashdraft import cli, cli_serve, terminal
from flashdraft.errors import ConfigError
from flashdraft.server import serving

ROOT = Path(__file__).parents[2]


@pytest.fixture
def flashdraft(monkeypatch, capsys):
    """Run the command line in this process; returns (exit code, standard output, standard error)."""
    for name in (*cli_serve.KEYS, "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["flashdraft", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def served_with(flashdraft, monkeypatch):
    """What the command would serve: (what terminal.load is given, options, where)."""

    def call(*arguments):
        seen = {}
        monkeypatch.setattr(terminal, "load", lambda *args, **given: seen.update(args=args, given=given))
        monkeypatch.setattr(
            serving, "serve", lambda load, options, **place: (load(), seen.update(options=options, place=place))
        )
        code, _, error = flashdraft("serve", *arguments)
        assert code == 0, error
        return seen

    return call


def test_the_width_is_left_to_the_engine_unless_it_is_pinned(served_with):
    assert "adaptive_width" not in served_with("target")["given"]
    assert served_with("target", "--no-adaptive-width")["given"]["adaptive_width"] is False


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), False),
        (("--device", "cuda"), True),
        (("--device", "cuda", "--no-engine-process"), False),
        (("--device", "cuda", "--disable-frontend-multiprocessing"), False),
        (("--engine-process",), True),
    ],
)
def test_the_engine_has_a_process_of_its_own_on_a_gpu_or_where_that_is_asked_for(served_with, no_gpu, options, expected):
    assert served_with("target", *options)["options"].engine_process is expected


@pytest.mark.parametrize(("method", "noise"), [("greedy", 0.0), ("probabilistic", None), (None, None)])
def test_proposals_are_greedy_only_where_that_is_asked_for(served_with, method, noise):
    config = {"model": "draft"} | ({} if method is None else {"draft_sample_method": method})
    given = served_with("target", "--speculative-config", json.dumps(config))["given"]
    assert given.get("proposal_noise") == noise


def test_a_command_line_of_vllm_is_taken(served_with, tmp_path):
    config = (
        '{"model": "draft", "method": "dflash", "num_speculative_tokens": 5, "revision": "v2", "draft_sample_method": "greedy"}'
    )
    seen = served_with(
        "target",
        "--speculative-config",
        config,
        "--port",
        9000,
        "--max-model-len",
        512,
        "--max-num-seqs",
        4,
        "--api-key",
        "k",
        "--served-model-name",
        "mine",
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
        "--reasoning-parser",
        "qwen3",
        "--tool-call-parser",
        "hermes",
        "--enable-auto-tool-choice",
        "--generation-config",
        "vllm",
        "--limit-mm-per-prompt",
        '{"image": 0}',
        "--seed",
        3,
        "--dtype",
        "float32",
        "--gpu-memory-utilization",
        0.5,
        "--max-num-batched-tokens",
        64,
    )
    assert seen["args"] == ("target", "draft")
    assert seen["given"] == {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "gpu_memory_utilization": 0.5,
        "draft_revision": "v2",
        "num_speculative_tokens": 5,
        "proposal_noise": 0.0,
    }
    options = seen["options"]
    assert (options.names, options.keys, options.seed) == (("mine",), ("k",), 3)
    assert (options.chat_template_kwargs, options.generation_config) == ({"enable_thinking": False}, "vllm")
    assert seen["place"] == {"host": "127.0.0.1", "port": 9000, "log_level": "info"}
    assert served_with()["args"] == (None, None)
    assert served_with("t", "--no-draft")["args"] == ("t", False)


def test_options_from_a_file_and_keys_from_file_and_environment(served_with, tmp_path, monkeypatch):
    (tmp_path / "c.yaml").write_text(
        "model: target\nport: 7000\nmax-num-seqs: 3\nenable-auto-tool-choice: true\n"
        "speculative-config: {model: d}\napi-key: [a, b]\n"
    )
    (tmp_path / "keys").write_text("c\nd\n")
    monkeypatch.setattr(cli_serve, "KEYS", ("MY_KEY",))
    monkeypatch.setenv("MY_KEY", "e")
    seen = served_with("--config", tmp_path / "c.yaml", "--port", 7001, "--api-key-file", tmp_path / "keys")
    assert seen["args"] == ("target", "d")
    assert (seen["place"]["port"], seen["given"]["max_num_seqs"]) == (7001, 3)
    assert seen["options"].keys == ("a", "b", "c", "d", "e")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size is an option of vLLM that is not taken here: .*one GPU"),
        (["--trust-remote-code"], "never run"),
        (["--speculative-config", "{"], "not valid JSON"),
        (["--speculative-config", '{"modle": "x"}'], "no key 'modle'"),
        (["--speculative-config", '{"method": "eagle"}'], "method 'eagle'"),
        (["--speculative-config", '{"draft_sample_method": "beam"}'], "must be greedy or probabilistic"),
        (["--speculative-config", '{"draft_sample_method": "probabilistic"}', "--engine", "vllm"], "must be greedy$"),
        (["--speculative-config", '{"num_speculative_tokens": "7"}'], "whole number"),
        (["--speculative-config", '{"model": "x"}', "--draft", "y"], "leave out --draft"),
        (["--default-chat-template-kwargs", "[]"], "must be a JSON object"),
        (["--limit-mm-per-prompt", '{"video": 2}'], "image and audio are taken here, not video"),
        (["--limit-mm-per-prompt", '{"image": "2"}'], "must give image a whole number"),
        (["--log-level", "loud"], "must be one of"),
        (["--generation-config", "x"], "must be one of"),
        (["--api-key-file", "nowhere"], "cannot be read"),
        (["--api-key", ""], "API key is empty"),
        (["--config", "nowhere"], "cannot be read as YAML"),
        (["--chat-template", "nowhere"], "cannot be read"),
        (["--draft", "a", "--no-draft"], "contradict"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(flashdraft, arguments, message):
    code, _, error = flashdraft("serve", *arguments)
    assert code == 2
    assert re.search(message, error)
    assert "Traceback" not in error


def test_a_missing_extra_is_named(flashdraft, monkeypatch):
    for name in [m for m in sys.modules if m.startswith("flashdraft.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    code, _, error = flashdraft("serve")
    assert (code, "pip install 'flashdraft[serve]'" in error) == (2, True)


def test_serve_answers_and_ends_on_sigterm(tmp_path):
    pair = saved_pair(tmp_path)
    command = [sys.executable, "-m", "flashdraft", "serve", str(pair.target), "--draft", str(pair.draft), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    few = ["sh", "-c", 'ulimit -S -n 100 && exec "$@"', "sh"]  # files, fewer than there will be connections
    command = [*few, *command, "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)  # whatever the test finds, no server is left
        assert process.stderr is not None
        stack.enter_context(process.stderr)
        url = ""
        for line in process.stderr:
            if found := re.search(r"listening on (http://\S+),", line):
                url = found[1]
            if " ready: " in line:
                break
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        with contextlib.ExitStack() as idle:
            for _ in range(150):
                idle.enter_context(socket.create_connection(address))
            body = {"prompt": "the", "max_tokens": 3, "ignore_eos": True}
            reply = httpx.post(f"{url}/v1/completions", json=body, trust_env=False)
        assert reply.json()["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert (process.wait(20), "Traceback" in rest) == (0, False)


def test_a_target_that_is_not_there_ends_serve_with_one_sentence(flashdraft, tmp_path):
    code, _, error = flashdraft("serve", tmp_path / "nowhere", "--port", 0)
    assert code == 2
    assert "no such directory" in error
    assert "Traceback" not in error


def test_chat_with_a_server(llm, flashdraft, monkeypatch):
    lines = iter(["hello", "again", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with scripted(llm) as client:
        client.runner.script = [*llm.tokenizer.encode("<think>why</think>the quick fox"), 1]
        code, out, error = flashdraft("chat", "--endpoint", client.url, "--max-tokens", 50)
    assert code == 0, error
    assert out.count("why") == out.count("the quick fox") == 2
    assert re.search(r"\d+ tokens, acceptance length \d", out)
    assert "tiny at http" in error
    code, _, error = flashdraft("chat", "--endpoint", client.url)
    assert (code, "does not answer" in error) == (2, True)
    assert flashdraft("chat", "--endpoint", client.url, "--no-draft")[0] == 2


def test_the_key_of_the_environment_is_sent(llm, flashdraft, monkeypatch):
    lines = iter(["hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    with scripted(llm, keys=("k",)) as client:
        assert "needed" in flashdraft("chat", "--endpoint", client.url)[2]
        monkeypatch.setenv("FLASHDRAFT_API_KEY", "k")
        client.runner.script = [*llm.tokenizer.encode("fox"), 1]
        assert "fox" in flashdraft("chat", "--endpoint", client.url)[1]


def test_speculative_options_are_checked_by_themselves():
    assert cli_serve.speculative_options(json.dumps({"model": "d"}), None, False)["model"] == "d"
    assert cli_serve.speculative_options(None, "x", False)["model"] == "x"
    with pytest.raises(ConfigError):
        cli_serve.speculative_options("5", None, False)
