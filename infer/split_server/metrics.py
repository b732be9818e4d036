"""The server's metrics in Prometheus text format; draft metrics have vLLM's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


class ServerMetrics:
    """Counters, gauges and histograms of one server, in its own registry."""

    def __init__(self) -> None:
        own = {"registry": CollectorRegistry()}
        self._registry = own["registry"]
        self.drafts = Counter("spec_decode_num_drafts", "Drafts verified", **own)
        self.draft_tokens = Counter("spec_decode_num_draft_tokens", "Tokens drafted", **own)
        self.accepted = Counter("spec_decode_num_accepted_tokens", "Drafted and accepted", **own)
        self.accepted_at = Counter(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted, by depth", ["position"], **own
        )
        self.committed = Counter("generated_tokens", "Tokens that the target chose", **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts and replays read", **own)
        self.clients = Gauge("split_clients", "Open connections", **own)
        self.sessions = Gauge("split_sessions", "Sessions, connected or not", **own)
        self.slots_used = Gauge("split_slots_in_use", "Slots taken", **own)
        self.slots = Gauge("split_slots", "Slots in all", **own)
        self.queue = Gauge("split_queue", "Clients that wait for a slot", **own)
        self.bytes_up = Counter("split_bytes_up", "Bytes of messages from clients", **own)
        self.bytes_down = Counter("split_bytes_down", "Bytes of messages to clients", **own)
        self.batch = Histogram(
            "split_batch_size", "Drafts in one target pass", buckets=BATCHES, **own
        )
        self.verify_seconds = Histogram(
            "split_verify_seconds", "Seconds of one target pass", buckets=SECONDS, **own
        )
        self.read_seconds = Histogram(
            "split_read_seconds", "Seconds of one chunk of a prompt", buckets=SECONDS, **own
        )
        self.faults = Counter("split_faults", "Refusals sent, by code", ["code"], **own)
        self.refused = Counter("split_refused_connections", "By HTTP status", ["status"], **own)
        self.failures = Counter("split_failures", "Exceptions of the server itself", **own)

    def count_draft(self, drafted: int, accepted: int, committed: int) -> None:
        """Counts one verification; `drafted` = 0 is a plain decoding step."""
        self.drafts.inc(bool(drafted))
        self.draft_tokens.inc(drafted)
        self.accepted.inc(accepted)
        self.committed.inc(committed)
        for position in range(accepted):
            self.accepted_at.labels(str(position)).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus text format."""
        return generate_latest(self._registry)
