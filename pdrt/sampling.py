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
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Natural = Annotated[int, Meta(ge=0)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
"""Of some vocabulary: tokenizers take 32 bits."""


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
    """Sampling parameters of one request, already validated by the gateway; a frame with others
    does not decode.

    `temperature` 0 means greedy. `top_k` 0 and `top_p` 1 and `min_p` 0 switch the filter off.
    The random draw of the token at absolute position p depends on (`seed`, p) only, so that a
    request which moves to another worker goes on with the same draws. All else that a draw depends
    on is a function of the tokens so far, so a resumed request needs no other state.
    """

    max_tokens: Natural
    """Output tokens at most, counted over the whole request (not per room); 0 only scores."""
    min_tokens: Natural = 0
    """End-of-sequence tokens are masked until this many output tokens exist."""
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    min_p: MinP = 0.0
    seed: Natural = 0
    """Unsigned 64 bit; the gateway draws one where the client gave none."""
    ignore_eos: bool = False
    stop_token_ids: tuple[Natural, ...] = ()
    """Token ids that end the output as an end-of-sequence token does."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logit of every token that is in the output."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from the logit of a token for each time that it is in the output."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; above 0."""
    logit_bias: tuple[tuple[Natural, Bias], ...] = ()
    """(token, added to its logit), each token once."""
    grammar: Grammar | None = None
    logprobs: Natural | None = None
    """Report each output token's log probability and that many of the most likely ones."""
    prompt_logprobs: Natural | None = None
    """The same for every prompt token but the first."""

    def names_tokens_below(self, vocab_size: int) -> bool:
        """Every token that it names is one. A forward with another would fail all of its rows."""
        named = max((token for token, _ in self.logit_bias), default=0)
        return max(named, *self.stop_token_ids, 0) < vocab_size

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
    rank: Natural
    """How many tokens are at least as likely, itself included: 1 is the most likely."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """(token, logprob) of the most likely tokens, as many as were asked for, best first."""
