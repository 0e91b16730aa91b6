"""What the server counts, for Prometheus.

Names, types and buckets that begin with `vllm:` are vLLM's (vllm/v1/metrics/loggers.py), so that dashboards made for it
work here unchanged; what vLLM has no name for begins with `pagekv_`. Every series has the label `model_name`.

Gauges and counters are read from the engine's totals when they are asked for; histograms are fed by each step. For the
counters of a prompt's tokens holds, after every step:

    prompt_tokens == computed + reused + copied + pending,    prompt_tokens_cached == reused + copied + pending
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from scheduler.messages import (
    EngineInfo,
    EngineStats,
    FinishReason,
    GenerationRequest,
    RequestOutput,
    RequestTimes,
    StepOutput,
)

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)


def buckets_1_2_5(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `largest`; never empty."""
    steps = [mantissa * 10**exponent for exponent in range(len(str(largest))) for mantissa in (1, 2, 5)]
    return tuple(step for step in steps if step <= max(largest, 1))


class EngineMetrics:
    """The metrics of one engine in a registry of its own. An Observer of the AsyncEngine."""

    def __init__(self, model_name: str, info: EngineInfo) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(StatsCollector(self, model_name, info))
        ProcessCollector(registry=self.registry)
        self.stats = EngineStats(blocks_total=info.num_blocks)
        self._model_name = model_name
        self._make_latencies()
        self._make_sizes(info.max_model_len)
        success = Counter(
            "vllm:request_success",
            "Requests that ended, by the reason of their end.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._success = {reason: success.labels(model_name, reason.value) for reason in FinishReason}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        parent = Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)
        return parent.labels(self._model_name)

    def _make_latencies(self) -> None:
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Arrival of a request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request.", TOKEN_BUCKETS
        )
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "A request's mean time per token after the first.",
            TOKEN_BUCKETS,
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Arrival of a request to its end.", REQUEST_BUCKETS
        )
        self._queue = self._histogram(
            "vllm:request_queue_time_seconds", "Arrival of a request to its first schedule.", REQUEST_BUCKETS
        )
        self._prefill = self._histogram(
            "vllm:request_prefill_time_seconds", "First schedule of a request to its first token.", REQUEST_BUCKETS
        )
        self._decode = self._histogram(
            "vllm:request_decode_time_seconds", "First to last token of a request.", REQUEST_BUCKETS
        )
        self._inference = self._histogram(
            "vllm:request_inference_time_seconds", "First schedule of a request to its end.", REQUEST_BUCKETS
        )

    def _make_sizes(self, max_model_len: int) -> None:
        lengths = buckets_1_2_5(max_model_len)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "Tokens in a request's prompt.", lengths)
        self._generated = self._histogram("vllm:request_generation_tokens", "Tokens a request generated.", lengths)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "A request's max_tokens.", lengths)
        self._computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens that a request computed itself.", lengths
        )
        self._n = self._histogram("vllm:request_params_n", "A request's n.", CHOICE_BUCKETS)
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Positions computed in a step.", STEP_BUCKETS)

    def step(self, step: StepOutput) -> None:
        self.stats = step.stats
        if step.stats.step_tokens:
            self._iteration.observe(step.stats.step_tokens)
        for output in step.outputs:
            if output.time_to_first_token is not None:
                self._first_token.observe(output.time_to_first_token)
            if output.inter_token is not None:
                self._inter_token.observe(output.inter_token)
            if output.usage is not None:
                self._computed.observe(output.usage.computed)

    def finished(self, request: GenerationRequest, output: RequestOutput, reason: FinishReason) -> None:
        self._success[reason].inc()
        self._prompt.observe(len(request.prompt_token_ids))
        self._generated.observe(output.num_generated)
        self._max_tokens.observe(request.params.max_tokens)
        self._n.observe(1)
        if output.times is not None:
            self._observe_times(output.times, output.num_generated)

    def _observe_times(self, times: RequestTimes, num_generated: int) -> None:
        self._e2e.observe(times.e2e)
        self._queue.observe(times.queued)
        if times.prefill is not None:
            self._prefill.observe(times.prefill)
        if times.inference is not None:
            self._inference.observe(times.inference)
        if times.decode is not None:
            self._decode.observe(times.decode)
            if num_generated > 1:
                self._per_token.observe(times.decode / (num_generated - 1))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where `accept` asks for it, else Prometheus text."""
        if "application/openmetrics-text" not in accept:
            return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4
        # The library's default escaping turns the colon of `vllm:` into an underscore in OpenMetrics, in samples alone.
        # All names here are valid under any escaping, so none is wanted.
        body: bytes = openmetrics.generate_latest(self.registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return body, openmetrics.CONTENT_TYPE_LATEST


class StatsCollector(Collector):
    """Gauges and counters read from the last EngineStats at the time of the scrape."""

    def __init__(self, metrics: EngineMetrics, model_name: str, info: EngineInfo) -> None:
        self._metrics = metrics
        self._model_name = model_name
        self._info = info

    def describe(self) -> Iterable[Metric]:
        """Nothing: without this the registry would collect once while it registers, before there are any stats."""
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self._metrics.stats
        yield from self._gauges(stats)
        yield from self._counters(stats)
        yield self._cache_config()

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.blocks_in_use / stats.blocks_total if stats.blocks_total else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Requests in the batch.", stats.running),
            ("vllm:num_requests_waiting", "Requests waiting to be scheduled.", stats.waiting),
            ("vllm:kv_cache_usage_perc", "Share of blocks that requests hold; 1 is all of them.", usage),
            ("pagekv_pinned_blocks", "Cached blocks that are kept from eviction.", stats.pinned_blocks),
        ):
            gauge = GaugeMetricFamily(name, text, labels=("model_name",))
            gauge.add_metric((self._model_name,), value)
            yield gauge
        blocks = GaugeMetricFamily("pagekv_blocks", "Blocks by state.", labels=("model_name", "state"))
        free = stats.blocks_total - stats.blocks_in_use - stats.blocks_cached
        for state, value in (("used", stats.blocks_in_use), ("cached", stats.blocks_cached), ("free", free)):
            blocks.add_metric((self._model_name, state), value)
        yield blocks

    def _counters(self, stats: EngineStats) -> Iterator[Metric]:
        cached = stats.prompt_tokens_reused + stats.prompt_tokens_copied + stats.prompt_tokens_pending
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prompt_tokens),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", cached),
            ("vllm:num_preemptions", "Requests preempted.", stats.preemptions),
            ("vllm:prompt_tokens", "Prompt tokens of requests whose prefill has ended.", stats.prompt_tokens),
            ("vllm:prompt_tokens_cached", "Prompt tokens that were not computed by their own request.", cached),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            (
                "pagekv_recomputed_tokens",
                "Tokens computed again after a preemption or a repair.",
                stats.recomputed_tokens,
            ),
            ("pagekv_evicted_blocks", "Cached blocks given to another use.", stats.evicted_blocks),
            ("pagekv_published_blocks", "Blocks that became shareable.", stats.published_blocks),
            ("pagekv_hash_collisions", "Equal hashes of unequal blocks, treated as misses.", stats.hash_collisions),
            ("pagekv_checked_blocks", "Cached blocks whose checksums were compared.", stats.checked_blocks),
            ("pagekv_corrupt_blocks", "Cached blocks whose checksums were wrong.", stats.corrupt_blocks),
            ("pagekv_steps", "Steps of the engine.", stats.steps),
            ("pagekv_failed_steps", "Steps that failed.", stats.failed_steps),
        ):
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric((self._model_name,), value)
            yield counter
        yield self._prompt_tokens_by_source(stats)

    def _prompt_tokens_by_source(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            "pagekv_prompt_tokens", "Prompt tokens by where their K/V came from.", labels=("model_name", "source")
        )
        for source, value in (
            ("computed", stats.prompt_tokens_computed),
            ("reused", stats.prompt_tokens_reused),
            ("copied", stats.prompt_tokens_copied),
            ("pending", stats.prompt_tokens_pending),
        ):
            family.add_metric((self._model_name, source), value)
        return family

    def _cache_config(self) -> Metric:
        info = self._info
        labels = {
            "model_name": self._model_name,
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "cache_dtype": info.kv_dtype,
            "enable_prefix_caching": "True",
            "block_bytes": str(info.block_bytes),
            "recovery": info.recovery,
            "partial_reuse": str(info.partial_reuse),
            "device": info.device,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "How the K/V cache is laid out.", labels=tuple(labels))
        family.add_metric(tuple(labels.values()), 1)
        return family
