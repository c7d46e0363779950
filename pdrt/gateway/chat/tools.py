"""What `tools`, `tool_choice` and `parallel_tool_calls` ask for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdrt.gateway.chat.bodies import Tool, ToolChoice
from pdrt.gateway.chat.styles import ToolStyle


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
    constraint: dict[str, Any] | None = None
    """What the output must look like, as an xgrammar format; None: anything."""


def plan_tools(
    tools: Sequence[Tool] | None,
    choice: ToolChoice | None,
    parallel: bool | None,
    support: ToolSupport,
) -> ToolPlan:
    """`choice` None means `auto` where there are tools, as OpenAI has it.

    Raises:
        ApiError: 400 naming `tools`, `tool_choice` or the schema, also where the chat template has
            no tools or nobody knows how the model writes calls: to leave tools out in silence would
            be a lie. With `tool_choice` "none" tools are accepted and not shown to the model.
    """
    return ToolPlan()
