"""From tools and tool_choice to what is rendered, forced and looked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdrt.gateway.chat.bodies import Tool, ToolChoice
from pdrt.gateway.chat.styles import ToolStyle
from pdrt.gateway.chat.tools import TOOLS_BYTES_MAX, ToolPlan, ToolSupport, plan_tools
from pdrt.gateway.errors import ApiError

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
HERMES = ToolSupport(ToolStyle.HERMES, True, 65536)
PYTHONIC = ToolSupport(ToolStyle.PYTHONIC, True, 65536)


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


TOOLS = [tool("get_weather", description="Of a city.", parameters=SCHEMA), tool("get_time")]
NAMED = {"type": "function", "function": {"name": "get_time"}}


def plan(
    tools: Any, choice: Any = None, parallel: bool | None = None, support: ToolSupport = HERMES
) -> ToolPlan:
    """As bodies are decoded."""
    decoded = msgspec.json.decode(msgspec.json.encode(tools), type=list[Tool] | None)
    return plan_tools(decoded, msgspec.convert(choice, ToolChoice | None), parallel, support)


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_may_choose(choice: str | None) -> None:
    made = plan(TOOLS, choice)
    assert made.style is ToolStyle.HERMES
    assert made.names == {"get_weather", "get_time"}
    assert (made.forced, made.strict, made.calls_max) == (False, False, None)
    assert made.rendered == (
        tool("get_weather", description="Of a city.", parameters=SCHEMA),
        tool("get_time", parameters={"type": "object", "properties": {}}),
    )


def test_required_forces_any_of_the_tools() -> None:
    made = plan(TOOLS, "required")
    assert made.forced
    assert [name for name, _ in made.schemas] == ["get_weather", "get_time"]
    assert made.calls_max is None
    assert plan(TOOLS, "required", parallel=False).calls_max == 1


def test_a_named_function_is_called_once_and_all_are_shown() -> None:
    made = plan(TOOLS, NAMED)
    assert made.forced
    assert [name for name, _ in made.schemas] == ["get_time"]
    assert made.calls_max == 1
    assert made.rendered is not None and len(made.rendered) == 2


@pytest.mark.parametrize("support", [HERMES, ToolSupport(None, False, 65536)])
@pytest.mark.parametrize(
    ("tools", "choice"), [(None, None), ([], "auto"), (None, "none"), (TOOLS, "none")]
)
def test_without_tools_nothing_is_done(tools: Any, choice: Any, support: ToolSupport) -> None:
    assert plan(tools, choice, support=support) == ToolPlan()


def test_strict_counts_where_the_model_may_choose() -> None:
    assert plan([tool("f", strict=True)]).strict
    assert not plan([tool("f", strict=True)], "required").strict


def test_forced_calls_of_a_python_model_are_json() -> None:
    assert plan(TOOLS, support=PYTHONIC).style is ToolStyle.PYTHONIC
    assert plan(TOOLS, "required", support=PYTHONIC).style is ToolStyle.LLAMA3_JSON


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    ("tools", "choice", "support", "param"),
    [
        (TOOLS, None, ToolSupport(ToolStyle.HERMES, False, 65536), "tools"),
        (TOOLS, "required", ToolSupport(None, True, 65536), "tools"),
        (None, "required", HERMES, "tool_choice"),
        (None, NAMED, HERMES, "tool_choice"),
        ([tool("f")], NAMED, HERMES, "tool_choice.function.name"),
        ([tool("f"), tool("f")], None, HERMES, "tools[1].function.name"),
        ([tool(f"f{n}") for n in range(129)], None, HERMES, "tools"),
        ([tool("f", parameters=[1])], None, HERMES, "tools[0].function.parameters"),
        ([tool("f", parameters={"type": "array"})], None, HERMES, "tools[0].function.parameters"),
        ([tool("f", parameters=nested(40))], None, HERMES, "tools[0].function.parameters"),
        ([tool("f", parameters={"a": "x" * TOOLS_BYTES_MAX})], "none", HERMES, "tools"),
        ([tool("e"), tool("f", strict=True)], None, PYTHONIC, "tools[1].function.strict"),
    ],
)  # fmt: skip
def test_refusals_name_the_field(tools: Any, choice: Any, support: ToolSupport, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        plan(tools, choice, support=support)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "é", 'f"', "f\n"])
def test_names_that_no_format_could_hold_are_refused(name: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        plan([tool(name)])
    with pytest.raises(msgspec.ValidationError):
        plan(TOOLS, {"type": "function", "function": {"name": name}})
