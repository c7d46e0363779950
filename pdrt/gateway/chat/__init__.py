"""Chat beyond plain text: tools, structured output, reasoning. Pure.

In order of use by an endpoint:

    bodies    what requests may say: types for the body
    styles    how the model writes calls and reasoning: from flags and chat template
    formats   response_format and structured_outputs -> Grammar
    tools     tools and tool_choice -> ToolPlan: what is rendered, forced, parsed
    messages  messages -> what chat templates want
    grammar   one Grammar for response format, forced calls and reasoning together
    output    output text -> Content, Reasoning, ToolCallStart, ToolCallArguments
"""
