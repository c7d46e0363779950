"""Processes that live and do nothing: /ready says which, `pdrt up` ends them, service returns."""

from __future__ import annotations

import asyncio
import os
import signal

import httpx2
import pytest

from tests.e2e.deployment import Deployment, until
from tests.e2e.reference import Reference
from tests.e2e.streams import assert_serves

pytestmark = pytest.mark.e2e


async def test_a_stopped_worker_turns_ready_red_and_is_replaced(
    tiny_up: Deployment, tiny_reference: Reference
) -> None:
    """Nobody does anything about it but `up` itself."""
    (worker,) = tiny_up.workers("decode")
    health = worker["metrics"].replace("/metrics", "/health")
    assert httpx2.get(health, trust_env=False).status_code == 200
    pid = stop(tiny_up, "decode")
    name = f"decode {worker['worker']}"
    silent = f"{name} is silent: it hangs, is stopped, or cannot be reached"
    wanted = ["no decode worker", silent]
    # Those that earlier tests have killed follow, for a minute.
    await until(lambda: (tiny_up.reasons() or [])[:2] == wanted, "a reason in words")
    with pytest.raises(httpx2.TimeoutException):
        httpx2.get(health, timeout=0.5, trust_env=False)
    await replaced(tiny_up, "decode", pid)
    await assert_serves(tiny_up, tiny_reference)


@pytest.mark.slow
async def test_so_is_a_stopped_gateway(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """On the same ports: clients and workers find it again."""
    await replaced(tiny_up, "gateway", stop(tiny_up, "gateway"))
    await assert_serves(tiny_up, tiny_reference)


def stop(deployment: Deployment, role: str) -> int:
    pid = deployment.pid_of(role)
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    return pid


async def replaced(deployment: Deployment, role: str, pid: int) -> None:
    # A stopped gateway takes connections and answers nothing: it is not asked before it is gone.
    await until(lambda: deployment.pid_of(role) not in (pid, None), f"another {role}")
    up = deployment.processes["up"]
    await asyncio.to_thread(up.wait_for, f"{role}(-0)? stays silent; killing it")
    await until(deployment.is_ready, "ready again")
