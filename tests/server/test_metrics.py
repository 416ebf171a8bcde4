"""What /metrics and the log tell."""

from __future__ import annotations

import logging

import pytest
from scripted import HELLO, scripted

from flashdraft.server.logs import LogFormatter


def test_counters_of_speculation_count_what_was_committed(llm):
    with scripted(llm) as client:
        client.runner.script, client.runner.accepted = [20] * 11 + [1], 3
        answer = client.chat(max_tokens=50)  # 1 + 4 + 4 + 3, the last block ends with the stop
        own, names = answer["metrics"]["speculative_decoding"], "vllm:spec_decode_num_"
        client.wait_idle()
        assert own["per_step_accepted"] == [3, 3, 2]
        assert client.metric(f"{names}drafts_total") == own["num_spec_steps"] == 3
        assert client.metric(f"{names}draft_tokens_total") == own["num_draft_tokens"] == 21
        assert client.metric(f"{names}accepted_tokens_total") == own["num_accepted_draft_tokens"] == 8
        by_position = [client.metric(f'{names}accepted_tokens_per_pos_total{{position="{i}"}}') for i in range(7)]
        assert by_position == [3, 3, 2, 0, 0, 0, 0]
        client.chat(max_tokens=5, speculation={"enabled": False})
        client.wait_idle()
        assert client.metric(f"{names}drafts_total") == 3
        assert client.metric("vllm:generation_tokens_total") == 17
        assert client.metric("flashdraft:committed_tokens_total") == 15
        assert client.metric('flashdraft:verify_width_total{width="0"}') == 4
        assert client.metric('vllm:request_success_total{finished_reason="stop"}') == 1
        assert client.metric('flashdraft:speculation_off_total{reason="request"}') == 1
        for name in ("time_to_first_token", "e2e_request_latency", "inter_token_latency"):
            assert client.metric(f"vllm:{name}_seconds_count") == 2
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting"):
            assert client.metric(gauge) == 0
        assert client.metric("flashdraft:pages") == client.metric("flashdraft:pages_free") > 0


def test_a_draft_that_does_not_help_is_told_once(llm, caplog):
    with scripted(llm) as client, caplog.at_level(logging.WARNING):
        client.runner.script, client.runner.accepted = [20] * 300, 0
        for _ in range(6):
            client.complete(max_tokens=200, prompt="a", ignore_eos=True)
    told = [r.getMessage() for r in caplog.records if "flashdraft doctor" in r.getMessage()]
    assert len(told) == 1
    assert told[0].startswith("acceptance length 1.00")


@pytest.mark.parametrize("log_requests", [False, True])
def test_the_log_has_request_ids_and_texts_only_if_asked(llm, caplog, log_requests):
    with scripted(llm, log_requests=log_requests) as client, caplog.at_level(logging.INFO, "flashdraft"):
        client.http.post("/v1/chat/completions", json={"messages": HELLO}, headers={"X-Request-Id": "mine"})
        client.chat(chat_template_kwargs={"no_such_switch": True})
        client.chat(chat_template_kwargs={"no_such_switch": True})
    lines = [LogFormatter().format(record) for record in caplog.records]
    assert any("request_id=mine" in line and "status=200" in line for line in lines)
    assert any("quick brown" in line for line in lines) is log_requests
    assert sum("does not know no_such_switch" in line for line in lines) == 1


def test_a_log_line_stays_one_line():
    record = logging.LogRecord("a", logging.INFO, "", 0, "one\ntwo\x1b[31m", None, None)
    assert "\n" not in LogFormatter().format(record)
    assert "\x1b" not in LogFormatter().format(record)
