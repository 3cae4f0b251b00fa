"""Chat templates whose formats of calls are made up here, so that none is known by name, and those
of the known formats.
"""

from mlxspec.text.formats import KNOWN

CHAT = """{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% if m.tool_calls %}{% set calls = m.tool_calls | map(attribute='function') | list %}
%s{% endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
EACH = "{%% for c in calls %%}%s{%% endfor %%}"
ITEMS = "{%% for k, v in c.arguments.items() %%}%s{%% endfor %%}"
VALUE = "{{ v if v is string else v | tojson }}"
JSON = "{{ c.arguments | tojson }}"

MADE_UP = {
    "a name in brackets": EACH % f"[FUNC]{{{{ c.name }}}}[IN]{JSON}[/FUNC]",
    "a name as the key": "<|use|>[" + EACH % f'{{"{{{{ c.name }}}}": {JSON}}}{{{{ ", " if not loop.last }}}}' + "]<|/use|>",
    "a word before a list": " functools[" + EACH % f'{{"name": "{{{{ c.name }}}}", "arguments": {JSON}}}{{{{ ", " if not loop.last }}}}' + "]",
    "a fence": EACH % f"<do>{{{{ c.name }}}}{{{{ '\\n```json\\n' }}}}{JSON}{{{{ '\\n```' }}}}</do>{{{{ '\\n' }}}}",
    "a name as a tag's value": EACH % f"<function={{{{ c.name }}}}>{JSON}</function>",
    "a section and ids": "<|calls|>" + EACH % f"<|id|>{{{{ 'abc45678' ~ loop.index }}}}<|name|>{{{{ c.name }}}}<|args|>{JSON}<|/call|>" + "<|/calls|>",
    "other keys": EACH % f'<tc>{{"tool_name": "{{{{ c.name }}}}", "input": {JSON}}}</tc>',
    "arguments first": EACH % f'<tc>{{"parameters": {JSON}, "function": "{{{{ c.name }}}}"}}</tc>',
    "no markers": '[{% for c in calls %}{"name": "{{ c.name }}", "arguments": ' + JSON + '}{{ ", " if not loop.last }}{% endfor %}]',
    "attributes with types": EACH % ('<invoke tool="{{ c.name }}">' + ITEMS % f'''<arg name="{{{{ k }}}}" type="{{{{ 'str' if v is string else 'json' }}}}">{VALUE}</arg>''' + "</invoke>"),
    "parameters on lines": EACH % ("<act>{{ c.name }}{{ '\\n' }}" + ITEMS % f"<p={{{{ k }}}}>{{{{ '\\n' }}}}{VALUE}{{{{ '\\n' }}}}</p>{{{{ '\\n' }}}}" + "</act>{{ '\\n' if not loop.last }}"),
    "parameters without ends": EACH % ("<|fn|>{{ c.name }}" + ITEMS % f"<|k|>{{{{ k }}}}<|v|>{VALUE}" + "<|end_fn|>"),
    "parameters in a section": "<calls>{{ '\\n' }}" + EACH % ('<x:invoke name="{{ c.name }}">' + ITEMS % f'<x:p name="{{{{ k }}}}">{VALUE}</x:p>' + "</x:invoke>{{ '\\n' }}") + "</calls>",
    "a name and JSON": EACH % f"{{{{ c.name }}}}{{{{ '\\n' }}}}{JSON}{{{{ '\\n' if not loop.last }}}}",
    "a name and JSON in a string": EACH % '<tc>{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson | tojson }}}</tc>',
    "values in JSON in tags": EACH % ("<tc>{{ c.name }}" + ITEMS % "<k>{{ k }}</k><v>{{ v | tojson }}</v>" + "</tc>"),
    "values in HTML": EACH % ("<tc>{{ c.name }}" + ITEMS % "<k>{{ k }}</k><v>{{ (v if v is string else v | tojson) | e }}</v>" + "</tc>"),
    "like Python": "<run>" + EACH % ("{{ c.name }}(" + "{% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}" + "){{ '\\n' if not loop.last }}") + "</run>",
    "like Python, in a list": "[{% for c in calls %}{{ c.name }}({% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]",
}  # fmt: skip

TEMPLATES = {name: CHAT.replace("%s", calls) for name, calls in MADE_UP.items()}
TEMPLATES |= {name: CHAT.replace("%s", path.read_text("utf-8")) for name, path in KNOWN.items()}
