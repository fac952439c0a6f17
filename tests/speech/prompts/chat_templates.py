"""Small chat templates that write turns in the ways of published models."""

import dataclasses
import functools

from jsg.speech.prompts.chat_template import ChatTemplate

CHATML = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# A thinking model: the last answer is written with an empty thought, those before the last question without.
THINKING = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and loop.index0 > ns.last and loop.last %}
        {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.lstrip('\\n') + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
# The system's text is folded into the first turn of the user; contents are trimmed; roles must alternate.
FOLDED = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set talk = messages[1:] %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{%- else %}
    {%- set talk = messages %}
    {%- set system = '' %}
{%- endif %}
{%- for message in talk %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + ((system if loop.first else '') + message['content']).strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'].strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
# The system's text stands before the newest question, wherever that is.
MOVING = """\
{{- bos_token }}
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set talk = messages[1:] if system is not none else messages %}
{%- set ns = namespace(last=0) %}
{%- for message in talk %}
    {%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in talk %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + (system + '\\n\\n' if system is not none and loop.index0 == ns.last else '') }}
        {{- message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        {{- ' ' + message.content + eos_token }}
    {%- else %}
        {{- raise_exception('only user and assistant may follow') }}
    {%- endif %}
{%- endfor %}
"""
HEADERS = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|start|>system<|end|>\\n\\nDate: 26 Jul 2024\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {{- '<|start|>' + message.role + '<|end|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant<|end|>\\n\\n' }}{%- endif %}
"""
# Its own names for roles, no system turn.
RENAMED = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
# A reasoning model: the generation prompt opens a thought, and a past answer is written without.
REASONING = """\
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}{{- message.content }}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '<|User|>' + message.content }}{%- endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|Assistant|>' + message.content.split('</think>')[-1] + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""
# Plain words instead of tokens; the last answer is left open.
WORDS = """\
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- message.content + ' ' }}
    {%- elif message.role == 'user' %}{{- 'USER: ' + message.content + ' ' }}
    {%- else %}{{- 'ASSISTANT: ' + message.content }}{% if not loop.last %}{{- eos_token }}{%- endif %}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'ASSISTANT:' }}{%- endif %}
"""
# Takes contents as lists of parts only.
PARTS = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
    {{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


@dataclasses.dataclass(frozen=True)
class Style:
    """A template, and what it takes.

    Attributes:
        has_system: It takes a turn of the system.
        moves_system: It writes it somewhere else in a longer conversation, so a prompt that grows cannot equal it.
        has_thoughts: Its generation prompt, or a last answer, has more than an answer that was followed by something.
        wants_parts: Contents must be lists.
    """

    source: str
    has_system: bool = True
    moves_system: bool = False
    has_thoughts: bool = False
    wants_parts: bool = False

    @functools.cache  # noqa: B019 — styles live as long as the module
    def compiled(self) -> ChatTemplate:
        return ChatTemplate(self.source, bos_token="<s>", eos_token="</s>")


STYLES = {
    "chatml": Style(CHATML),
    "thinking": Style(THINKING, has_thoughts=True),
    "folded": Style(FOLDED),
    "moving": Style(MOVING, moves_system=True),
    "headers": Style(HEADERS),
    "renamed": Style(RENAMED, has_system=False),
    "reasoning": Style(REASONING, has_thoughts=True),
    "words": Style(WORDS),
    "parts": Style(PARTS, wants_parts=True),
}
