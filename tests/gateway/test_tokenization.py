"""/tokenize, /detokenize and /version."""

from __future__ import annotations

from typing import Any

import pytest

from pdrt import __version__
from tests.gateway.conftest import Deployment

TEXT = "The quick 🙂"
MESSAGES = [{"role": "user", "content": TEXT}]


async def test_there_and_back(deployment: Deployment) -> None:
    answer = (await deployment.http.post("/tokenize", json={"prompt": TEXT})).json()
    ids = deployment.ids(TEXT)
    assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    body = {"model": "tiny", "tokens": ids}
    assert (await deployment.http.post("/detokenize", json=body)).json() == {"prompt": TEXT}


async def test_messages_are_tokenized_as_chat_does(deployment: Deployment) -> None:
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        options: dict[str, Any] = {"add_generation_prompt": True, **fields}
        if "continue_final_message" in fields:
            options["add_generation_prompt"] = False
        body = {"model": "tiny", "messages": MESSAGES, "return_token_strs": True, **fields}
        answer = (await deployment.http.post("/tokenize", json=body)).json()
        assert answer["tokens"] == deployment.tokenizer.apply_chat_template(MESSAGES, **options)
        assert len(answer["token_strs"]) == answer["count"] == len(answer["tokens"])
        assert answer["token_strs"][:2] == ["<|im_start|>", "user"] or "user" not in answer


async def test_special_tokens_show_in_what_is_detokenized(deployment: Deployment) -> None:
    ids = deployment.tokenizer.apply_chat_template(MESSAGES)
    answer = (await deployment.http.post("/detokenize", json={"tokens": ids})).json()
    assert answer["prompt"].startswith("<|im_start|>user\n" + TEXT)
    assert (await deployment.http.post("/detokenize", json={"tokens": []})).json()["prompt"] == ""


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "best_of": 1}, 400, "best_of"),
        ("/tokenize", {"prompt": "x" * 500_000}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "1"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**40]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 513}, 400, "tokens"),
        ("/detokenize", {"tokens": [], "model": "other"}, 404, "model"),
    ],
)
async def test_what_is_wrong_is_named(
    deployment: Deployment, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    response = await deployment.http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error


async def test_the_version(deployment: Deployment) -> None:
    assert (await deployment.http.get("/version")).json() == {"version": __version__}
