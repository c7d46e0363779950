"""A cluster with a key, at the most verbose log level: strangers stay outside, and neither what
clients say nor any key is in a log."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pdrt.cli.main import main
from tests.e2e.conftest import TINY_FLAGS
from tests.e2e.deployment import HANG_SECONDS, Deployment, until

pytestmark = pytest.mark.e2e

PROMPT = "canaryprompt"
KEY = "canarykey"
WRONG_KEY = "canarywrong"
REQUEST_ID = "named-by-the-client"
CANARIES = (PROMPT, KEY, WRONG_KEY, "canarystop", "canaryfield", "canarytool")
TOOL = {"type": "function", "function": {"name": "canarytool", "description": PROMPT}}


def bodies(model: str) -> list[tuple[dict[str, Any], int]]:
    """What is served, and what is refused at each stage."""
    chat: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"{PROMPT} " * 40}],
        "max_tokens": 4,
        "user": PROMPT,
    }
    return [
        (chat, 200),
        ({**chat, "stream": True, "stop": ["canarystop"], "logprobs": True}, 200),
        ({**chat, "n": 2, "seed": 1}, 200),
        ({**chat, "messages": [{"role": "user", "content": PROMPT * 20_000}]}, 400),
        ({**chat, "canaryfield": PROMPT}, 400),
        ({**chat, "temperature": PROMPT}, 400),
        ({**chat, "messages": [{"role": PROMPT, "content": PROMPT}]}, 400),
        ({**chat, "tools": [TOOL], "tool_choice": "required"}, 400),
        ({**chat, "structured_outputs": {"regex": f"({PROMPT}"}}, 400),
        ({**chat, "structured_outputs": {"grammar": f"root ::= {PROMPT}"}}, 400),
        ({**chat, "structured_outputs": {"json": {"type": PROMPT}}}, 400),
        ({**chat, "structured_outputs": {"choice": [PROMPT]}, "max_tokens": 20}, 200),
    ]


async def test_what_clients_say_and_keys_are_in_no_log(tmp_path: Path, tiny_model: Path) -> None:
    key = tmp_path / "cluster.key"
    assert main(["keygen", str(key)]) == 0
    secret = key.read_text().splitlines()[-1].partition(":")[2]
    flags = ("--log-level", "debug", "--cluster-key", str(key))
    with Deployment(tmp_path, str(tiny_model)) as deployment:
        gateway = deployment.gateway("gateway", *flags, "--api-key", KEY)
        deployment.prefill("prefill-0", *TINY_FLAGS, *flags)
        deployment.decode("decode-0", *TINY_FLAGS, *flags)
        stranger = deployment.decode("decode-1", *TINY_FLAGS, "--log-level", "debug")
        await until(deployment.is_ready, "ready")
        async with httpx2.AsyncClient(
            base_url=deployment.url, trust_env=False, timeout=HANG_SECONDS
        ) as http:
            for body, status in bodies(deployment.name):
                answer = await ask(http, KEY, body)
                assert answer.status_code == status, answer.text
            refused = await ask(http, WRONG_KEY, bodies(deployment.name)[0][0])
            assert refused.status_code == 401 and WRONG_KEY not in refused.text
        # One line per request at each role, of which the log says what it may.
        for name in ("gateway", "prefill-0", "decode-0"):
            await asyncio.to_thread(deployment.processes[name].wait_for, "room ended|request ended")
        await asyncio.to_thread(stranger.wait_for, "a peer cannot be reached")
        assert "the same --cluster-key" in stranger.text()
        await asyncio.to_thread(gateway.wait_for, "a peer is refused")
        refusals = {"reason": "mechanism", "role": "gateway"}
        await until(lambda: deployment.metric("pdrt_refused_peers_total", **refusals), "a count")
        assert stranger.incarnation not in str(deployment.metrics())
        for process in deployment.processes.values():
            text = process.text()
            assert (REQUEST_ID in text) == (process is not stranger), "what may be said is"
            for canary in (*CANARIES, secret):
                assert canary not in text, f"{canary} in the log of {process.name}"


async def ask(http: httpx2.AsyncClient, key: str, body: dict[str, Any]) -> httpx2.Response:
    headers = {"authorization": f"Bearer {key}", "x-request-id": REQUEST_ID}
    return await http.post("/v1/chat/completions", json=body, headers=headers)
