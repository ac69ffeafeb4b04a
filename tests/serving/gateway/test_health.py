"""Probes, models, metrics and request ids."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.replica import server
from serving.replica.served import ServedModel
from tests.fakes import ACCEPTED_AT, FAKE_NAME, GUESSES, HOST_CACHE, PREFIX_CACHE, TIMES, fake_card
from tests.services import ENGINE_CONFIG, running_app, running_replica, until


def samples_of(text):
    families = text_string_to_metric_families(text)
    return {(s.name, s.labels.get("finished_reason")): s.value for family in families for s in family.samples}


async def until_get(http, condition):
    for _ in range(500):
        if condition(response := await http.get("/ready")):
            return response
        await asyncio.sleep(0.01)
    raise AssertionError(f"it stays {response.text}")


@pytest.mark.parametrize("path", ["/health", "/live", "/v2/health/live", "/ready", "/readyz", "/v2/health/ready"])
async def test_probes_of_a_service_that_works(http, path):
    assert (await http.get(path)).status_code == 200


async def test_alive_but_not_ready_while_the_model_loads(engine):
    async with running_replica(engine, load=False) as replica, running_app(replica.address, ready=False) as http:
        replica.service.report("loading: 3 of 9 MiB")
        ready = await until_get(http, lambda response: response.json()["status"] == "starting")
        assert ready.status_code == 503
        assert ready.json()["detail"] == "loading: 3 of 9 MiB"
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 503
        refused = await http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "x"})
        assert refused.status_code == 503
        assert "loading: 3 of 9 MiB" in refused.json()["error"]["message"]
        replica.service.serve(ServedModel.build(ENGINE_CONFIG, engine, fake_card()))
        await until_get(http, lambda response: response.status_code == 200)
        assert (await http.get("/v1/models")).status_code == 200


@pytest.fixture
def hurry(monkeypatch):
    """Looks at the engine's step that each count for a second."""
    monkeypatch.setattr(server, "WATCH_S", 0.002)


async def test_while_a_step_is_stuck_nobody_waits_for_it(engine, hurry):
    async with running_replica(engine) as replica, running_app(replica.address) as http:
        engine.go.clear()
        waiting = asyncio.create_task(http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "x"}))
        await until(lambda: replica.service._table.num_requests == 1)
        engine.num_steps_begun, engine.step_s = 5, 11.0
        stuck = await until_get(http, lambda response: response.status_code == 503)
        assert (stuck.json()["status"], stuck.json()["detail"]) == (
            "stuck",
            "a step of the engine runs since 11 s and counts as stuck",
        )
        failed = await waiting
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_failed")
        assert (await http.get("/live")).status_code == 200
        refused = await http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "x"})
        assert refused.status_code == 503 and "stuck" in refused.json()["error"]["message"]
        engine.step_s = 0.0
        engine.go.set()
        await until_get(http, lambda response: response.status_code == 200)
        await until(lambda: engine.aborted)
        assert (await http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "x"})).status_code == 200


async def test_a_step_that_does_not_end_ends_the_replica(engine, hurry):
    async with running_replica(engine) as replica:
        engine.num_steps_begun, engine.step_s = 5, 100.0
        await asyncio.wait_for(replica.service.engine_failed(), 10)
        assert replica.service.engine_failure == "a step of the engine does not end"
        assert replica.service.has_waiting_threads
        engine.step_s = 0.0


async def test_not_ready_without_a_replica():
    async with running_app("127.0.0.1:9", ready=False) as http:
        assert (await http.get("/ready")).status_code == 503
        refused = await http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "x"})
        assert refused.status_code == 503
        assert "podstream:replica_up 0.0" in (await http.get("/metrics")).text


async def test_models_are_listed(http, shared):
    listed = (await http.get("/v1/models")).json()
    (row,) = listed["data"]
    assert listed["object"] == "list"
    assert (row["id"], row["object"], row["max_model_len"]) == (FAKE_NAME, "model", shared.engine.max_seq_len)
    assert row["source"] == fake_card().source, "which step of a run is served stands there"
    assert (await http.get(f"/v1/models/{FAKE_NAME}")).json() == row
    missing = await http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


async def test_metrics_count_requests_and_tokens(own_http):
    for max_tokens in (3, 5):
        await own_http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "abc", "max_tokens": max_tokens})
    await own_http.post("/v1/completions", json={"model": "gpt-9", "prompt": "abc"})
    response = await own_http.get("/metrics")
    samples = samples_of(response.text)
    assert response.headers["content-type"].startswith("text/plain")
    assert samples["vllm:request_success_total", "length"] == 2
    assert samples["vllm:request_success_total", "error"] == 1
    assert samples["vllm:generation_tokens_total", None] == 8
    assert samples["vllm:prefix_cache_queries_total", None] == PREFIX_CACHE["prefix_cache_queries"]
    assert samples["vllm:prefix_cache_hits_total", None] == 30 - 8, "those on the device"
    assert samples["vllm:external_prefix_cache_queries_total", None] == HOST_CACHE["host_cache_queries"]
    assert samples["vllm:external_prefix_cache_hits_total", None] == HOST_CACHE["host_cache_hits"]
    assert samples["podstream:host_pages", None] == HOST_CACHE["num_host_pages"]
    for name, count in GUESSES.items():
        assert samples[f"vllm:spec_decode_{name}_total", None] == count
    assert samples["podstream:step_host_seconds_total", None] == TIMES["step_host_s"]
    assert samples["podstream:step_device_wait_seconds_total", None] == TIMES["step_device_wait_s"]
    assert samples["vllm:iteration_tokens_total_count", None] == 5
    assert samples["vllm:iteration_tokens_total_sum", None] == 26
    assert samples["vllm:num_requests_waiting_by_reason", None] == 0
    assert samples["vllm:request_max_num_generation_tokens_sum", None] == 8
    assert samples["podstream:slots", None] == 64
    assert samples["vllm:request_generation_tokens_sum", None] == 8
    assert samples["vllm:request_prompt_tokens_sum", None] == 6
    assert samples["vllm:time_to_first_token_seconds_count", None] == 2
    assert samples["vllm:inter_token_latency_seconds_count", None] <= 6  # less when a first event brings several
    assert samples["vllm:e2e_request_latency_seconds_count", None] == 3
    assert samples["vllm:request_queue_time_seconds_sum", None] == 2 * 0.25
    assert samples["vllm:request_prefill_time_seconds_sum", None] == 2 * 0.5
    assert samples["vllm:request_inference_time_seconds_count", None] == 2
    assert samples["vllm:request_inference_time_seconds_sum", None] >= 2 * 0.5
    assert samples["vllm:num_requests_running", None] == 0
    assert samples["podstream:compiles_after_ready_total", None] == 0
    assert samples["podstream:replica_up", None] == 1
    assert "gpt-9" not in response.text


GAUGES = (
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "cache_config_info", "engine_sleep_state",
)  # fmt: skip
COUNTERS = (
    "prompt_tokens", "prompt_tokens_cached", "prompt_tokens_by_source", "generation_tokens", "request_success",
    "num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "mm_cache_queries", "mm_cache_hits", "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
)  # fmt: skip
LATENCY = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
TOKEN_GAP = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
HISTOGRAMS = {
    "time_to_first_token_seconds": ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
    "inter_token_latency_seconds": TOKEN_GAP,
    "request_time_per_output_token_seconds": TOKEN_GAP,
    "e2e_request_latency_seconds": LATENCY,
    "request_queue_time_seconds": LATENCY,
    "request_prefill_time_seconds": LATENCY,
    "request_decode_time_seconds": LATENCY,
    "request_inference_time_seconds": LATENCY,
    "request_prompt_tokens": "1 2 5 10 20 50",
    "request_generation_tokens": "1 2 5 10 20 50",
    "request_prefill_kv_computed_tokens": "1 2 5 10 20 50",
    "request_max_num_generation_tokens": "1 2 5 10 20 50",
    "request_params_max_tokens": "1 2 5 10 20 50",
    "request_params_n": "1 2 5 10 20",
    "iteration_tokens_total": "1",
}


async def test_every_family_that_dashboards_ask_for_has_its_name_type_labels_and_buckets(http):
    await http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "abc", "max_tokens": 3})
    families = {f.name: f for f in text_string_to_metric_families((await http.get("/metrics")).text)}
    kinds = {"gauge": GAUGES, "counter": COUNTERS, "histogram": HISTOGRAMS}
    for kind, names in kinds.items():
        for name in names:
            family = families[f"vllm:{name}"]
            assert family.type == kind, name
            for sample in family.samples:
                assert (sample.labels["model_name"], sample.labels["engine"]) == (FAKE_NAME, "0"), name
    for name, buckets in HISTOGRAMS.items():
        bounds = [s.labels["le"] for s in families[f"vllm:{name}"].samples if s.name.endswith("_bucket")]
        wanted = [float(bound) for bound in buckets.split()]
        assert [float(bound) for bound in bounds[: len(wanted)]] == wanted, name
        assert bounds[-1] == "+Inf"
    sources = {s.labels["source"]: s.value for s in families["vllm:prompt_tokens_by_source"].samples}
    assert sources.keys() == {"local_compute", "local_cache_hit", "external_kv_transfer"}
    places = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(s.labels["position"], s.value) for s in places] == [(str(i), n) for i, n in enumerate(ACCEPTED_AT)]
    assert families["vllm:cache_config_info"].samples[0].labels["kv_cache_max_concurrency"] == "2.00"


async def test_a_cancelled_request_counts_as_aborted(gateway, engine):
    engine.go.clear()
    async with gateway.http.stream("POST", "/v1/completions", json={"model": FAKE_NAME, "prompt": "x", "stream": True}):
        pass
    await until(lambda: gateway.admission.num_in_flight == 0)
    engine.go.set()
    assert samples_of((await gateway.http.get("/metrics")).text)["vllm:request_success_total", "abort"] == 1


async def test_a_request_id_is_returned_or_made(http):
    sent = await http.get("/health", headers={"x-request-id": "abc-123"})
    made = await http.get("/health")
    silly = await http.get("/v1/nothing", headers={"x-request-id": "x" * 500})
    assert sent.headers["x-request-id"] == "abc-123"
    assert len(made.headers["x-request-id"]) == len(silly.headers["x-request-id"]) == 32


async def test_http_requests_are_counted_by_path_and_class(own_http):
    await own_http.post("/v1/completions", json={"model": FAKE_NAME, "prompt": "abc", "max_tokens": 3})
    await own_http.post("/v1/completions", content=b"{")
    await own_http.get("/v1/models/some/other")
    await own_http.get("/etc/passwd")
    await own_http.get("/health")
    text = (await own_http.get("/metrics")).text
    for labels in (
        'handler="/v1/completions",method="POST",status="2xx"',
        'handler="/v1/completions",method="POST",status="4xx"',
        'handler="/v1/models/{model:path}",method="GET",status="4xx"',
        'handler="none",method="GET",status="4xx"',
    ):
        assert f"http_requests_total{{{labels}}} 1.0" in text
    assert 'http_request_duration_seconds_count{handler="/v1/completions",method="POST"} 2.0' in text
    assert "passwd" not in text and 'handler="/health"' not in text


async def test_what_was_asked_for_is_observed(own_http):
    fields = {"model": FAKE_NAME, "prompt": "abc", "max_tokens": 4}
    await own_http.post("/v1/completions", json={**fields, "n": 2})
    samples = samples_of((await own_http.get("/metrics")).text)
    for name, total in {"params_n": 2, "params_max_tokens": 4, "prefill_kv_computed_tokens": 3}.items():
        assert samples[f"vllm:request_{name}_sum", None] == total
    assert samples["vllm:request_decode_time_seconds_count", None] == 2
    assert samples["vllm:request_time_per_output_token_seconds_count", None] == 2
    assert samples["vllm:prompt_tokens_cached_total", None] == PREFIX_CACHE["prefix_cache_hits"]
