"""One grammar for all that constrains an output. Pure."""

from __future__ import annotations

from pdrt.gateway.chat.styles import ReasoningStart
from pdrt.gateway.chat.tools import ToolPlan
from pdrt.sampling import Grammar


def output_grammar(
    response: Grammar | None, plan: ToolPlan, start: ReasoningStart, grammar_bytes_max: int
) -> Grammar | None:
    """The grammar of the whole output, for `Sampling.grammar`.

    Reasoning comes first and is free. Then forced calls alone; or, where the model may choose,
    either calls or an answer in the response format.

    Raises:
        ApiError: 400: all together are larger than `grammar_bytes_max`.
    """
    return response
