"""Small chat templates with the mechanisms of the well-known families, and tokenizers of each kind for them."""

from collections.abc import Sequence

from hypothesis import strategies as st
from llama_file import byte_alphabet

from noria.text.chat import TINY_TEMPLATE, ChatFormat
from noria.text.tokenizer import ByteTokenizer, FastTokenizer, SpecialTokens, byte_level_bpe, sentencepiece_bpe
from noria.types import Message, ToolCall, ToolSpec

PLAIN = """\
{% for m in messages %}{% if m.role == 'assistant' %}Answer: {{ m.content }}
{% else %}{{ m.role }}: {{ m.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}Answer: {% endif %}"""
"""No end-of-turn token at all."""

SMOLLM = """\
{% for m in messages %}
    {%- if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

QWEN25 = """\
{%- set start, stop = '<|im_start|>', '<|im_end|>\\n' %}
{%- set first = messages[0] %}
{{- start + 'system\\n' + (first.content if first.role == 'system' else 'You are helpful.') }}
{%- if tools %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{ '\\n' ~ tool | tojson }}{% endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- stop }}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
        {{- start + m.role + '\\n' + m.content + stop }}
    {%- elif m.role == 'assistant' %}
        {{- start + m.role }}
        {%- if m.content %}{{ '\\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- stop }}
    {%- elif m.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ start + 'user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ stop }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ start + 'assistant\\n' }}{% endif %}"""
"""Adjacent tool results are one turn of the user."""

QWEN3 = """\
{%- set ns = namespace(query=-1) %}
{%- for m in messages[::-1] %}
    {%- if ns.query < 0 and m.role == 'user' %}{% set ns.query = messages | length - loop.index %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content, reasoning = m.content, '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.query and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {%- for call in m.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' ~ (call.function.arguments | tojson) ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Reasoning is shown after the last question of the user only."""

LLAMA3 = """\
{{- bos_token }}
{%- set today = strftime_now('%d %b %Y') if strftime_now is defined else '26 Jul 2024' %}
{%- macro header(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}{% endmacro %}
{{- header('system') + 'Today: ' + (today | length > 5 and 'known' or 'unknown') }}
{%- if tools is not none %}
    {{- '\\nAnswer with {"name": function name, "parameters": dictionary}.' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson(indent=4) }}{% endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if 'tool_calls' in m and m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- header('assistant') + '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- header('ipython') + (m.content if m.content is string else m.content | tojson) + '<|eot_id|>' }}
    {%- else %}
        {{- header(m.role) + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ header('assistant') }}{% endif %}"""
"""Trims, and serialises calls anew; content beside a call is dropped."""

MISTRAL = """\
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools is not none and m == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' and m.tool_calls is defined and m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}{{ raise_exception('Tool call ids have 9 letters') }}{% endif %}
            {%- set text = call.function | tojson %}
            {{- text[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ m.content | tojson ~ ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception('Only user, assistant and tool roles are supported!') }}
    {%- endif %}
{%- endfor %}"""
"""No generation prompt; tools move to the last question, which rewrites history."""

TEMPLATES = {
    "tiny": TINY_TEMPLATE,
    "plain": PLAIN,
    "smollm": SMOLLM,
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}
SPECIAL = [
    *(
        "<s>",
        "</s>",
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "[INST]",
        "[/INST]",
    ),
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|python_tag|>", "<|endoftext|>"),
    "<|eom_id|>",
]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
ENDS = {"mistral": "</s>", "llama3": "<|eot_id|>", "plain": "<|endoftext|>"}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "a s", "s i", "as si", "assi s", "assis t", "\u010a \u010a", "1 2", "2 3"]


def bpe(end: str = "<|im_end|>", split: str = "qwen2") -> FastTokenizer:
    """Byte-level BPE with the special tokens of all families."""
    texts = [*SPECIAL, *ADDED, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    added = tuple(range(len(SPECIAL), len(SPECIAL) + len(ADDED)))
    return byte_level_bpe(texts, MERGES, SpecialTokens(range(len(SPECIAL)), (texts.index(end),), added_ids=added), split=split)


def sentencepiece(end: str = "</s>", *, adds_space: bool = True) -> FastTokenizer:
    """SentencePiece's BPE with byte fallback and the special tokens of all families."""
    words = ["▁", "h", "e", "l", "o", "he", "ll", "hell", "hello", "▁hello", "a", "s", "i", "as", "▁▁", "1", "2", "12", ":", "▁a"]
    byte_texts = [f"<0x{byte:02X}>" for byte in range(256)]
    texts = ["<unk>", *SPECIAL, *byte_texts, *words]
    scores = [*[0.0] * (1 + len(SPECIAL) + 256), *(-float(i) for i in range(len(words)))]
    special = SpecialTokens(range(1, 1 + len(SPECIAL)), (1 + SPECIAL.index(end),), bos_id=1)
    byte_ids = range(1 + len(SPECIAL), 1 + len(SPECIAL) + 256)
    return sentencepiece_bpe(texts, scores, special, byte_ids=byte_ids, unknown_id=0, adds_space=adds_space)


def chat(name: str, kind: str = "bpe") -> ChatFormat:
    """A template with a tokenizer of a kind: "bpe", "sentencepiece", or "bytes" for the tiny template."""
    end = ENDS.get(name, "<|im_end|>")
    tokenizer = ByteTokenizer() if name == "tiny" else sentencepiece(end) if kind == "sentencepiece" else bpe(end)
    bos = "<|begin_of_text|>" if name == "llama3" else "<s>"
    return ChatFormat(TEMPLATES[name], tokenizer, bos=bos, eos="<|eos|>" if name == "tiny" else end, name=name)


GROWING = ("tiny", "smollm", "qwen25", "llama3")
"""Templates that never rewrite history and end turns by a token."""

WORDS = st.sampled_from(["hello", " hello", "as", "assist", "12", "\n", " ", "é", "🙂", "4", "<", "{}", "."])
TEXTS = st.lists(WORDS, min_size=1, max_size=5).map("".join)

ADD = ToolSpec("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}})


def call(number: int = 0, **arguments: object) -> ToolCall:
    return ToolCall("add", arguments or {"a": 1, "b": 2}, f"call{number:05d}")


def user(content: str) -> Message:
    return Message("user", content)


def said(content: str, *calls: ToolCall, reasoning: str = "") -> Message:
    return Message("assistant", content, calls, reasoning=reasoning)


def result(content: str, number: int = 0) -> Message:
    return Message("tool", content, call_id=f"call{number:05d}")


def letters(tokenizer: object, text: str) -> tuple[int, ...]:
    """Ids of `text` one character at a time: another spelling than encoding it gives, wherever a merge applies."""
    assert isinstance(tokenizer, FastTokenizer | ByteTokenizer)
    return tuple(token_id for letter in text for token_id in tokenizer.encode(letter))


def trained_text(format: ChatFormat, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[str, int]:
    """What the trained ids spell, and how many of them are end ids."""
    ids, is_trained = format.encode_example(messages, tools)
    assert ids == format.tokenizer.encode(format.render(messages, tools, add_generation_prompt=False))
    assert len(ids) == len(is_trained)
    chosen = [i for i, trains in zip(ids, is_trained, strict=True) if trains]
    return format.tokenizer.decode(chosen), sum(i in format.end_ids for i in chosen)
