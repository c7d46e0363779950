"""Which requests a decode worker can never serve. Pure."""

from __future__ import annotations

from pdrt.kv.layout import KvLayout
from pdrt.model.identity import ModelIdentity
from pdrt.protocol.gateway_messages import Submit


def refusal(
    submit: Submit, identity: ModelIdentity, layout: KvLayout, pages_total: int
) -> str | None:
    """Why `submit` can never be served, in words; None when it can."""
    limit, vocabulary = identity.max_model_len, identity.vocab_size
    length = len(submit.token_ids) + len(submit.output_token_ids)
    wants_token = submit.sampling.max_tokens > len(submit.output_token_ids)
    if not submit.token_ids:
        return "the prompt is empty"
    if length + wants_token > limit:
        return f"{length} tokens, {limit} is the model's limit"
    if layout.pages_for(length + wants_token) > pages_total:
        return f"{length} tokens do not fit into the KV pool"
    for tokens in (submit.token_ids, submit.output_token_ids):
        if tokens and (min(tokens) < 0 or max(tokens) >= vocabulary):
            return f"token ids must be below {vocabulary}"
    if not submit.sampling.names_tokens_below(vocabulary):
        return f"biased and stop tokens must be below {vocabulary}"
    return None
