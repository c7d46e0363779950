"""What `tools`, `tool_choice` and `parallel_tool_calls` ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdrt.gateway.chat.bodies import TOOLS_MAX, NamedTool, Tool, ToolChoice, given
from pdrt.gateway.chat.json_text import decode_object
from pdrt.gateway.chat.styles import ToolStyle
from pdrt.gateway.errors import invalid

TOOLS_BYTES_MAX = 1024 * 1024
"""Schemas of all tools together, which the template writes into the prompt. It is more than most
contexts hold."""
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}


class ToolSupport(msgspec.Struct, frozen=True):
    """What this gateway and its model can do with tools."""

    style: ToolStyle | None
    """How the model writes calls; None: switched off, or unknown."""
    template_renders: bool
    """The chat template shows tools to the model."""
    grammar_bytes_max: int


class ToolPlan(msgspec.Struct, frozen=True):
    """What is done about tools in one request."""

    rendered: tuple[dict[str, Any], ...] | None = None
    """What the chat template gets as `tools`."""
    style: ToolStyle | None = None
    """The calls that are looked for in the output; None: none."""
    names: frozenset[str] = frozenset()
    """The functions there are."""
    calls_max: int | None = None
    """Calls in the answer at most; None: any number."""
    forced: bool = False
    """The output is calls and nothing else."""
    strict: bool = False
    """Calls obey the schemas even where the model may choose whether to call."""
    schemas: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Name and schema of the arguments of each function that may be called."""


def plan_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    support: ToolSupport,
) -> ToolPlan:
    """`choice` None means `auto` where there are tools, as OpenAI has it.

    A call that is forced is written in the model's own format, but Python-like calls as the JSON
    of Llama 3: no schema can be imposed on Python.

    Raises:
        ApiError: 400 naming `tools`, `tool_choice` or the schema, also where the chat template has
            no tools or nobody knows how the model writes calls: to leave tools out in silence would
            be a lie. With `tool_choice` "none" tools are accepted and not shown to the model.
    """
    tools = tools or ()
    _check_tools(tools)
    schemas = _schemas(tools)
    if not tools and choice not in (None, "none", "auto"):
        raise invalid("'tool_choice' needs 'tools'", "tool_choice")
    if not tools or choice == "none":
        return ToolPlan()
    style = _style(support)
    forced = choice not in (None, "auto")
    strict = not forced and any(tool.function.strict for tool in tools)
    if style is ToolStyle.PYTHONIC and strict:
        message = "this model writes calls as Python, which 'strict' cannot be imposed on"
        raise invalid(message, f"tools[{_first_strict(tools)}].function.strict")
    return ToolPlan(
        rendered=tuple(
            _rendered(tool, schema) for tool, (_, schema) in zip(tools, schemas, strict=True)
        ),
        style=ToolStyle.LLAMA3_JSON if forced and style is ToolStyle.PYTHONIC else style,
        names=frozenset(name for name, _ in schemas),
        calls_max=1 if parallel is False or isinstance(choice, NamedTool) else None,
        forced=forced,
        strict=strict,
        schemas=_chosen(schemas, choice) if isinstance(choice, NamedTool) else schemas,
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    if len(tools) > TOOLS_MAX:
        raise invalid(f"{len(tools)} tools; at most {TOOLS_MAX}", "tools")
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in seen:
            raise invalid(f"Two tools are named '{name}'", f"tools[{index}].function.name")
        seen.add(name)
    if sum(len(bytes(tool.function.parameters)) for tool in tools) > TOOLS_BYTES_MAX:
        raise invalid(f"The tools' schemas are larger than {TOOLS_BYTES_MAX} bytes", "tools")


def _schemas(tools: Sequence[Tool]) -> tuple[tuple[str, dict[str, Any]], ...]:
    schemas = []
    for index, tool in enumerate(tools):
        param = f"tools[{index}].function.parameters"
        raw = given(tool.function.parameters)
        schema = NO_ARGUMENTS if raw is None else decode_object(raw, TOOLS_BYTES_MAX, param)
        if schema.setdefault("type", "object") != "object":
            raise invalid(f"'{param}' must be the schema of an object", param)
        schemas.append((tool.function.name, schema))
    return tuple(schemas)


def _style(support: ToolSupport) -> ToolStyle:
    if not support.template_renders:
        raise invalid(
            "This model's chat template does not know tools: serve a model whose template does",
            "tools",
        )
    if support.style is None:
        message = (
            "Tool calls are switched off here, or the way this model writes them is not known "
            "(see --tool-call-parser)"
        )
        raise invalid(message, "tools")
    return support.style


def _first_strict(tools: Sequence[Tool]) -> int:
    return next(index for index, tool in enumerate(tools) if tool.function.strict)


def _rendered(tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    return {"type": "function", "function": {**function, "parameters": schema}}


def _chosen(
    schemas: tuple[tuple[str, dict[str, Any]], ...], choice: NamedTool
) -> tuple[tuple[str, dict[str, Any]], ...]:
    chosen = tuple(item for item in schemas if item[0] == choice.function.name)
    if not chosen:
        message = f"There is no tool named '{choice.function.name}'"
        raise invalid(message, "tool_choice.function.name")
    return chosen
