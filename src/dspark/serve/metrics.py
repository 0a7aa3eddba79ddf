"""Prometheus metrics: requests and latencies counted here, the engine's own numbers read when they are asked for.

The names are those that dashboards of the field read, with the prefix `dspark:` or, by option, `vllm:`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from dspark.engine.async_engine import EngineStatus
from dspark.engine.core import RUNNING

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 200_000, 1_000_000)
STATES = ("ready", "degraded", "draining", "dead")


class Metrics:
    """The metrics of one app.

    Args:
        prefix: "dspark" or "vllm".
        model_name: value of the label `model_name`.
        status: the engine's numbers of this moment.
    """

    def __init__(self, prefix: str, model_name: str, status: Callable[[], EngineStatus]) -> None:
        self._registry = CollectorRegistry()
        self._prefix = prefix
        self._model_name = model_name
        self._first_token = self._histogram("time_to_first_token_seconds", "From the request to its first token.")
        self._between = self._histogram(
            "inter_token_latency_seconds", "Time between tokens; those of one round share the time since the last one."
        )
        self._end_to_end = self._histogram("e2e_request_latency_seconds", "From the request to its last token.")
        self._prompt_size = self._histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._output_size = self._histogram("request_generation_tokens", "Tokens of an output.", _TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that began to answer.")
        self._output_tokens = self._counter("generation_tokens", "Emitted tokens.")
        self._success = self._counter("request_success", "Samples that came to their end.", "finished_reason")
        self._aborted = self._counter("request_aborted", "Samples that were ended before.", "reason")
        self._http = self._counter("http_requests", "Answered HTTP requests.", "method", "path", "status")
        for reason in ("stop", "length"):
            self._success.labels(model_name, reason)
        self._registry.register(_EngineNumbers(prefix, model_name, status))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, ["model_name", *labels], registry=self._registry)

    def first_token(self, seconds: float) -> None:
        """A sample has emitted its first token."""
        self._first_token.labels(self._model_name).observe(seconds)

    def prompt_taken(self, num_tokens: int) -> None:
        """A prompt has been computed."""
        self._prompt_tokens.labels(self._model_name).inc(num_tokens)
        self._prompt_size.labels(self._model_name).observe(num_tokens)

    def tokens(self, count: int, seconds: float | None) -> None:
        """A sample has emitted tokens, the given time after the ones before; None for its first."""
        self._output_tokens.labels(self._model_name).inc(count)
        if seconds is not None:
            for _ in range(count):
                self._between.labels(self._model_name).observe(seconds / count)

    def finished(self, reason: str, num_tokens: int, seconds: float) -> None:
        """A sample has come to its end."""
        self._success.labels(self._model_name, reason).inc()
        self._output_size.labels(self._model_name).observe(num_tokens)
        self._end_to_end.labels(self._model_name).observe(seconds)

    def aborted(self, reason: str) -> None:
        """A sample was ended before its end."""
        self._aborted.labels(self._model_name, reason).inc()

    def answered(self, method: str, path: str, status: int) -> None:
        """An HTTP request was answered; `path` is the route's, never the client's own words."""
        self._http.labels(self._model_name, method, path, str(status)).inc()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that the client accepts, and its content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _EngineNumbers:
    """The engine's numbers as metrics, made at each scrape."""

    def __init__(self, prefix: str, model_name: str, status: Callable[[], EngineStatus]) -> None:
        self._prefix = prefix
        self._model_name = model_name
        self._status = status

    def collect(self) -> Iterator[Any]:
        """Every number of the engine."""
        status = self._status()
        loop, prefix, rounds = status.loop, status.loop.prefix, status.loop.acceptance
        yield self._gauge("num_requests_running", "Requests with state.", loop.num_running)
        yield self._gauge("num_requests_waiting", "Requests without state.", loop.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the pages that requests hold, 0 to 1.", loop.page_usage)
        yield self._counter("num_preemptions", "Requests that were taken off.", loop.num_preemptions)
        yield self._counter("engine_steps", "Steps of the engine.", loop.num_steps)
        yield self._gauge("last_step_rows", "Rows of the last target pass.", loop.last_step_rows)
        yield self._gauge("last_verify_rows", "Drafts among the rows of the last target pass.", loop.last_verify_rows)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens that a prefix was looked up for.", prefix.prompt_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens that came from the prefix cache.", prefix.cached_tokens)
        yield self._counter(
            "spec_decode_num_drafts", "Rounds in which drafts were proposed.", max(rounds.drafted, default=0)
        )
        yield self._counter(
            "spec_decode_num_draft_tokens",
            "Proposed drafts, those that were not sent to verification included.",
            rounds.num_drafted,
        )
        yield self._counter("spec_decode_num_verified_tokens", "Drafts sent to verification.", rounds.num_verified)
        yield self._counter("spec_decode_num_accepted_tokens", "Accepted drafts.", rounds.num_accepted)
        yield self._by_position(rounds.accepted)
        yield self._counter("spec_decode_num_rounds", "Rounds, those without drafts included.", rounds.rounds)
        health = loop.draft_health
        yield self._counter(
            "draft_fallbacks", "Times that drafting was given up for gaining too little.", health.fallbacks
        )
        yield self._counter("draft_probes", "Times that drafting was tried again.", health.probes)
        yield self._counter("draft_recoveries", "Times that drafting was taken up again.", health.recoveries)
        yield self._counter("draft_rounds_off", "Rounds without drafts because of that.", health.rounds_off)
        yield self._gauge(
            "speculation_running", "1 while drafts are proposed, 0 while not.", loop.speculation == RUNNING
        )
        yield self._info(loop.speculation)
        yield self._state(status.state)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=["model_name"])
        family.add_metric([self._model_name], float(value))
        return family

    def _by_position(self, accepted: list[int]) -> CounterMetricFamily:
        """Accepted drafts by draft position, from 0 as dashboards count."""
        name = f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos"
        family = CounterMetricFamily(name, "Accepted drafts by draft position.", labels=["model_name", "position"])
        for position, count in enumerate(accepted):
            family.add_metric([self._model_name, str(position)], count)
        return family

    def _info(self, speculation: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            f"{self._prefix}:speculation_info",
            "Whether speculation runs, and why not.",
            labels=["model_name", "status"],
        )
        family.add_metric([self._model_name, speculation], 1.0)
        return family

    def _state(self, state: str) -> GaugeMetricFamily:
        family = GaugeMetricFamily(
            f"{self._prefix}:engine_state", "1 for the state that the engine is in.", labels=["model_name", "state"]
        )
        for known in STATES:
            family.add_metric([self._model_name, known], float(known == state))
        return family
