"""Render chats with transformers: cases.json of the folder, a list of [template, messages, tools, add_generation_prompt, tokens], to renders.json.

A render is null where the template refuses.
"""

import json
import sys
from pathlib import Path

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template


def render(template, messages, tools, add_generation_prompt, tokens):
    try:
        texts, _ = render_jinja_template([messages], tools=tools, chat_template=template, add_generation_prompt=add_generation_prompt, **tokens)
    except (jinja2.TemplateError, TypeError):
        return None
    return texts[0]


folder = Path(sys.argv[1])
cases = json.loads((folder / "cases.json").read_text())
(folder / "renders.json").write_text(json.dumps([render(*case) for case in cases]))
