"""What a GPU is refused for, and how its memory is shared out, with the figures of a GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from flashdraft.engine import memory
from flashdraft.engine.cache import KVShape
from flashdraft.engine.engine import EngineConfig
from flashdraft.engine.memory import GIB, measure, refuse_heads, refuse_old, saying_what_is_full
from flashdraft.errors import ConfigError, UnsupportedModelError

GPU = torch.device("cuda")


class Gpu:
    """A GPU of 80 GiB with 10 in the models, 2 kept by an earlier engine's graphs, and 4 that are not this process's."""

    total, others, allocated, kept, step = 80 * GIB, 4 * GIB, 10 * GIB, 2 * GIB, 3 * GIB

    def __init__(self, monkeypatch):
        self.rehearsed = False
        for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, lambda *device: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.allocated + self.kept)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.allocated + self.step * self.rehearsed)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (self.free, self.total))

    @property
    def free(self):
        return self.total - self.others - self.allocated - self.kept

    def rehearse(self):
        self.rehearsed = True


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_pages_get_what_models_steps_graphs_and_other_programs_leave(gpu):
    report = measure(GPU, gpu.rehearse, 0.75, GIB)
    assert report.pages == (60 - 4 - 10 - 2 - 2 * 3) * GIB
    assert str(report) == "80.0 GiB: models 12.00, KV cache 38.00, steps 6.00, other 4.00, free 20.00"


def test_two_engines_on_one_gpu_stay_within_its_share_together(gpu):
    first = measure(GPU, gpu.rehearse, 0.75, GIB, share=0.4)
    assert first.pages == int(0.4 * 38 * GIB)
    gpu.allocated += first.pages
    gpu.kept += 3 * GIB  # the first one's graphs
    second = measure(GPU, gpu.rehearse, 0.75, GIB)
    assert second.pages == (38 - 3) * GIB - first.pages
    assert second.others + second.models + second.step + second.pages == 60 * GIB


@pytest.mark.parametrize("options", [dict(utilization=0.2), dict(utilization=0.75, share=0.01)])
def test_too_little_memory_is_said_with_where_it_went(gpu, options):
    with pytest.raises(ConfigError, match=r"needs 1\.00 GiB of KV cache, and 0\..* GiB are left.*raise gpu_memory_utilization"):
        measure(GPU, gpu.rehearse, least=GIB, **options)


def test_a_full_gpu_is_one_sentence(gpu):
    with (
        pytest.raises(ConfigError, match=r"64\.00 GiB of 80\.0 are free, .*lower max_num_seqs") as refusal,
        saying_what_is_full(),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nGPU 0 has ...")
    assert "\n" not in str(refusal.value)


def test_more_than_the_memory_of_a_cpu_is_one_sentence():
    with pytest.raises(ConfigError, match="too little memory to load or start: lower max_num_seqs"), saying_what_is_full():
        torch.empty(1 << 52, dtype=torch.uint8)


def test_a_kernel_too_large_for_the_gpu_is_one_sentence_and_other_errors_stay():
    class OutOfResources(Exception):
        pass

    with (
        pytest.raises(UnsupportedModelError, match=r"needs more than this GPU has \(out of .* 101376\)"),
        saying_what_is_full(),
    ):
        raise OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376")
    with pytest.raises(ZeroDivisionError), saying_what_is_full():
        _ = 1 / 0


@pytest.fixture
def card(monkeypatch):
    """Makes the GPU one of a compute capability."""

    def make(major, minor, hip=None, triton=True):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(memory, "find_spec", lambda name: object() if triton else None)

    return make


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (dict(major=7, minor=5), r"compute capability 7\.5, and our kernels need 8\.0"),
        (dict(major=9, minor=0, hip="6.4"), "is no NVIDIA GPU"),
        (dict(major=9, minor=0, triton=False), "need the package triton"),
    ],
)
def test_a_gpu_that_the_kernels_do_not_run_on_is_refused_with_what_runs_there(card, kind, words):
    card(**kind)
    with pytest.raises(ConfigError, match=f"Some GPU.*{words}|{words}.*Some GPU|{words}") as refusal:
        EngineConfig().on(GPU)
    assert "async_scheduling=False" in str(refusal.value)
    assert "device='cpu'" in str(refusal.value)
    assert EngineConfig(async_scheduling=False).on(GPU).async_scheduling is False


def test_steps_run_ahead_where_the_target_is_on_a_gpu(card):
    card(8, 0)
    refuse_old(GPU)
    assert EngineConfig().on(GPU).async_scheduling is True
    assert EngineConfig(enforce_eager=True).on(GPU).enforce_eager
    assert EngineConfig().on(torch.device("cpu")).async_scheduling is False
    assert EngineConfig(async_scheduling=True).on(torch.device("cpu")).async_scheduling is True


@pytest.mark.parametrize("sizes", [(16, 16), (80, 80), (96, 64), (192, 128), (256, 256), (512, 512), (1024, 1024)])
def test_head_sizes_that_the_attention_kernel_has_a_tile_for_pass(sizes):
    refuse_heads([KVShape(2, *sizes, None)])


@pytest.mark.parametrize("sizes", [(8, 8), (576, 512), (2048, 2048), (512, 128)])
def test_head_sizes_that_it_has_none_for_are_refused(sizes):
    with pytest.raises(UnsupportedModelError, match=f"{sizes[0]} numbers for keys and {sizes[1]} for values.*device='cpu'"):
        refuse_heads([KVShape(2, 64, 64, None), KVShape(2, *sizes, None)])


@pytest.mark.parametrize("sizes", [(16, 16), (80, 80), (96, 64), (192, 128), (256, 256), (512, 512), (1024, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_tiles_of_sizes_that_pass_hold_a_power_of_two_of_keys(sizes, dtype):
    kernel = pytest.importorskip("flashdraft.kernels.paged_triton", exc_type=ImportError)
    keys = kernel.tile_shape(*sizes, 4, dtype, 99 * 1024)["BLOCK"]
    assert keys >= 16
    assert keys & (keys - 1) == 0
