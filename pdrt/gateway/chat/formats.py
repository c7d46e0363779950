"""What `response_format`, `structured_outputs` and `guided_*` ask for, as a grammar. Pure."""

from __future__ import annotations

from pdrt.gateway.chat.bodies import FormatFields
from pdrt.sampling import Grammar


def response_grammar(fields: FormatFields, grammar_bytes_max: int) -> Grammar | None:
    """What the answer must look like; None: anything.

    Raises:
        ApiError: 400 naming the field: two formats at once, a schema that is no JSON, is nested
            too deeply or too large.
    """
    return None
