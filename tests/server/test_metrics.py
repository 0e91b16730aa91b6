"""The metrics: every name is there, the numbers add up, and Prometheus can read them."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from scheduler.messages import EngineStats, FinishReason, GenerationRequest, RequestOutput, SamplingParams, StepOutput
from server.metrics import EngineMetrics, buckets_1_2_5
from tests.server.fake_engine import INFO
from tests.server.harness import serve, until

NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "pagekv_prompt_tokens": "counter",
    "pagekv_recomputed_tokens": "counter",
    "pagekv_evicted_blocks": "counter",
    "pagekv_published_blocks": "counter",
    "pagekv_hash_collisions": "counter",
    "pagekv_checked_blocks": "counter",
    "pagekv_corrupt_blocks": "counter",
    "pagekv_steps": "counter",
    "pagekv_failed_steps": "counter",
    "pagekv_blocks": "gauge",
    "pagekv_pinned_blocks": "gauge",
}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "toy", **labels})


def test_names_types_and_labels() -> None:
    text = EngineMetrics("toy", INFO).render("")[0].decode()
    families = {family.name: family for family in parse_text(text)}
    ours = {name: family.type for name, family in families.items() if not name.endswith("_created")}
    assert {name: kind for name, kind in ours.items() if name.startswith(("vllm:", "pagekv_"))} == NAMES
    for name in NAMES:
        assert families[name].samples, name
        assert all(sample.labels["model_name"] == "toy" for sample in families[name].samples)


def test_both_expositions() -> None:
    metrics = EngineMetrics("toy", INFO)
    assert metrics.render("text/plain")[1].startswith("text/plain")
    body, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_openmetrics(body.decode())}
    assert {name: families[name].type for name in NAMES} == NAMES
    assert all(sample.name.startswith(name) for name in NAMES for sample in families[name].samples)


def test_two_servers_do_not_share_counts() -> None:
    one, other = EngineMetrics("toy", INFO), EngineMetrics("toy", INFO)
    one.step(StepOutput(stats=EngineStats(generation_tokens=5)))
    assert value(one.registry, "vllm:generation_tokens_total") == 5
    assert value(other.registry, "vllm:generation_tokens_total") == 0


def test_totals_become_counters_and_gauges() -> None:
    metrics = EngineMetrics("toy", INFO)
    stats = EngineStats(
        running=3,
        waiting=2,
        blocks_in_use=16,
        blocks_cached=8,
        blocks_total=64,
        preemptions=1,
        prompt_tokens=100,
        prompt_tokens_reused=32,
        prompt_tokens_copied=7,
        prompt_tokens_pending=16,
        prompt_tokens_computed=45,
        checked_blocks=9,
        corrupt_blocks=2,
        pinned_blocks=4,
        step_tokens=20,
    )
    metrics.step(StepOutput(stats=stats))
    got = metrics.registry
    assert value(got, "vllm:num_requests_running") == 3
    assert value(got, "vllm:num_requests_waiting") == 2
    assert value(got, "vllm:kv_cache_usage_perc") == 0.25
    assert [value(got, "pagekv_blocks", state=state) for state in ("used", "cached", "free")] == [16, 8, 40]
    assert value(got, "vllm:prefix_cache_queries_total") == 100
    assert value(got, "vllm:prefix_cache_hits_total") == value(got, "vllm:prompt_tokens_cached_total") == 55
    sources = ("computed", "reused", "copied", "pending")
    assert [value(got, "pagekv_prompt_tokens_total", source=source) for source in sources] == [45, 32, 7, 16]
    assert value(got, "vllm:iteration_tokens_total_sum") == 20
    assert value(got, "pagekv_checked_blocks_total") == 9
    assert value(got, "pagekv_corrupt_blocks_total") == 2
    assert value(got, "pagekv_pinned_blocks") == 4


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_reason_of_an_end_is_counted(reason: FinishReason) -> None:
    metrics = EngineMetrics("toy", INFO)
    ended = GenerationRequest("a", (1, 2), SamplingParams(max_tokens=9, seed=0))
    metrics.finished(ended, RequestOutput("a", finish_reason=reason, num_generated=4), reason)
    for each in FinishReason:
        counted = value(metrics.registry, "vllm:request_success_total", finished_reason=each.value)
        assert counted == (1 if each is reason else 0)
    assert value(metrics.registry, "vllm:request_prompt_tokens_sum") == 2
    assert value(metrics.registry, "vllm:request_generation_tokens_sum") == 4
    assert value(metrics.registry, "vllm:request_params_max_tokens_sum") == 9


def test_buckets() -> None:
    assert buckets_1_2_5(100) == (1, 2, 5, 10, 20, 50, 100)
    assert buckets_1_2_5(4096)[-1] == 2000
    assert buckets_1_2_5(1) == (1,)


def test_over_http_what_was_served_is_counted() -> None:
    with serve() as server:
        for _ in range(3):
            server.post("/v1/completions", {"prompt": "abcd"})
        until(lambda: server.bridge.num_live == 0)
        response = httpx.get(server.url + "/metrics")
        openmetrics = httpx.get(server.url + "/metrics", headers={"accept": "application/openmetrics-text"})
    samples = {
        (sample.name, sample.labels.get("source")): sample.value
        for family in parse_text(response.text)
        for sample in family.samples
    }
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert samples["vllm:prompt_tokens_total", None] == 12
    by_source = [
        samples["pagekv_prompt_tokens_total", source] for source in ("computed", "reused", "copied", "pending")
    ]
    assert sum(by_source) == 12 and by_source[0] == 6
    assert samples["vllm:generation_tokens_total", None] == 18
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert samples[f"vllm:{name}_count", None] == 3
    assert samples["vllm:inter_token_latency_seconds_count", None] == 15
