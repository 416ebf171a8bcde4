"""`flashdraft doctor` on the built-in pair, whose neighbouring layers are so alike that a shift costs it 6 % of its AL."""

from __future__ import annotations

import json
import shutil

import pytest
from trained import rewrite, unstamp

from flashdraft import builtin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200), pytest.mark.usefixtures("no_gpu")]


def shifted(raw):
    raw["dflash_config"]["target_layer_ids"] = [2, 11, 19, 28]


def causal_and_turned(raw):
    raw["is_causal"] = raw["dflash_config"]["causal"] = True
    raw["rope_theta"] = 1e4


@pytest.mark.parametrize(
    ("plant", "mends"),
    [
        (shifted, {"dflash_config.target_layer_ids to [1, 10, 18, 27]"}),
        (causal_and_turned, {"is_causal to false", "dflash_config.causal to false", "rope_theta to 1000000.0"}),
    ],
)
def test_what_is_planted_in_the_built_in_draft_is_found(flashdraft, tmp_path, plant, mends):
    draft, report = tmp_path / "draft", tmp_path / "report.json"
    shutil.copytree(builtin.draft_path(), draft)
    unstamp(draft)
    rewrite(draft / "config.json", plant)
    code, out, _ = flashdraft("doctor", "builtin", draft, "--json", report)
    assert code == 1
    lines = [line for finding in json.loads(report.read_text())["findings"] for line in finding["mend"]]
    assert {line.partition(" set ")[2] for line in lines} == mends, out
