"""What those who run a gateway see of it."""

from __future__ import annotations

import asyncio

import pytest

from pdrt.gateway.exposition import merge
from pdrt.gateway.hub import Hub
from pdrt.ids import short
from pdrt.observe.metrics import Metrics
from pdrt.protocol.gateway_messages import Report, Role
from tests.gateway.conftest import HANG_SECONDS, PREFILL_ENDPOINT, Deployment, eventually
from tests.gateway.stand_in import says


async def test_health_and_readiness(deployment: Deployment) -> None:
    assert (await deployment.http.get("/health")).json() == {"status": "ok"}
    response = await deployment.http.get("/ready")
    assert response.status_code == 503
    assert response.json() == {
        "ready": False,
        "reasons": ["no prefill worker", "no decode worker"],
    }
    prefill, _ = await deployment.pair()
    assert (await deployment.http.get("/ready")).json() == {"ready": True, "reasons": []}
    prefill.say(healthy=False, reasons=("quarantine full",))
    await deployment.heard(prefill)
    response = await deployment.http.get("/ready")
    assert response.status_code == 503
    assert response.json()["reasons"] == [f"prefill {prefill.name}: quarantine full"]


async def test_models(deployment: Deployment) -> None:
    (model,) = [model async for model in deployment.client.models.list()]
    assert (model.id, model.object) == ("tiny", "model")
    assert (await deployment.client.models.retrieve("tiny")).id == "tiny"


async def test_metrics_of_everybody(deployment: Deployment) -> None:
    prefill, decode = await deployment.pair()
    for worker in (prefill, decode):
        metrics = Metrics(worker.register.role.value, worker.name)
        metrics.set_pages({"free": 3})
        worker.report = Report(worker.worker, 0, metrics.render())
    decode.on_submit = says(decode, deployment.ids("abc"))
    await deployment.chat()
    response = await deployment.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    assert lines.count("# TYPE pdrt_pages gauge") == 1
    for worker in (prefill, decode):
        assert any(w.startswith("pdrt_pages{") and worker.name in w for w in lines)
    assert any(w.startswith('pdrt_requests_total{outcome="stop",role="gateway"') for w in lines)
    assert any(w.startswith("pdrt_ttft_seconds_count{") for w in lines)


async def test_a_worker_that_does_not_answer_delays_a_scrape_and_no_more(
    deployment: Deployment,
) -> None:
    prefill, _ = await deployment.pair()
    report, prefill.report = prefill.report, None
    assert (await deployment.http.get("/metrics")).status_code == 200
    prefill.report = report


async def test_status(deployment: Deployment) -> None:
    prefill, decode = await deployment.pair()
    status = (await deployment.http.get("/status")).json()
    assert status["ready"] and status["gateway"]["requests"] == 0
    by_role = {worker["role"]: worker for worker in status["workers"]}
    assert by_role["prefill"]["endpoint"] == PREFILL_ENDPOINT
    shown = by_role["decode"]
    assert (shown["worker"], shown["state"], shown["healthy"]) == (decode.name, "live", True)
    assert shown["paired"] == [PREFILL_ENDPOINT]
    assert shown["fingerprint"]["layout"]["page_size"] == 16
    assert shown["status"] == {"rooms": 0}
    decode.report = Report(decode.worker, 0, b"", b"[" * 10000)
    prefill.die()
    async with asyncio.timeout(HANG_SECONDS):
        while by_role["prefill"]["state"] != "lost":
            await asyncio.sleep(0.01)
            status = (await deployment.http.get("/status")).json()
            by_role = {worker["role"]: worker for worker in status["workers"]}
    assert by_role["decode"]["status"] is None


async def test_check(deployment: Deployment) -> None:
    _, decode = await deployment.pair()
    response = await deployment.http.get("/debug/check")
    assert response.status_code == 200 and response.json()["ok"]
    decode.report = Report(decode.worker, 0, broken=("page 3 has two owners",))
    response = await deployment.http.get("/debug/check")
    assert response.status_code == 500
    broken = {worker["worker"]: worker["broken"] for worker in response.json()["workers"]}
    assert broken[short(decode.worker)] == ["page 3 has two owners"]


async def test_request_ids(deployment: Deployment) -> None:
    response = await deployment.http.get("/health", headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    for unusable in ("x" * 129, "a b"):
        response = await deployment.http.get("/health", headers={"X-Request-Id": unusable})
        assert response.headers["x-request-id"] not in ("", unusable)
    response = await deployment.http.post("/v1/completions", content=b"{")
    assert response.status_code == 400 and response.headers["x-request-id"]


async def test_every_error_carries_the_request_id(
    deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(hub: Hub) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(Hub, "readiness", breaks)
    for path, headers, status in (
        ("/ready", {}, 500),
        ("/nowhere", {}, 404),
        ("/v1/completions", {}, 405),
        ("/v1/models", {"authorization": ""}, 401),
    ):
        response = await deployment.http.get(path, headers={"x-request-id": "mine-2", **headers})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine-2")


async def test_a_refused_worker_learns_why(deployment: Deployment) -> None:
    worker = deployment.stand_in(Role.PREFILL)
    worker.say(endpoint=None)
    await eventually(lambda: worker.registered, "answered")
    assert "endpoint" in (worker.registered[-1].refusal or "")


def test_texts_are_merged_family_by_family() -> None:
    one = b"# HELP a_total A\n# TYPE a_total counter\na_total 1\n# TYPE h histogram\nh_sum 1\n"
    two = b'# HELP a_total other\n# TYPE a_total counter\na_total{w="x y"} 2\nh_sum 2\nloose 5\n'
    bad = b"\xff\xfe\n{}\n# TYPE\nnot a sample at all\n"
    assert merge([one, two, bad]).decode().splitlines() == [
        "# HELP a_total A",
        "# TYPE a_total counter",
        "a_total 1",
        'a_total{w="x y"} 2',
        "# TYPE h histogram",
        "h_sum 1",
        "h_sum 2",
        "loose 5",
    ]
    assert merge([]) == b""


@pytest.mark.parametrize("role", ["prefill", "decode", "gateway"])
def test_metrics_have_their_names(role: str) -> None:
    metrics = Metrics(role, "00ff", rank=1)
    metrics.set_leases({"granted": 2})
    metrics.set_rooms({"open": 1})
    metrics.set_quarantine(4, {})
    metrics.set_queue(5)
    metrics.observe_drain(0.1)
    metrics.observe_itl(0.1)
    metrics.observe_handover("transfer", 0.1)
    metrics.count_transfer("tcp", 10, 1)
    metrics.count_fence("local")
    metrics.count_preemption()
    text = metrics.render().decode()
    base = f'role="{role}",worker="00ff"'
    for line in (
        f'pdrt_leases{{role="{role}",state="granted",worker="00ff"}} 2.0',
        f'pdrt_rooms{{role="{role}",state="open",worker="00ff"}} 1.0',
        f"pdrt_quarantined_pages{{{base}}} 4.0",
        f"pdrt_queue{{{base}}} 5.0",
        f"pdrt_drain_seconds_count{{{base}}} 1.0",
        f'pdrt_transfer_bytes_total{{engine="tcp",rank="1",{base}}} 10.0',
        f'pdrt_fences_total{{engine="local",{base}}} 1.0',
        f"pdrt_preemptions_total{{{base}}} 1.0",
        f'pdrt_handover_seconds_count{{phase="transfer",{base}}} 1.0',
    ):
        assert line in text.splitlines()
    assert "_created" not in text
