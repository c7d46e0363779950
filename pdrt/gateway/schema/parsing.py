"""From the body of a request to what it means. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdrt.gateway.chat.bodies import Message, given
from pdrt.gateway.chat.formats import response_grammar
from pdrt.gateway.chat.messages import template_kwargs, template_messages
from pdrt.gateway.errors import context_length_exceeded, invalid
from pdrt.gateway.schema.bodies import Body, ChatBody, CompletionBody, TokenizeBody
from pdrt.gateway.schema.bounds import (
    COMPLETION_TOKENS_DEFAULT,
    MESSAGES_MAX,
    PARTS_MAX,
    Limits,
)
from pdrt.gateway.schema.decoding import decode
from pdrt.gateway.schema.generation import (
    ChatPrompt,
    Encoding,
    Generation,
    Prompt,
    Shown,
    Streaming,
)
from pdrt.gateway.schema.prompts import parse_prompts
from pdrt.gateway.schema.sampling import parse_sampling, parse_stops


def parse_chat(body: bytes, limits: Limits) -> Generation:
    """Raises `ApiError` naming the field."""
    chat = decode(body, ChatBody)
    if chat.max_tokens is not None and chat.max_completion_tokens is not None:
        message = "'max_tokens' is the older name of 'max_completion_tokens'; give only one"
        raise invalid(message, "max_tokens")
    name = "max_tokens" if chat.max_completion_tokens is None else "max_completion_tokens"
    tokens = chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens
    if chat.top_logprobs and not chat.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    _check_logprobs(logprobs, "top_logprobs", limits)
    shown = _shown(chat, False, logprobs, chat.include_reasoning is not False)
    prompts = (_chat_prompt(chat, limits),)
    return _generation(chat, prompts, shown, (tokens, name), limits)


def parse_completion(body: bytes, limits: Limits) -> Generation:
    """Raises `ApiError` naming the field."""
    completion = decode(body, CompletionBody)
    _check_logprobs(completion.logprobs, "logprobs", limits)
    tokens = completion.max_tokens
    if tokens is None:
        tokens = max(COMPLETION_TOKENS_DEFAULT, completion.min_tokens or 0)
    prompts = parse_prompts(completion.prompt, limits)
    shown = _shown(completion, bool(completion.echo), completion.logprobs, reasoning=True)
    return _generation(completion, prompts, shown, (tokens, "max_tokens"), limits)


def parse_tokenize(body: bytes, limits: Limits) -> tuple[TokenizeBody, Prompt, Encoding]:
    """Raises `ApiError` naming the field."""
    asked = decode(body, TokenizeBody, off=False)
    if (asked.prompt is None) is (asked.messages is None):
        raise invalid("Give either 'prompt' or 'messages'", "prompt")
    if asked.messages is not None:
        return asked, _chat_prompt(asked, limits), Encoding(bool(asked.add_special_tokens))
    assert asked.prompt is not None
    return asked, asked.prompt, Encoding(asked.add_special_tokens is not False)


def _check_logprobs(asked: int | None, param: str, limits: Limits) -> None:
    if (asked or 0) > limits.logprobs_max:
        raise invalid(f"'{param}' is {asked}; at most {limits.logprobs_max}", param)


def _shown(body: Body, echo: bool, logprobs: int | None, reasoning: bool) -> Shown:
    return Shown(
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        stop_string=bool(body.include_stop_str_in_output),
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        reasoning=reasoning,
    )


def _generation(
    body: Body,
    prompts: tuple[Prompt, ...],
    shown: Shown,
    tokens_and_param: tuple[int | None, str],
    limits: Limits,
) -> Generation:
    """`tokens_and_param`: how many are wanted, and the field that says so."""
    tokens, tokens_param = tokens_and_param
    _check_logprobs(body.prompt_logprobs, "prompt_logprobs", limits)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("'prompt_logprobs' cannot be streamed", "prompt_logprobs")
    if tokens is not None and (body.min_tokens or 0) > tokens:
        raise invalid(f"'min_tokens' is more than '{tokens_param}' ({tokens})", "min_tokens")
    n = body.n or 1
    if len(prompts) * n > limits.choices_max:
        asked = f"{len(prompts)} prompts with n = {n}"
        raise invalid(f"{asked}: at most {limits.choices_max} choices in one request", "n")
    echoed = shown.logprobs if shown.echo else None
    of_prompt = [k for k in (echoed, shown.prompt_logprobs) if k is not None]
    is_chat = isinstance(prompts[0], ChatPrompt)
    return Generation(
        model=body.model,
        prompts=prompts,
        n=n,
        # A chat template writes its special tokens itself.
        encoding=Encoding(_or(body.add_special_tokens, not is_chat), body.truncate_prompt_tokens),
        max_tokens=tokens,
        max_tokens_param=tokens_param,
        sampling=parse_sampling(
            body, limits.sampling, shown.logprobs, max(of_prompt, default=None)
        ),
        seed=None if body.seed is None else body.seed % 2**64,
        stops=parse_stops(body.stop),
        shown=shown,
        response_grammar=response_grammar(body, limits.grammar_bytes_max),
        response_param=_format_param(body),
        cache_salt=body.cache_salt or "",
        streaming=_streaming(body),
    )


def _format_param(body: Body) -> str:
    """The field that says what the output looks like; `response_grammar` sees to it that there is
    one at most."""
    named = {
        "structured_outputs": body.structured_outputs,
        "guided_json": given(body.guided_json),
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }
    return next((name for name, value in named.items() if value is not None), "response_format")


def _or(value: bool | None, default: bool) -> bool:
    return default if value is None else value


def _streaming(body: Body) -> Streaming | None:
    options = body.stream_options
    if not body.stream:
        if options is not None:
            raise invalid("'stream_options' needs 'stream' to be true", "stream_options")
        return None
    include = options is not None and bool(options.include_usage)
    continuous = options is not None and bool(options.continuous_usage_stats)
    if continuous and not include:
        param = "stream_options.continuous_usage_stats"
        raise invalid("'continuous_usage_stats' needs 'include_usage' to be true", param)
    return Streaming(include, continuous)


def _chat_prompt(body: ChatBody | TokenizeBody, limits: Limits) -> ChatPrompt:
    assert body.messages is not None
    _check_messages(body.messages, limits.tokens_max)
    continues = bool(body.continue_final_message)
    generates = _or(body.add_generation_prompt, not continues)
    if continues and generates:
        message = "'continue_final_message' and 'add_generation_prompt' exclude each other"
        raise invalid(message, "continue_final_message")
    return ChatPrompt(
        messages=template_messages(body.messages),
        tools=tuple(body.tools or ()),
        tool_choice=body.tool_choice if isinstance(body, ChatBody) else None,
        parallel_tool_calls=body.parallel_tool_calls if isinstance(body, ChatBody) else None,
        template_kwargs=template_kwargs(given(body.chat_template_kwargs)),
        add_generation_prompt=generates,
        continue_final_message=continues,
    )


def _check_messages(messages: Sequence[Message], tokens_max: int) -> None:
    if len(messages) > MESSAGES_MAX:
        raise invalid(f"{len(messages)} messages; at most {MESSAGES_MAX}", "messages")
    if len(messages) > tokens_max:
        asked = f"{len(messages)} messages, each of a token at least"
        raise context_length_exceeded(asked, tokens_max, "messages")
    parts = sum(len(m.content) for m in messages if isinstance(m.content, list))
    if parts > PARTS_MAX:
        raise invalid(f"The messages hold {parts} parts; at most {PARTS_MAX}", "messages")
