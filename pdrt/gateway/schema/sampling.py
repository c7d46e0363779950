"""Fields of a body that are about how tokens are drawn. Pure."""

from __future__ import annotations

from typing import TypeVar

from pdrt.gateway.errors import invalid
from pdrt.gateway.schema.bodies import Body
from pdrt.gateway.schema.bounds import (
    LOGIT_BIAS_MAX,
    STOP_CHARACTERS_MAX,
    STOP_TOKEN_IDS_MAX,
    STOPS_MAX,
)
from pdrt.sampling import Sampling, SamplingDefaults

Number = TypeVar("Number", int, float)


def parse_sampling(
    body: Body, defaults: SamplingDefaults, logprobs: int | None, prompt_logprobs: int | None
) -> Sampling:
    """All but `max_tokens`, `seed` and the grammar, which depend on the model.

    Raises:
        ApiError: 400 naming the field.
    """
    if len(body.stop_token_ids or ()) > STOP_TOKEN_IDS_MAX:
        raise invalid(f"'stop_token_ids' holds more than {STOP_TOKEN_IDS_MAX}", "stop_token_ids")
    if len(body.logit_bias or ()) > LOGIT_BIAS_MAX:
        raise invalid(f"'logit_bias' holds more than {LOGIT_BIAS_MAX} tokens", "logit_bias")
    return Sampling(
        max_tokens=0,
        min_tokens=body.min_tokens or 0,
        temperature=_given(body.temperature, defaults.temperature),
        top_p=_given(body.top_p, defaults.top_p),
        top_k=max(0, _given(body.top_k, defaults.top_k)),
        min_p=_given(body.min_p, defaults.min_p),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=tuple(sorted((body.logit_bias or {}).items())),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def parse_stops(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings.

    Raises:
        ApiError: 400 naming `stop`.
    """
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > STOPS_MAX:
        raise invalid(f"'stop' holds {len(stops)} strings; at most {STOPS_MAX}", "stop")
    if not all(stops):
        raise invalid("A stop string must not be empty", "stop")
    if any(len(stop) > STOP_CHARACTERS_MAX for stop in stops):
        raise invalid(f"A stop string has at most {STOP_CHARACTERS_MAX} characters", "stop")
    return tuple(stops)
