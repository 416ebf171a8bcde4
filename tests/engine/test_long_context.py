"""Long prompts of a small random Gemma 4: what sliding layers and the draft hold, what a request takes, who waits for whom."""

from __future__ import annotations

import pytest
import torch
from families import VOCAB, make
from gemma4_e4b import E4B, planned
from pairs import request, run, small_engine, tiny_draft
from transformers import Gemma4TextConfig

from flashdraft.engine.cache import shapes_of
from flashdraft.engine.engine import Engine
from flashdraft.engine.memory import GIB, request_bytes
from flashdraft.targets.shapes import layer_specs_of
from flashdraft.targets.target import Target

POSITIONS, CHUNK, PAGE = 8192 + 64, 256, 16
WINDOW, DRAFT_WINDOW = 24, 64


@pytest.fixture(scope="module")
def target():
    return Target(make("gemma4", max_position_embeddings=POSITIONS), check=False)


@pytest.fixture(scope="module")
def draft(target):
    config = tiny_draft(target).config.with_(max_position_embeddings=POSITIONS, windows=(DRAFT_WINDOW,) * 2)
    return type(tiny_draft(target))(config).requires_grad_(False)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


def engine_of(target, draft, **options) -> Engine:
    defaults = dict(max_model_len=POSITIONS, max_num_batched_tokens=CHUNK, kv_cache_memory_bytes=64 << 20)
    return small_engine(target, draft, **{**defaults, "enable_prefix_caching": False, **options})


def bytes_of(target, draft, tokens: int, lookahead: int = CHUNK) -> int:
    shapes = shapes_of(layer_specs_of(target.config), draft.config)
    return request_bytes(shapes, target.dtype, tokens + draft.config.block_size, lookahead)


def watched(engine: Engine, look) -> list:
    """What `look` gives when a step has its pages, and the batch it is."""
    seen, schedule = [], engine.scheduler.schedule

    def watching(*arguments, **options):
        batch = schedule(*arguments, **options)
        if batch is not None and not batch.empty:
            seen.append((look(), batch))
        return batch

    engine.scheduler.schedule = watching
    return seen


def held(engine: Engine) -> dict[tuple[int | None, bool], int]:
    """Pages by group of the one sequence that runs."""
    [sequence] = engine.scheduler.running
    pages = [sum(page is not None for page in own.pages) for own in sequence.held]
    return {(g.shape.window, g.shape.draft): n for g, n in zip(engine.pool.groups, pages, strict=True)}


def test_sliding_layers_and_the_draft_hold_their_windows_of_a_long_prompt(target, draft, steps):
    length, chunk = (330, 64) if steps else (6000, CHUNK)  # on a CPU, steps from state on the device are slow
    engine = engine_of(target, draft, max_num_batched_tokens=chunk)
    seen = watched(engine, lambda: held(engine))
    [output] = run(engine, [request(prompt(length), max_tokens=24)])
    assert len(output.tokens) == 24
    ahead = 2 if steps else 1  # the next step has its pages before this one has ended
    for window, is_draft in ((WINDOW, False), (DRAFT_WINDOW, True)):
        most = [pages[window, is_draft] for pages, _ in seen]
        assert max(most) <= -(-(window + ahead * chunk) // PAGE) + 1
        assert most[-1] <= -(-(window + ahead * 16) // PAGE) + 1  # decoding
    assert max(pages[None, False] for pages, _ in seen) >= -(-length // PAGE)
    [alone] = run(engine_of(target, None, max_num_batched_tokens=chunk), [request(prompt(length), max_tokens=24)])
    assert output.tokens == alone.tokens


def test_what_a_request_takes_is_what_its_shapes_say(target, draft, steps):
    """Never more, and less by a page of a windowed group and by the last block at most."""
    length, tokens, chunk = (512, 16, 64) if steps else (4096, 16, CHUNK)
    engine = engine_of(target, draft, max_num_batched_tokens=chunk)
    pool = engine.pool
    seen = watched(engine, lambda: (pool.num_units - pool.available_units) * pool.unit_bytes)
    run(engine, [request(prompt(length), max_tokens=tokens)])
    most = max(taken for taken, batch in seen if batch.prefill)
    said = bytes_of(target, draft, length + tokens, 2 * chunk if steps else chunk)
    slabs = {group.shape.window: group.slabs for group in pool.groups}
    spare = slabs[WINDOW] + slabs[DRAFT_WINDOW] + 2 * slabs[None]  # the answer and its last block: two pages of full layers
    assert said - spare * pool.unit_bytes <= most <= said
    assert max(taken for taken, _ in seen) <= said


def test_a_long_request_runs_beside_fifteen_short_ones_in_the_memory_that_was_predicted(target, draft):
    long, short = 8192, 96
    memory = bytes_of(target, draft, long + 16) + 15 * bytes_of(target, draft, short + 24)
    engine = engine_of(target, draft, kv_cache_memory_bytes=memory, max_num_seqs=16)
    outputs = [engine.add(request(prompt(short, seed), max_tokens=24)) for seed in range(1, 16)]
    outputs.append(engine.add(request(prompt(long), max_tokens=16)))
    together = 0
    while engine.has_work:
        engine.step()
        together = max(together, len(engine.scheduler.running))
    assert together == 16
    assert [o.preemptions for o in outputs] == [0] * 16
    assert [len(o.tokens) for o in outputs] == [24] * 15 + [16]


def test_a_long_prompt_makes_no_running_request_wait(target, draft, steps):
    """Each of its chunks goes beside one verify step of every running request, and the steps between are as many as chunks."""
    length, chunk = (500, 64) if steps else (4000, CHUNK)
    engine = engine_of(target, draft, max_num_seqs=8, max_num_batched_tokens=chunk)
    running = [engine.add(request(prompt(40, seed), max_tokens=200)) for seed in range(4)]
    while not all(len(output.tokens) > 2 for output in running):
        engine.step()
    seen, batches = [len(output.committed_per_step) for output in running], watched(engine, lambda: None)
    late = engine.add(request(prompt(length, 9), max_tokens=4))
    while not late.tokens:
        engine.step()
    chunks = [batch for _, batch in batches if batch.prefill]
    assert len(chunks) == -(-length // chunk)
    for batch in chunks:
        assert len(batch.verify) == 4
        assert sum(part.count for part in batch.prefill) <= chunk
    gained = [len(output.committed_per_step) - n for output, n in zip(running, seen, strict=True)]
    assert min(gained) >= len(chunks) - 1  # with steps ahead the last one's tokens are still on their way


def test_the_full_shapes_request_of_131072_tokens():
    shapes = shapes_of(layer_specs_of(Gemma4TextConfig(**E4B)), planned())
    assert [sum(s.window == w for s in shapes) for w in (None, 512, 1024)] == [4, 20, 5]
    # Units of 262,144 bytes: a page of the 4 full layers, of 8 sliding ones (of 20: 3 units), of 4 of the draft's 5 (2 units).
    unit, block, ahead = 16 * 4 * 2 * (512 + 512) * 2, 8, 2 * 2048
    full, sliding, drafts = (-(-tokens // 16) for tokens in (131_072 + block, 512 + ahead + 16, 1024 + ahead + 16))
    assert (full, sliding, drafts) == (8193, 289, 321)
    whole = request_bytes(shapes, torch.bfloat16, 131_072 + block)
    assert whole == (full + 3 * sliding + 2 * drafts) * unit == 2_543_321_088
    short = request_bytes(shapes, torch.bfloat16, 2048 + block)
    assert short == 129 * (1 + 3 + 2) * unit
    assert (whole + 15 * short) / GIB == pytest.approx(5.2, abs=0.01)
