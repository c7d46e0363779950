"""What a request may ask of the sampler, and what it may learn of a token: frozen structs, used by
messages and executor alike."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=2**31 - 1)]
"""-1 and 0 switch it off."""
MinP = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=100)]
"""Above 0; within bounds that keep every logit finite."""


class GrammarKind(Enum):
    """What `Grammar.text` is."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema, as JSON."""
    JSON_OBJECT = "json_object"
    """Any JSON object; the text is empty."""
    REGEX = "regex"
    EBNF = "ebnf"
    """GBNF-like grammar whose start is `root`."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's structural tag, as JSON: free text with constrained parts in it."""


class Grammar(msgspec.Struct, frozen=True):
    """What the output must look like. Hashable; equal ones compile once per process."""

    kind: GrammarKind
    text: str


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling parameters of one request, already validated by the gateway.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filter off.
    The random draw of the token at absolute position p depends on (`seed`, p) only, so that a
    request which moves to another worker goes on with the same draws. All else that a draw depends
    on is a function of the tokens so far, so a resumed request needs no other state.
    """

    max_tokens: int
    """Output tokens at most, counted over the whole request (not per room); 0 only scores."""
    min_tokens: int = 0
    """End-of-sequence tokens are masked until this many output tokens exist."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    """Unsigned 64 bit; the gateway draws one where the client gave none."""
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output as an end-of-sequence token does."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it is in the output."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; above 0."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token, added to its logit), each token once."""
    grammar: Grammar | None = None
    logprobs: int | None = None
    """Report each output token's log probability and that many of the most likely ones."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""

    @property
    def needs_history(self) -> bool:
        """The tokens so far decide what may come next, or how likely it is."""
        return (
            self.grammar is not None
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a model's own generation_config.json recommends where a client gives nothing."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of one token: natural logarithms of the probabilities that the model itself gives, before
    temperature, penalties, bias, grammar and filters (vLLM's `raw_logprobs`)."""

    logprob: float
    """Of the token itself; finite (-inf is sent as -9999.0)."""
    rank: int
    """How many tokens are at least as likely, itself included: 1 is the most likely."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob) of the most likely tokens, as many as were asked for, best first."""
