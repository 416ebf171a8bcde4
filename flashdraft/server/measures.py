"""What requests measure, for /metrics: names of vLLM where it has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from flashdraft.server.service import Service

FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


class Measures:
    """Histograms and counters that are kept by the endpoints; what the engine counts is in stats.Stats."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"registry": self.registry}
        self.first_token = Histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", buckets=FIRST, **own)
        self.per_token = Histogram("vllm:inter_token_latency_seconds", "Mean time between tokens.", buckets=BETWEEN, **own)
        self.latency = Histogram("vllm:e2e_request_latency_seconds", "Arrival to end.", buckets=WHOLE, **own)
        self.prompt = Histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", buckets=LENGTHS, **own)
        self.answer = Histogram("vllm:request_generation_tokens", "Tokens of an answer.", buckets=LENGTHS, **own)
        self.prompt_tokens = Counter("vllm:prompt_tokens", "Prompt tokens.", **own)
        self.cache_queries = Counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", **own)
        self.cache_hits = Counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", **own)
        self.responses = Counter("flashdraft:http_responses", "Responses.", ["path", "status"], **own)
        self.speculation_off = Counter("flashdraft:speculation_off", "Requests that did not draft, and why.", ["reason"], **own)

    def serve(self, service: Service) -> None:
        """Add what the engine counts."""
        self.registry.register(_EngineCollector(service))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineCollector:
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        service = self._service
        s = service.loop.stats
        counters = {
            "vllm:spec_decode_num_drafts": ("Verify steps that drafted.", s.drafts),
            "vllm:spec_decode_num_draft_tokens": ("Proposals verified.", s.draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Committed tokens of those steps, less one each.", s.accepted),
            "vllm:generation_tokens": ("Committed tokens.", s.generated),
            "vllm:num_preemptions": ("Requests whose pages were taken for others.", s.preemptions),
            "flashdraft:committed_tokens": ("Tokens committed by verify steps.", s.committed),
            "flashdraft:discarded_tokens": ("Tokens chosen behind the end of their answer.", s.discarded),
            "flashdraft:engine_steps": ("Steps of the engine.", s.steps),
            "flashdraft:engine_step_seconds": ("Time in steps of the engine.", s.step_seconds),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value=value)
        width = max([*s.widths, 0])
        yield _labelled(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted proposals by position.",
            "position",
            {str(i): s.accepted_at[i] for i in range(max(width, service.loop.num_proposals))},
        )
        yield _labelled(
            "flashdraft:verify_width", "Verify steps by width.", "width", {str(w): n for w, n in sorted(s.widths.items())}
        )
        yield _labelled(
            "vllm:request_success", "Answers by how they ended.", "finished_reason", dict(sorted(s.finished.items()))
        )
        gauges = {
            "vllm:num_requests_running": ("Answers in the engine.", s.running),
            "vllm:num_requests_waiting": ("Answers that wait for a place.", service.loop.waiting),
            "vllm:kv_cache_usage_perc": (
                "Share of KV memory in use, 1 is all.",
                1 - s.pages_free / s.pages if s.pages else 0.0,
            ),
            "flashdraft:pages_free": ("Units of KV memory that are free or may be.", s.pages_free),
            "flashdraft:pages": ("Units of KV memory.", s.pages),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
