"""What a run was: run.json, compared before it is resumed, and training.json, which goes with the draft."""

from __future__ import annotations

import io
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from flashdraft import __version__, builtin
from flashdraft.draft import count_parameters
from flashdraft.errors import CheckpointError, ConfigError
from flashdraft.targets.load import adapter_hash
from flashdraft.train.files import read_object, write_whole
from flashdraft.train.identity import tokenizer_hash
from flashdraft.train.prepare import TRAINED_ON, Job
from flashdraft.train.trainer import Trainer

# Of a run these may change: its length (the schedule follows it), how often it reports and saves, how it is computed.
FREE = {"steps", "max_seconds", "log_every", "save_seconds", "evaluations", "compile"}

SECTIONS = ("target", "data", "draft", "train", "seed")  # of run.json


def settings(job: Job) -> dict[str, Any]:
    """What makes a run what it is, as JSON holds it."""
    config = {name: value for name, value in asdict(job.plan.config).items() if name not in FREE}
    found = {
        "target": {"hash": job.target_hash},
        "data": {"hash": job.data_digest, "trained_on": job.split.train.digest()},
        "draft": asdict(job.draft.config) | {"init": job.options.init},
        "train": config | {"rows": job.plan.rows, "seq_length": job.plan.seq_length, "anchors": job.plan.anchors},
        "seed": {"seed": job.plan.seed},
    }
    assert found.keys() == set(SECTIONS)
    return json.loads(json.dumps(found))


def _begun_with(path: Path) -> dict[str, dict[str, Any]]:
    found = read_object(path)
    if found is None or not all(isinstance(found.get(section), dict) for section in SECTIONS):
        raise CheckpointError(
            f"{path} is missing or damaged, so that nobody knows what the run was begun with: choose another --output"
        )
    return found


def remember(job: Job, run: Path) -> None:
    """Keep the settings in run.json. Raises ConfigError, with what differs, for a run that was begun with others."""
    now, path = settings(job), run / "run.json"
    if (run / "state.pt").exists():
        before = _begun_with(path)
        changed = [
            f"{section} {name}"
            for section, values in now.items()
            for name, value in values.items()
            if before[section].get(name) != value
        ]
        if changed:
            raise ConfigError(
                f"{run} was begun with other settings ({', '.join(changed)}): resume with the same ones, or choose another "
                "--output"
            )
    run.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(now, indent=1))


def write_provenance(job: Job, trainer: Trainer, heldout: dict[str, Any] | None) -> None:
    """training.json and the hashes of the prompts trained on, beside the draft: here, or before in the draft to start from."""
    batches, plan, train = trainer.batches, job.plan, job.split.train
    hashes = np.unique(train.prompt_hashes)
    updates = trainer.step * batches.rows_per_batch * batches.seq_length
    figures = {
        "target": job.options.target or builtin.NAME,
        "target_revision": job.options.revision,
        "target_hash": job.target_hash,
        "lora": None if job.options.lora is None else {"name": job.options.lora, "hash": adapter_hash(job.options.lora)},
        "tokenizer_hash": tokenizer_hash(job.tokenizer),
        "draft_parameters": count_parameters(job.draft)["all"],
        "started_from": job.options.init,
        "data": {
            "hash": job.data_digest,
            "records": len(job.everything),
            "records_trained_on": len(train),
            "prompts_trained_on": len(hashes),
            "prompts_trained_on_before": len(job.seen),  # by the draft it started from
            "answer_tokens": train.answer_tokens,
            "tokens_with_prompts": len(train.tokens),
            "notes": job.notes,
        },
        "training": {
            "steps": trainer.step,
            "epochs": round(trainer.step / batches.steps_per_epoch, 3),
            "seconds": round(trainer.elapsed, 1),
            "context_tokens_seen": round(updates * len(train.tokens) / (len(batches.rows) * batches.seq_length)),
            "features": job.options.features,
            "processes": trainer.world.size,
            "rows": plan.rows,
            "micro_rows": plan.micro_rows,
            "seq_length": plan.seq_length,
            "anchors": plan.anchors,
            "seed": plan.seed,
            "config": asdict(plan.config),
            "recipe": job.recipe.to_json(),
        },
        "heldout": heldout,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
        "versions": {"flashdraft": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "command": shlex.join(["flashdraft", *sys.argv[1:]]),
    }
    content = json.dumps(figures, indent=1, ensure_ascii=False) + "\n"
    write_whole(job.options.output / "training.json", content)
    trained_on = io.BytesIO()
    np.save(trained_on, np.union1d(hashes, job.seen))
    write_whole(job.options.output / TRAINED_ON, trained_on.getvalue())
