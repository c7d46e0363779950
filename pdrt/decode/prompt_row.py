"""A part of a prompt that is computed here, as the executor is asked for it. Pure."""

from __future__ import annotations

from pdrt.model.batch import Matcher, Row
from pdrt.scheduling.decode_request import DecodeRequest


def prompt_row(request: DecodeRequest, wants_token: bool, matcher: Matcher | None) -> Row:
    """The step's part of the prompt; its last part samples the token after it, if one is wanted.

    `matcher`: of its grammar, if it has one and that has been compiled.
    """
    start, end = request.computed, request.computed + request.step_tokens
    samples = wants_token and end == len(request.tokens)
    scored_end = min(end + 1, request.prompt_tokens) if request.awaits_scores else 0
    return Row(
        token_ids=request.tokens[start:end],
        start=start,
        pages=request.pages,
        sampling=request.sampling if samples else None,
        output_tokens=request.output_tokens,
        history=request.tokens if samples and request.needs_history else (),
        matcher=matcher if samples else None,
        scored=request.tokens[start + 1 : scored_end],
        scored_top=request.sampling.prompt_logprobs or 0,
    )
