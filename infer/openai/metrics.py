"""The server's metrics in Prometheus' text format, under vLLM's names if vLLM has the metric."""

from __future__ import annotations

import math
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moa_jax.config import DraftShape
from moa_jax.engine import Engine, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT = (0.0005, *SECONDS[:11])
TOKENS = tuple(2**power for power in range(17))
LONGEST_WAIT = 60  # seconds; the largest Retry-After


class ServingMetrics:
    """The metrics of one server, in a separate registry."""

    def __init__(self, model: str, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._names, self._values = ("model_name", "engine"), (model, "0")
        self._registry.register(_EngineCollector(engine, self._names, self._values))
        self.first_token = self._histogram("time_to_first_token_seconds", SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", SHORT)
        self._latency = self._histogram("e2e_request_latency_seconds", SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", TOKENS)
        self._generated = self._histogram("request_generation_tokens", TOKENS)
        self._ended = Counter(
            "vllm:request_success",
            "Choices that ended, by reason",
            [*self._names, "finished_reason"],
            registry=self._registry,
        )
        self._tokens = self._counter("vllm:generation_tokens", "Tokens of answers, as sent")
        self._replies = Counter(
            "moa:http_replies", "Replies by status", ["status"], registry=self._registry
        )
        self._mean_seconds = 1.0  # of recent requests, a moving average

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        text = name.replace("_", " ")
        own = {"registry": self._registry, "buckets": buckets}
        return Histogram(f"vllm:{name}", text, self._names, **own).labels(*self._values)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, self._names, registry=self._registry).labels(*self._values)

    def gave(self, count: int) -> None:
        """Counts tokens of an answer, up to the end of its stop string."""
        self._tokens.inc(count)

    def took(self, seconds: float, count: int) -> None:
        """Records `count` tokens of one delta, `seconds` after the previous delta."""
        for _ in range(count):
            self._between.observe(seconds / count)

    def ended(self, seconds: float, prompt: int, generated: list[tuple[str, int]]) -> None:
        """Records a request: its seconds, prompt tokens, and (reason, tokens) per choice."""
        self._latency.observe(seconds)
        self._prompt.observe(prompt)
        self._mean_seconds += (seconds - self._mean_seconds) / 16
        for reason, tokens in generated:
            self._ended.labels(*self._values, reason).inc()
            self._generated.observe(tokens)

    def replied(self, status: int) -> None:
        """Counts a reply by status."""
        self._replies.labels(str(status)).inc()

    def seconds_until_room(self, stats: EngineStats) -> int:
        """The Retry-After of a full queue: the time until about half of the queue is served."""
        seconds = self._mean_seconds * max(stats.waiting, 1) / max(stats.slots, 1) / 2
        return min(max(math.ceil(seconds), 1), LONGEST_WAIT)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector:
    """Reads the engine's counters at each scrape."""

    def __init__(self, engine: Engine, names: tuple[str, ...], values: tuple[str, ...]) -> None:
        self._engine, self._names, self._values = engine, names, values

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        yield self._gauge("vllm:num_requests_running", "Being read or decoded", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Not begun", stats.waiting)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of cache rows in use", stats.cache_usage
        )
        yield self._gauge("moa:kept_prefix_bytes", "Bytes of the prefix cache", stats.kept_bytes)
        yield self._gauge("moa:slots", "Requests decoded at once at most", stats.slots)
        whole = {
            "vllm:num_preemptions": ("Requests put back, which never happens", 0),
            "vllm:prompt_tokens": ("Tokens of prompts", stats.prompt_tokens),
            "vllm:prefix_cache_queries": (
                "Tokens of prompts looked up",
                stats.prefix_lookup_tokens,
            ),
            "vllm:prefix_cache_hits": ("Tokens of prompts copied", stats.prefix_tokens),
            "vllm:spec_decode_num_drafts": ("Drafts verified", stats.drafts),
            "vllm:spec_decode_num_draft_tokens": ("Tokens drafted", stats.drafted_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Drafts accepted", stats.accepted_tokens),
            "moa:decoded_tokens": ("Tokens decoded, past stop texts, too", stats.generated_tokens),
            "moa:engine_failures": ("Passes that failed", stats.failures),
            "moa:programs": ("Programs compiled or loaded", stats.programs),
        }
        for name, (text, value) in whole.items():
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, value)
            yield counter
        yield self._by(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "position",
            {str(i): count for i, count in enumerate(stats.accepted_by_position)},
        )
        rounds = {_named(shape): count for shape, count in stats.rounds_by_shape.items()}
        yield self._by("moa:rounds", "way", rounds)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=self._names)
        gauge.add_metric(self._values, value)
        return gauge

    def _by(self, name: str, label: str, values: dict[str, int]) -> Metric:
        counter = CounterMetricFamily(name, f"By {label}", labels=[*self._names, label])
        for key, value in values.items():
            counter.add_metric([*self._values, key], value)
        return counter


def _named(shape: DraftShape) -> str:
    """A draft shape as a label: `plain`, `chain DEPTH` or `tree DEPTH/DRAFTED`."""
    if not shape.num_drafted:
        return "plain"
    if shape.is_chain:
        return f"chain {shape.depth}"
    return f"tree {shape.depth}/{shape.num_drafted}"
