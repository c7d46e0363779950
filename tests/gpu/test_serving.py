"""One prefill and one decode worker on one GPU, as `pdrt up` starts them: their answers are those
of one process, whoever goes away meanwhile, and afterwards both pools are whole."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu.deployment import Deployment
from tests.gpu.reference import CHUNK, MARGIN, Reference

POOL_BYTES = 2**30
FLAGS = ("--dtype", "float32", "--kv-cache-memory-bytes", str(POOL_BYTES), "--log-format", "json")
LENGTHS = (1, 15, 16, 17, 100, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 40)
OUTPUT = 24
STORM_CLIENTS = 150
STORM_AT_ONCE = 24


@pytest.fixture(scope="module")
def deployment(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with Deployment(tmp_path_factory.mktemp("up"), model, *FLAGS) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    reference = Reference(model, "float32", POOL_BYTES)
    yield reference
    reference.close()


def test_the_judge_can_tell_outputs_apart(reference: Reference) -> None:
    """With other KV than its own prompt's, an output is not the likeliest."""
    one, other = reference.prompt(100, 1), reference.prompt(100, 2)
    output = reference.greedy(one, OUTPUT)
    assert reference.worst(one, output) < MARGIN
    assert len(set(output)) > OUTPUT // 4
    assert reference.worst(other, output) > 100 * MARGIN
    spoilt = [*one[:40], *other[40:56], *one[56:]]  # one page
    assert reference.worst(spoilt, output) > 100 * MARGIN


@pytest.mark.parametrize("length", LENGTHS)
def test_token_for_token(deployment: Deployment, reference: Reference, length: int) -> None:
    """One after the other, in steps of the same shapes: the same kernels, the same bits."""
    prompt = reference.prompt(length, seed=length)
    assert deployment.complete(prompt, OUTPUT) == reference.greedy(prompt, OUTPUT)


def test_scores_of_a_prompt_draw_no_token(deployment: Deployment, reference: Reference) -> None:
    """Nothing waits for a sampled token there; the pages are sent all the same, and read again."""
    prompt = reference.prompt(300, seed=7)
    assert len(deployment.complete(prompt, 1)) == 1
    assert deployment.complete(prompt, OUTPUT) == reference.greedy(prompt, OUTPUT), "from the cache"


def test_many_at_once(deployment: Deployment, reference: Reference) -> None:
    dice = random.Random(4)
    prompts = [reference.prompt(dice.randrange(1, 700), seed) for seed in range(32)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        outputs = list(clients.map(lambda prompt: deployment.complete(prompt, OUTPUT), prompts))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert reference.worst(prompt, output) < MARGIN


def go_away(deployment: Deployment, prompt: list[int], dice: random.Random) -> None:
    """Ask for a stream, read some of it, and hang up."""
    connection = deployment.connect()
    try:
        answer = deployment.ask(connection, prompt, max_tokens=200, stream=True)
        for _ in range(dice.choice((0, 0, 1, 2, 10))):
            answer.readline()
        time.sleep(dice.random() * 0.05)
    finally:
        if connection.sock is not None:
            connection.sock.close()
        connection.close()


def hang_up_at_once(deployment: Deployment, prompt: list[int], dice: random.Random) -> None:
    """Before anything is answered: in the queue, in the middle of a prompt, or of its transfer."""
    connection = deployment.connect()
    body = f'{{"prompt": {prompt}, "max_tokens": 50, "temperature": 0}}'
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", body, headers)
    time.sleep(dice.random() * 0.3)
    connection.close()


def test_an_abort_storm(deployment: Deployment, reference: Reference) -> None:
    """Those who stay get what is theirs."""
    dice, is_over = random.Random(5), threading.Event()
    storm = [(reference.prompt(dice.randrange(1, 2500), 1000 + n), random.Random(n))
             for n in range(STORM_CLIENTS)]  # fmt: skip
    served: list[tuple[list[int], list[int]]] = []

    def stay(number: int) -> None:
        turn = 0
        while not is_over.is_set():
            turn += 1
            prompt = reference.prompt(40 + 90 * number, 10_000 * number + turn)
            served.append((prompt, deployment.complete(prompt, 8)))

    with ThreadPoolExecutor(4) as stayers, ThreadPoolExecutor(STORM_AT_ONCE) as leavers:
        staying = [stayers.submit(stay, number) for number in range(4)]
        try:
            leaving = [
                leavers.submit(dice.choice((go_away, hang_up_at_once)), deployment, prompt, own)
                for prompt, own in storm
            ]
            for each in leaving:
                each.result()
        finally:
            is_over.set()
        for each in staying:
            each.result()
    assert len(served) >= 8
    for prompt, output in served:
        assert reference.worst(prompt, output) < MARGIN
    deployment.wait_whole()


def test_kv_passes_through_gpu_memory(deployment: Deployment) -> None:
    """The engine that was taken is `local`."""
    workers = deployment.get("/status")["workers"]
    (decode,) = (worker["status"] for worker in workers if worker["role"] == "decode")
    assert [writer["engine"] for writer in decode["writers"]] == ["local"]


def test_no_other_process_holds_the_gpu(deployment: Deployment) -> None:
    """The death of a worker could not end the copies of a GPU that somebody else holds open for it:
    not one process but the workers has one of its files."""
    workers = {pid for pid, role in deployment.workers().items() if role in ("prefill", "decode")}
    assert len(workers) == 2
    own, inherited = Path("/proc"), workers | {deployment.pid, *deployment.workers()}
    children = {int(e.name) for e in own.iterdir() if e.name.isdigit() and parent(e) in inherited}
    assert all(has_gpu(pid) for pid in workers)
    assert not [pid for pid in (inherited | children) - workers if has_gpu(pid)]


def parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def has_gpu(pid: int) -> bool:
    """One of NVIDIA's files is open in it."""
    links = Path(f"/proc/{pid}/fd")
    try:
        names = [os.readlink(link) for link in links.iterdir()]
    except OSError:
        return False
    return any(name.startswith("/dev/nvidia") for name in names)


def test_a_prefill_worker_is_killed(deployment: Deployment, reference: Reference) -> None:
    """In the middle of hand-overs: they are fenced by its death, and their requests go on."""
    (prefill,) = (pid for pid, role in deployment.workers().items() if role == "prefill")
    prompts = [reference.prompt(1500 + n, seed=500 + n) for n in range(16)]
    with ThreadPoolExecutor(len(prompts)) as clients:
        asked = [clients.submit(deployment.complete, prompt, OUTPUT) for prompt in prompts]
        deployment.wait(lambda: any(map(Future.done, asked)), "the first answer")
        os.kill(prefill, signal.SIGKILL)
        outputs = [each.result() for each in asked]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert reference.worst(prompt, output) < MARGIN
    deployment.wait_whole()


def test_half_precision(model: Path, tmp_path: Path) -> None:
    """bfloat16, where sums of another order give other tokens: one after the other, the same."""
    flags = ("--dtype", "bfloat16", "--kv-cache-memory-bytes", str(POOL_BYTES))
    reference = Reference(model, "bfloat16", POOL_BYTES)
    try:
        with Deployment(tmp_path, model, *flags) as deployment:
            for length in (17, 100, CHUNK + 1):
                prompt = reference.prompt(length, seed=length)
                assert deployment.complete(prompt, OUTPUT) == reference.greedy(prompt, OUTPUT)
    finally:
        reference.close()


def test_checksums_of_gpu_memory(model: Path, reference: Reference, tmp_path: Path) -> None:
    with Deployment(tmp_path, model, *FLAGS, "--kv-checksum") as deployment:
        prompt = reference.prompt(200, seed=1)
        assert deployment.complete(prompt, OUTPUT) == reference.greedy(prompt, OUTPUT)
        deployment.wait_whole()
