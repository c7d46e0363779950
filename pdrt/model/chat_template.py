"""A model's chat template: from messages to the text of a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from pdrt.errors import RequestRefused

ERROR_CHARACTERS_MAX = 300
"""Some errors quote the whole conversation."""
OURS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)
"""Variables that other fields of a request decide."""
TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError,
    RecursionError,
)  # fmt: skip
"""What templates raise on purpose or on content of an unexpected type, and what transformers
raises on its structure."""


class ChatTemplate:
    """The template of one model. Clients give variables at most, never a template: that is code.

    Attributes:
        exists: whether the model has a template at all.
        text: its source, the one for conversations with tools if there are several.
        renders_tools: whether it shows tools to the model.
        variables: names that clients may set. Those that the template itself sets, but not on
            every path, are among them: such are its switches with defaults.
    """

    def __init__(self, inner: Any) -> None:
        """`inner` is the tokenizer of transformers, whose sandbox runs the template."""
        self._inner = inner
        self.exists = bool(inner.chat_template)
        self.text = _text_of(inner.chat_template)
        names = _variables(self.text)
        self.renders_tools = "tools" in names
        parameters = inspect.signature(inner.apply_chat_template).parameters
        self.variables = names - OURS - parameters.keys() - inner.special_tokens_map.keys()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Special tokens are in it as text.

        A variable that the template does not have is accepted if it is null or false: that asks
        for nothing.

        Raises:
            RequestRefused: there is no template, it has no tools or no such variable, or it refuses
                the messages.
        """
        if not self.exists:
            raise RequestRefused("this model has no chat template; use /v1/completions", "messages")
        if tools and not self.renders_tools:
            raise RequestRefused("this model's chat template has no tools", "tools")
        if add_generation_prompt and continue_final_message:
            message = "'continue_final_message' needs 'add_generation_prompt' to be false"
            raise RequestRefused(message, "continue_final_message")
        try:
            text: str = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **self._known(kwargs or {}),
            )
        except TEMPLATE_ERRORS as error:
            why = str(error)[:ERROR_CHARACTERS_MAX] or type(error).__name__
            raise RequestRefused(f"the chat template refuses this: {why}", "messages") from error
        return text

    def _known(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        known = {}
        for name, value in kwargs.items():
            if name in self.variables:
                known[name] = value
            elif value is not None and value is not False:
                there_are = ", ".join(sorted(self.variables)) or "none"
                message = (
                    f"this model's chat template has no variable '{name[:100]}' that may be set "
                    f"(there are: {there_are})"
                )
                raise RequestRefused(message, "chat_template_kwargs")
        return known


def _text_of(template: str | dict[str, str] | None) -> str:
    if isinstance(template, dict):
        return template.get("tool_use") or template.get("default") or ""
    return template or ""


def _variables(text: str) -> frozenset[str]:
    """Names that a template takes from outside; none if it is broken, which rendering will tell."""
    environment = jinja2.Environment(extensions=[_Generation, jinja2.ext.loopcontrols])
    # What transformers gives templates, and what no client may replace.
    provided = dict.fromkeys(("raise_exception", "strftime_now"))
    environment.globals.update(provided)
    try:
        names = jinja2.meta.find_undeclared_variables(environment.parse(text))
    except jinja2.TemplateError:
        return frozenset()
    return frozenset(name for name in names if not name.startswith("_"))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, which marks what the assistant says; it changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
