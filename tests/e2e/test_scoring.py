"""Log probabilities over real workers are those of the model in one piece.

The requests are those that lm-eval 0.4.13 sends (`local-completions`, of
lm_eval/models/openai_completions.py), which reads the answers by position: one field in another
place, and every score is wrong without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx2
import pytest
import torch

from tests.e2e.deployment import HANG_SECONDS, Deployment
from tests.e2e.reference import MARGIN, Reference, words

pytestmark = pytest.mark.e2e

CLOSE = 1e-3
"""Of a log probability, and of the sum over a continuation."""
LENGTHS = (2, 5, 16, 17, 33, 100)
"""Tokens of context and continuation: within a page, at its end, over several steps of prefill."""


async def post(deployment: Deployment, path: str = "completions", **body: Any) -> dict[str, Any]:
    async with httpx2.AsyncClient(timeout=HANG_SECONDS, trust_env=False) as http:
        response = await http.post(
            f"{deployment.url}/v1/{path}", json={"model": deployment.name, **body}
        )
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def expected(reference: Reference, ids: Sequence[int], begin: int) -> tuple[float, bool]:
    """The sum over `ids[begin:]`, and whether each is the likeliest."""
    rows = reference.logprobs(ids)[begin - 1 : -1]
    chosen = rows.gather(1, rows.new_tensor(ids[begin:]).long()[:, None])[:, 0]
    return chosen.sum().item(), bool((chosen == rows.max(dim=-1).values).all())


def read(choice: dict[str, Any], begin: int, end: int) -> tuple[float, bool]:
    """As lm-eval does; for it, the two floats of a likeliest token have to be the same."""
    logprobs = choice["logprobs"]["token_logprobs"][begin:end]
    likely = choice["logprobs"]["top_logprobs"][begin:end]
    pairs = zip(logprobs, likely, strict=True)
    return sum(logprobs), all(logprob == max(top.values()) for logprob, top in pairs)


@pytest.mark.parametrize("max_tokens", (1, 0))
async def test_lm_evals_loglikelihood(
    tiny_up: Deployment, tiny_reference: Reference, max_tokens: int
) -> None:
    """A batch of token ids of all lengths. Every other continuation is the greedy one."""
    batch = [words(tiny_reference, length, seed=length) for length in LENGTHS]
    begins = [length - 1 - index % 2 * (length // 3) for index, length in enumerate(LENGTHS)]
    for ids in batch[::2]:
        ids[-1:] = tiny_reference.greedy(ids[:-1], 1, ignore_eos=True)[0]
    body = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "seed": 1234, "echo": True}
    answer = await post(tiny_up, prompt=batch, **body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(batch)))
    assert answer["usage"]["prompt_tokens"] == sum(LENGTHS)
    verdicts = set()
    for index, (ids, choice) in enumerate(zip(batch, answer["choices"], strict=True)):
        logprobs, begin = choice["logprobs"], begins[index]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert len(logprobs["tokens"]) == len(ids) + max_tokens
        # lm-eval leaves out the last item, whichever it is; we know better.
        total, is_greedy = read(choice, begin, len(ids))
        wanted, is_likeliest = expected(tiny_reference, ids, begin)
        assert total == pytest.approx(wanted, abs=CLOSE)
        assert is_greedy == is_likeliest
        assert is_greedy or index % 2 == 1
        verdicts.add(is_greedy)
    assert verdicts == {True, False}
    whole = await post(tiny_up, prompt=batch[-1], **body)
    alone, among = whole["choices"][0], answer["choices"][-1]
    assert read(alone, 1, LENGTHS[-1])[0] == pytest.approx(
        read(among, 1, LENGTHS[-1])[0], abs=CLOSE
    )


async def test_lm_evals_generation(tiny_up: Deployment, tiny_reference: Reference) -> None:
    """Of a batch, each up to the first stop string; lm-eval adds that of the end of sequence."""
    batch = [words(tiny_reference, length, seed=length) for length in LENGTHS]
    outputs = [tiny_reference.greedy(ids, 24, ignore_eos=True)[0] for ids in batch]
    texts = [tiny_reference.decode(output) for output in outputs]
    stop = texts[0][8]
    answer = await post(
        tiny_up,
        prompt=batch,
        max_tokens=24,
        temperature=0,
        stop=[stop, tiny_reference.tokenizer.eos_token],
        seed=1234,
    )
    ended = 0
    for choice, ids in zip(answer["choices"], batch, strict=True):
        output, margins, _ = tiny_reference.greedy(ids, 24)
        if min(margins) > MARGIN:
            whole = tiny_reference.decode(output)
            assert choice["text"] == whole.partition(stop)[0]
            ended += choice["text"] != whole
    assert ended
    assert {choice["finish_reason"] for choice in answer["choices"]} <= {"stop", "length"}


async def test_likely_tokens_and_their_ranks(
    tiny_up: Deployment, tiny_reference: Reference
) -> None:
    """Of prompt and output, before temperature, penalties, biases and filters change anything."""
    prompt = words(tiny_reference, 40, seed=40)
    answer = await post(
        tiny_up,
        prompt=prompt,
        max_tokens=20,
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=3,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        **{"temperature": 1.5, "seed": 3, "top_k": 20, "frequency_penalty": 1, "min_p": 0.01},
        logit_bias={"50": 5},
    )
    (choice,) = answer["choices"]
    ids = [*prompt, *choice["token_ids"]]
    rows = tiny_reference.logprobs(ids)
    assert choice["prompt_token_ids"] == prompt and len(ids) == 60
    assert choice["prompt_logprobs"][0] is None
    for position, found in enumerate(choice["prompt_logprobs"][1:], start=1):
        row, own = rows[position - 1], found[str(ids[position])]
        assert own["logprob"] == pytest.approx(row[ids[position]].item(), abs=CLOSE)
        better, as_good = row > own["logprob"] + CLOSE, row >= own["logprob"] - CLOSE
        assert better.sum() < own["rank"] <= as_good.sum()
        assert_likely({key: one["logprob"] for key, one in found.items()}, row)
    shown = choice["logprobs"]
    for number, token in enumerate(choice["token_ids"]):
        row = rows[len(prompt) + number - 1]
        assert shown["tokens"][number] == f"token_id:{token}"
        assert shown["token_logprobs"][number] == pytest.approx(row[token].item(), abs=CLOSE)
        top = shown["top_logprobs"][number]
        assert_likely({key.removeprefix("token_id:"): value for key, value in top.items()}, row)


def assert_likely(found: dict[str, float], row: torch.Tensor) -> None:
    """Three likely ones, and the token itself if it is none of them."""
    for token, logprob in found.items():
        assert logprob == pytest.approx(row[int(token)].item(), abs=CLOSE)
    best = sorted(found.values(), reverse=True)[:3]
    assert best == pytest.approx(row.topk(3).values.tolist(), abs=CLOSE)
    assert 3 <= len(found) <= 4
