"""What a server says of itself, who may ask it, and what each answer carries."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.fake_loop import FakeLoop, sleeping
from support.servers import straw_client, with_client

COMPLETIONS = "/v1/completions"


def get(path, loop=None, headers=None, **settings):
    async def work(client):
        await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 50}, headers=headers)
        return await client.get(path, headers=headers)

    return with_client(work, loop, **settings)


def samples_of(response):
    families = text_string_to_metric_families(response.text)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for one in families for sample in one.samples}


def test_health_is_ready_or_degraded_with_a_reason():
    loop = FakeLoop()
    assert get("/health", loop).json() == {"status": "ready", "reason": None}

    async def work(client):
        loop.engine.speculation_status = "not running because the accepted length fell to 1.02"
        await client.engine.refresh()
        return await client.get("/health")

    loop = FakeLoop()
    degraded = with_client(work, loop)
    assert degraded.status_code == 200
    assert degraded.json()["status"] == "degraded"
    assert "fell to 1.02" in degraded.json()["reason"]


def test_metrics_have_the_names_that_dashboards_read():
    found = samples_of(get("/metrics", FakeLoop()))
    name = "straw"
    assert found[("dspark:spec_decode_num_drafts_total", name)] == 5
    assert found[("dspark:spec_decode_num_draft_tokens_total", name)] == 25
    assert found[("dspark:spec_decode_num_verified_tokens_total", name)] == 25
    assert found[("dspark:spec_decode_num_accepted_tokens_total", name)] == 13
    assert found[("dspark:spec_decode_num_accepted_tokens_per_pos_total", "0", name)] == 5
    assert found[("dspark:num_requests_running", name)] == 0
    assert found[("dspark:num_requests_waiting", name)] == 0
    assert found[("dspark:kv_cache_usage_perc", name)] == 0
    assert found[("dspark:prompt_tokens_total", name)] == 2
    assert found[("dspark:generation_tokens_total", name)] == 19
    assert found[("dspark:request_success_total", "length", name)] == 1
    assert found[("dspark:request_success_total", "stop", name)] == 0
    assert found[("dspark:time_to_first_token_seconds_count", name)] == 1
    assert found[("dspark:inter_token_latency_seconds_count", name)] == 18
    assert found[("dspark:e2e_request_latency_seconds_count", name)] == 1
    assert found[("dspark:speculation_running", name)] == 1
    assert found[("dspark:engine_state", "ready", name)] == 1
    assert found[("dspark:http_requests_total", "/v1/completions", "200", "POST", name)] == 1


def test_metrics_can_have_the_other_prefix():
    found = samples_of(get("/metrics", metrics_prefix="vllm"))
    assert found[("vllm:generation_tokens_total", "straw")] == 16 + 3
    assert not any(key[0].startswith("dspark:") for key in found)


def test_speculation_that_does_not_run_shows_in_the_metrics():
    loop = FakeLoop(accepted=0)
    loop.engine.speculation_status = "not running because it is switched off"
    found = samples_of(get("/metrics", loop))
    assert found[("dspark:speculation_running", "straw")] == 0
    assert found[("dspark:speculation_info", "not running because it is switched off", "straw")] == 1


def test_paths_of_clients_are_no_labels():
    async def work(client):
        for number in range(3):
            await client.get(f"/secret/{number}")
        return await client.get("/metrics")

    response = with_client(work)
    assert "secret" not in response.text
    assert samples_of(response)[("dspark:http_requests_total", "404", "GET", "other", "straw")] == 3


def test_the_figures_of_speculation():
    answer = get("/debug/speculation").json()
    assert answer["speculation"] == "running"
    assert answer["acceptance"]["rounds"] == 5
    assert answer["acceptance"]["accepted"] == [5, 4, 4, 0, 0]
    assert len(answer["acceptance"]["unconditional"]) == 5


def test_the_figures_of_the_engine_hold_no_path():
    answer = get("/debug/engine").json()
    assert (answer["state"], answer["num_running"], answer["num_requests"]) == ("ready", 0, 0)
    assert answer["config"]["max_num_seqs"] == 4
    assert "/" not in str(answer)


def test_models_and_version():
    listed = get("/v1/models", served_model_names=("straw", "org/alias")).json()
    assert [card["id"] for card in listed["data"]] == ["straw", "org/alias"]
    assert listed["data"][0]["max_model_len"] == 2048
    assert get("/v1/models/straw").json()["id"] == "straw"
    assert get("/v1/models/org/alias", served_model_names=("straw", "org/alias")).json()["id"] == "org/alias"
    assert get("/v1/models/other").status_code == 404
    assert re.fullmatch(r"\d+\.\d+.*", get("/version").json()["version"])


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "first"}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second"}, 200),
    ],
)
def test_an_api_key_opens_all_but_health(header, status):
    keys = ("first", "second")
    for path in ("/v1/models", "/metrics", "/debug/engine", "/version"):
        response = get(path, headers=header, api_keys=keys)
        assert response.status_code == status
        if status == 401:
            assert response.json()["error"]["code"] == "invalid_api_key"
    assert get("/health", headers=header, api_keys=keys).status_code == 200


def test_a_request_id_is_kept_or_made():
    async def work(client):
        kept = await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
        made = await client.get("/version", headers={"X-Request-Id": "no good id\x7f"})
        refused = await client.post(COMPLETIONS, json={})
        return kept, made, refused

    kept, made, refused = with_client(work)
    assert kept.headers["X-Request-Id"] == "mine-1"
    assert kept.json()["id"] == "cmpl-mine-1"
    assert re.fullmatch(r"[0-9a-f]{32}", made.headers["X-Request-Id"])
    assert refused.headers["X-Request-Id"]


def test_pages_of_other_origins_may_not_call_unless_they_are_named():
    async def work(client):
        headers = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}
        return (
            await client.options(COMPLETIONS, headers=headers),
            await client.get("/version", headers=headers),
        )

    preflight, answer = with_client(work)
    assert "access-control-allow-origin" not in {**preflight.headers, **answer.headers}
    preflight, answer = with_client(work, cors_origins=("https://page.example",), api_keys=("k",))
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"


def test_an_answer_says_why_drafts_are_not_made():
    loop = FakeLoop(accepted=0)
    loop.engine.speculation_status = "not running because it is switched off"

    async def work(client):
        return await client.post(COMPLETIONS, json={"prompt": "a"})

    figures = with_client(work, loop).json()["dspark"]
    assert figures["speculation"] == "not running because it is switched off"
    assert figures["accepted_len"] == 1


def test_two_apps_have_metrics_of_their_own():
    async def work(client):
        async with straw_client() as other:
            await other.post(COMPLETIONS, json={"prompt": "a"})
            return samples_of(await client.get("/metrics")), samples_of(await other.get("/metrics"))

    mine, other = with_client(work)
    assert ("dspark:time_to_first_token_seconds_count", "straw") not in mine
    assert other[("dspark:time_to_first_token_seconds_count", "straw")] == 1


def test_methods_of_clients_are_no_labels():
    async def work(client):
        for number in range(3):
            await client.request(f"SECRET{number}", "/health")
        return await client.get("/metrics")

    response = with_client(work)
    assert "SECRET" not in response.text
    assert samples_of(response)[("dspark:http_requests_total", "/health", "405", "other", "straw")] == 3


def test_health_answers_probes_that_want_no_body():
    assert with_client(lambda client: client.head("/health")).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_samples_that_the_end_of_the_server_cut_are_counted_as_such(stream):
    async def work(client):
        body = {"prompt": "a", "stream": stream, "n": 2}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        while not client.engine.status().num_requests:
            await asyncio.sleep(0.005)
        await client.engine.drain(0.0)
        await asking
        return await client.get("/metrics")

    found = samples_of(with_client(work, FakeLoop(before_step=sleeping(0.05))))
    assert found[("dspark:request_aborted_total", "shutdown", "straw")] == 2
    assert ("dspark:request_aborted_total", "disconnect", "straw") not in found
