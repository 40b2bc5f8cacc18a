"""Builders for tests of chats: templates with the mechanisms of real ones, in the tokens of `Letters`, and an environment that follows a script."""

from actor_builders import EOS, Letters

from noria.protocols import Step
from noria.text.chat import ChatFormat
from noria.types import Message, Prompt

END = chr(EOS)

PLAIN = """{%- for m in messages -%}
{{ '<' + m.role + '>' + m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}{{ '\\0\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}"""  # noqa: E501
"""Every message as it is."""

MERGING = """{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<user>' }}{% endif -%}
{{ '<result>' + m.content + '</result>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '\\0\\n' }}{% endif -%}
{%- else -%}
{{ '<' + m.role + '>' + m.content + '\\0\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}"""
"""Adjacent results of tools become one turn of the user."""

STRIPPING = """{%- for m in messages -%}
{{ '<' + m.role + '>' }}
{%- if m.reasoning_content and loop.last %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif -%}
{{ m.content + '\\0\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}"""
"""Reasoning is shown in the last message only."""


class Talk:
    """Answers every action with the next of its answers, and ends after the last; records the actions."""

    def __init__(self, *answers, prompt=None, parts=None):
        self.prompt = Prompt((Message("system", "Be brief."), Message("user", "the task"))) if prompt is None else prompt
        self.answers, self.actions, self.parts = list(answers), [], parts or {}

    def reset(self, task):
        return self.prompt

    def step(self, action):
        self.actions.append(action)
        if not self.answers:
            return Step(1.0, reward_parts=self.parts)
        return Step(0.5, done=False, observation=self.answers.pop(0), reward_parts=self.parts)


def chat_of(template, **settings):
    return ChatFormat(template, Letters(), **settings)
