"""Chat templates in the manner of well-known models, short. Import as `tests.model.templates`."""

from __future__ import annotations

HERMES = """\
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role == 'assistant' and message.tool_calls %}<|im_start|>assistant
{{ message.content }}{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% elif not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

SMOLLM3 = """\
{%- if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif -%}
<|im_start|>system
Reasoning: {{ '/think' if enable_thinking else '/no_think' }}
{% if tools %}{% for tool in tools %}{{ tool.function | string }}
{% endfor %}As <tool_call>{"name": ..., "arguments": ...}</tool_call>.
{% endif %}<|im_end|>
{% for message in messages %}{% if message.role == 'assistant' %}
{%- generation %}<|im_start|>assistant
{{ message.content }}<|im_end|>
{% endgeneration %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>
{% endif %}{% endif %}"""

LLAMA31 = """\
{{- bos_token }}{% set date = date_string or strftime_now('%d %b %Y') %}<|im_start|>system
Date: {{ date }}
{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}
{%- if tools %}Respond as {"name": function name, "parameters": dictionary}.
{% for tool in tools %}{{ tool | tojson(indent=4) }}
{% endfor %}{% endif %}<|im_end|>
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('One call at once!') }}{% endif %}
{%- set call = message.tool_calls[0].function %}<|python_tag|>{"name": "{{ call.name }}", \
"parameters": {{ call.arguments | tojson }}}<|im_end|>
{%- else %}<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

MISTRAL = """\
{{- bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Call ids have 9 characters!') }}{% endif %}
{{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
{%- endfor %}]{{ eos_token }}
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""

R1 = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% endif %}"""

TEMPLATES = {
    "hermes": HERMES, "smollm3": SMOLLM3, "llama31": LLAMA31, "mistral": MISTRAL, "r1": R1,
}  # fmt: skip
