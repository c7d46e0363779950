"""Fields of a body that are about how tokens are drawn. Pure."""

from __future__ import annotations

from pdrt.gateway.errors import invalid
from pdrt.gateway.schema.bodies import Body
from pdrt.gateway.schema.bounds import (
    LOGIT_BIAS_MAX,
    STOP_CHARACTERS_MAX,
    STOP_TOKEN_IDS_MAX,
    STOPS_MAX,
)
from pdrt.sampling import Sampling


def parse_sampling(body: Body, logprobs: int | None, prompt_logprobs: int | None) -> Sampling:
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
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple(sorted((body.logit_bias or {}).items())),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


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
