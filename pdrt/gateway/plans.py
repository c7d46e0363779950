"""From a prepared request to its choices: each one request of the core. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdrt.context import RequestContext
from pdrt.gateway.choice import Plan
from pdrt.gateway.effects import Submission
from pdrt.gateway.errors import ApiError, context_length_exceeded, invalid
from pdrt.gateway.preparation import EncodedPrompt, Prepared
from pdrt.gateway.schema.bounds import RESPONSE_LOGPROBS_MAX
from pdrt.gateway.schema.generation import ChatPrompt, Generation
from pdrt.model.identity import ModelIdentity
from pdrt.protocol.codec import FRAME_REST_BYTES, prompt_logprobs_bytes
from pdrt.sampling import Sampling


class Circumstances(msgspec.Struct, frozen=True):
    """What a request meets."""

    identity: ModelIdentity
    tokens_max: int
    """What the context holds."""
    frame_bytes_max: int
    deadline: float
    request_id: str
    traceparent: str
    """Of the span that the request is; empty when nothing is traced."""
    draw_seed: Callable[[], int]
    """Unsigned 64 bit, for a client that gave none."""


def choice_plans(prepared: Prepared, met: Circumstances) -> tuple[Plan, ...]:
    """The choices, by index: all of the first prompt, then all of the next.

    Raises:
        ApiError: 400 naming the field: it does not fit into the context, a token id is none, or
            there are too many log probabilities.
    """
    generation = prepared.generation
    samplings = [_sampling(prepared, prompt, met) for prompt in prepared.prompts]
    _check_logprobs(generation, samplings)
    ends = set(generation.sampling.stop_token_ids)
    if not generation.sampling.ignore_eos:
        ends.update(met.identity.eos_token_ids)
    plans = []
    for prompt_index, (prompt, sampling) in enumerate(
        zip(prepared.prompts, samplings, strict=True)
    ):
        for i in range(generation.n):
            index = prompt_index * generation.n + i
            submission = Submission(
                prompt.token_ids,
                _of_choice(sampling, generation, i, met.draw_seed),
                met.deadline,
                frozenset(ends),
                generation.cache_salt,
                RequestContext(
                    _request_id(met.request_id, index, generation.choices), met.traceparent
                ),
            )
            plans.append(
                Plan(
                    index,
                    prompt_index,
                    submission,
                    generation.shown,
                    prompt.text,
                    generation.streaming is not None and generation.streaming.continuous_usage,
                    generation.streaming is not None and generation.streaming.include_usage,
                    prepared.grammar_param,
                )
            )
    return tuple(plans)


def _request_id(request_id: str, index: int, choices: int) -> str:
    return request_id if choices == 1 else f"{request_id}-{index}"


def _of_choice(
    sampling: Sampling, generation: Generation, i: int, draw_seed: Callable[[], int]
) -> Sampling:
    seed = draw_seed() if generation.seed is None else choice_seed(generation.seed, i)
    top = sampling.prompt_logprobs
    # The answer to a chat shows them once, not per choice.
    if i > 0 and isinstance(generation.prompts[0], ChatPrompt):
        top = None
    return msgspec.structs.replace(sampling, seed=seed, prompt_logprobs=top)


def choice_seed(seed: int, i: int) -> int:
    """Of the i-th choice of a prompt: the client's own for the first, so that more choices do not
    change it, and then far apart, so that the next seed's choices are others. It does not depend on
    the other prompts of the request (SplitMix64)."""
    if i == 0:
        return seed
    mixed = (seed + i * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % 2**64
    return mixed ^ (mixed >> 31)


def _sampling(prepared: Prepared, prompt: EncodedPrompt, met: Circumstances) -> Sampling:
    """Of one prompt's choices, fitted into the context."""
    sampling, size = prepared.generation.sampling, len(prompt.token_ids)
    vocab_size = met.identity.vocab_size
    if any(token >= vocab_size for token in sampling.stop_token_ids):
        raise invalid(f"Token ids must be from 0 to {vocab_size - 1}", "stop_token_ids")
    if any(token >= vocab_size for token, _ in sampling.logit_bias):
        raise invalid(f"Token ids must be from 0 to {vocab_size - 1}", "logit_bias")
    max_tokens = _max_tokens(prepared.generation, size, met.tokens_max)
    top = sampling.prompt_logprobs
    if top is not None:
        needed = FRAME_REST_BYTES + prompt_logprobs_bytes(size, top)
        if needed > met.frame_bytes_max:
            raise _too_many(f"{size} prompt tokens with {top} likely ones each", prepared)
    return msgspec.structs.replace(
        sampling,
        max_tokens=max_tokens,
        grammar=prepared.grammar,
        logprobs=sampling.logprobs if max_tokens else None,
        # The first token has none.
        prompt_logprobs=top if size > 1 else None,
    )


def _max_tokens(generation: Generation, size: int, size_max: int) -> int:
    param = "messages" if isinstance(generation.prompts[0], ChatPrompt) else "prompt"
    max_tokens = generation.max_tokens
    if max_tokens is None:
        max_tokens = size_max - size
        if max_tokens < max(1, generation.sampling.min_tokens):
            raise context_length_exceeded(size + 1, size_max, param)
    elif size > size_max:
        raise context_length_exceeded(size, size_max, param)
    elif size + max_tokens > size_max:
        asked = f"{size + max_tokens} ({size} of the prompt, {max_tokens} of output)"
        raise context_length_exceeded(asked, size_max, generation.max_tokens_param)
    return max_tokens


def _too_many(what: str, prepared: Prepared) -> ApiError:
    shown = prepared.generation.shown
    param = "logprobs" if shown.echo and shown.logprobs is not None else "prompt_logprobs"
    return invalid(f"{what} are more log probabilities than are passed on", param)


def _check_logprobs(generation: Generation, samplings: list[Sampling]) -> None:
    """What an answer in one piece holds at most."""
    top = generation.sampling.logprobs
    if top is None or generation.streaming is not None:
        return
    tokens = generation.n * sum(sampling.max_tokens for sampling in samplings)
    if tokens * (1 + top) > RESPONSE_LOGPROBS_MAX:
        raise invalid(
            f"{tokens} tokens with {top} likely ones each are more log probabilities than one "
            "answer holds; ask for fewer tokens or choices, or stream it",
            "logprobs",
        )
