"""A pair for `benchmarks/serve.py --stand-in`: a GPU that only takes time, with all of the engine's host side around it.

    python benchmarks/standin.py --port 8000 --engine-process --slower 4

The built-in target's tokenizer, tiny random weights that are never used, the engine with async scheduling as on a GPU: batches
are scheduled, planned and uploaded, and no stage computes. A step takes 1 ms for 1 stream, 1.5 ms for 16 and 5 ms for 64, one
behind the other, without the GIL, or `--slower` times as long, where the cores are slower than beside a GPU; it commits 1 to 4
tokens, 2.5 in the mean, as a draft would give.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from flashdraft import LLM, builtin
from flashdraft.draft import DFlashConfig, DFlashDraft
from flashdraft.engine.device_runner import DeviceFlight, DeviceRunner, Stage
from flashdraft.engine.engine import Engine, EngineConfig
from flashdraft.engine.scheduler import Batch, Flight, Result
from flashdraft.server.service import ServerOptions
from flashdraft.server.serving import serve
from flashdraft.targets import load_tokenizer
from flashdraft.targets.target import Target

STREAMS, SECONDS = (1, 16, 64), (0.001, 0.0015, 0.005)
VARIANTS = 64  # of what steps commit, made beforehand as the GPU's work is not the host's


class StandIn(DeviceRunner):
    """Launches nothing, and says what came of it once the time is over."""

    def __init__(self, slower: float, *args: Any) -> None:
        super().__init__(*args)
        self._seconds = [slower * seconds for seconds in SECONDS]
        draw = torch.Generator().manual_seed(0)
        shape = (VARIANTS, *self._outcome.shape)
        self._outcomes = torch.randint(1000, 20000, shape, generator=draw, dtype=torch.int32)
        self._outcomes[:, :, 0] = torch.randint(1, 5, shape[:2], generator=draw)
        self._outcomes[:, -self.limits.max_prefills :, 0] = 1
        self._free, self._steps = 0.0, 0  # when the GPU has done all that was launched

    def _run(self, key: Stage) -> None:
        pass

    def _launch(self, batch: Batch) -> DeviceFlight:
        flight = super()._launch(batch)
        self._steps += 1
        flight.outcome.copy_(self._outcomes[self._steps % VARIANTS])
        for i, row in enumerate(batch.verify):
            if row.width < 4:
                flight.outcome[i, 0].clamp_(max=row.width + 1)
        streams = len(batch.verify) + len(batch.prefill)
        self._free = max(time.perf_counter(), self._free) + float(np.interp(streams, STREAMS, self._seconds))
        flight.free = self._free  # type: ignore[attr-defined]
        return flight

    def collect(self, flight: Flight) -> Result:
        time.sleep(max(0.0, flight.free - time.perf_counter()))  # type: ignore[attr-defined]
        return super().collect(flight)


def load(slower: float) -> LLM:
    tokenizer = load_tokenizer(builtin.target_path())
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16)
    sizes |= dict(vocab_size=len(tokenizer), max_position_embeddings=2048)
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, eos_token_id=2, bos_token_id=1, pad_token_id=2, **sizes))
    own = dict(
        num_hidden_layers=1, num_target_layers=2, target_layer_ids=(0, 1), mask_token_id=3, windows=(16,), causal=(False,)
    )
    config = EngineConfig(async_scheduling=True, max_num_seqs=64, max_num_batched_tokens=2048)
    engine = Engine(Target(model, check=False), DFlashDraft(DFlashConfig(**sizes, **own)), config)
    engine.runner = StandIn(slower, engine.target, engine.draft, engine.pool, engine.runner.limits)  # type: ignore[union-attr]
    return LLM.from_parts(tokenizer, engine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--engine-process", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--slower", type=float, default=1.0)
    args = parser.parse_args()
    options = ServerOptions(names=("stand-in",), engine_process=args.engine_process)
    serve(partial(load, args.slower), options, host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
