"""Chats: messages to ids by the model's own template, and what was sampled back to messages.

    open ──▶ start ──▶ (sampled) ──▶ hear ──▶ reply ──▶ (sampled) ──▶ hear ──▶ ...
             ids                    message   ids

History is never rendered into ids again. A turn compares two renders, A of the chat so far and B of the chat with the new messages:

    A  ...user<end>\\n<start>assistant\\nIt is 4.<end>\\n
    B  ...user<end>\\n<start>assistant\\nIt is 4.<end>\\n<start>user\\nThanks<end>\\n<start>assistant\\n
       what the sampler has seen and produced ──▶│◀── the ids of the next observation

Where B goes on from A, only what follows the end of the turn is taken from B's ids; the path keeps the ids that were sampled. Where it does not, the
template rewrote history (it strips earlier reasoning, say): the conversation forks at the latest place that both share (`types.Turn.keep`).
Deliberately not here: jinja2 (`text/sandbox.py`), the formats of tool calls (`text/tools.py`).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Final, final

from noria.errors import ChatTemplateError, ConfigError, InvalidRequestError
from noria.protocols import Tokenizer
from noria.text.sandbox import Template, plain
from noria.text.tools import FORMATS, THINK, format_of, parse_message
from noria.types import Ids, Message, Prompt, ToolCall, ToolSpec

TINY_TEMPLATE: Final = """
{%- if tools %}
    {{- '<|sep|>tools' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function | tojson }}
    {%- endfor %}
    {{- '<|eos|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|sep|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|eos|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|sep|>assistant\\n' }}
{%- endif %}"""
"""Chats of the `tiny` base, in the special tokens of `ByteTokenizer`."""

_TOOLS_TEXT: Final = (
    "You may call these tools. Their signatures, in JSON:\n<tools>\n{tools}\n</tools>\n"
    'A call is a JSON object between marks: <tool_call>\n{{"name": ..., "arguments": {{...}}}}\n</tool_call>'
)
"""Added to the system message where a template shows no tools: the wording is ours, the form that of Hermes."""

_EMPTY_THOUGHT: Final = re.compile(r"<think>\n*</think>\n{0,2}")
"""What Qwen3's template puts before a last message without reasoning, and not before the same message once others follow it."""

_SENTINEL: Final = "\ue0c3noria\ue0c3"  # in the private use area: in no real chat


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the sampler reads next: after the first `keep` ids of the path so far (None: after all of them) come `ids`."""

    keep: int | None
    ids: Ids


@final
class ChatFormat:
    """A model's chat template with its tokenizer. Immutable; usable from any thread.

    The template sees messages and tools in the form of OpenAI's chat API, arguments as objects, reasoning as `reasoning_content` and `thinking`.
    What it has no place for goes into the content: reasoning between <think> marks, tool calls, and tools into the system message.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, *, bos: str = "", eos: str = "", name: str = "") -> None:
        """bos, eos: texts of the tokens, as the template names them. name: of the model, for messages. Raises ChatTemplateError."""
        self.tokenizer = tokenizer
        self.template = template
        self.name = name
        self._program = Template(template, name)
        self._tokens = {"bos_token": bos, "eos_token": eos}
        self._tool_format = FORMATS[format_of(template)]
        self._shows_calls, self._shows_tools = "tool_calls" in template, "tools" in self._program.names
        self._shows_reasoning = re.search(r"reasoning_content|\.thinking\b|\[['\"]thinking['\"]\]", template) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, add_generation_prompt: bool) -> str:
        """The chat as text, begun by the template's BOS at most once. Raises ChatTemplateError."""
        if tools and not self._shows_tools:
            messages = _with_tools_in_system(messages, tools)
        names = {call.call_id: call.name for message in messages for call in message.tool_calls}
        text = self._program.render(
            messages=[self._fields(message, names) for message in messages],
            tools=[_tool_fields(tool) for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            **self._tokens,
        )
        bos = self._tokens["bos_token"]
        while bos and text.startswith(bos + bos):
            text = text[len(bos) :]
        return text

    def open(self, prompt: Prompt) -> "Conversation":
        """A conversation that begins with `prompt`."""
        return Conversation(self, prompt)

    def encode_example(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> tuple[Ids, tuple[bool, ...]]:
        """Ids of a whole chat as one render gives them, and for each whether it trains: what the assistants say and the token that ends their turn.

        Which ids those are is a matter of places in the text and never of an id's value. A token that straddles the end of a header does not train.
        Raises ChatTemplateError.
        """
        text = self.render(messages, tools, add_generation_prompt=False)
        spans = [self._said(messages, tools, i, text) for i, message in enumerate(messages) if message.role == "assistant"]
        ids, places = self._encode_cut(text, [place for span in spans for place in span])
        is_trained = [False] * len(ids)
        for first, last in zip(places[::2], places[1::2], strict=True):
            end = next((i + 1 for i in range(last, len(ids)) if ids[i] in self.end_ids), last) if self.ends_turns else last
            is_trained[first:end] = [True] * (end - first)
        return ids, tuple(is_trained)

    @cached_property
    def end_ids(self) -> Ids:
        """Ids after which the assistant's turn is over: the tokenizer's, and the special token that the template writes there if it is another."""
        is_special = bool(self._after_content) and self.tokenizer.decode(self._after_content) == ""
        return tuple(dict.fromkeys(self.tokenizer.end_ids + (self._after_content if is_special else ())))

    @property
    def ends_turns(self) -> bool:
        """Whether the template ends what the assistant says by one of `end_ids`, and not by plain text."""
        return bool(self._after_content) and self._after_content[0] in self.end_ids

    @cached_property
    def _after_content(self) -> Ids:
        """The first id after the content of an assistant's message, () if there is none."""
        probe = (Message("user", "1"), Message("assistant", _SENTINEL))
        try:
            text = self.render(probe, add_generation_prompt=False)
        except ChatTemplateError:  # it has more to say of what a chat is; that its turns end as texts do is the rule
            return self.tokenizer.end_ids[:1]
        return self.encode(text.partition(_SENTINEL)[2])[:1]

    def encode(self, text: str) -> Ids:
        """Ids of rendered text. Raises ChatTemplateError for a character that the vocabulary cannot spell."""
        try:
            return self.tokenizer.encode(text)
        except InvalidRequestError as error:
            raise ChatTemplateError(f"a rendered chat of {self.name or 'the model'} has no ids: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids, in which the marks of reasoning and tool calls stay, also where they are special tokens; other special tokens go."""
        parts, begun = [], 0
        for place, token_id in enumerate(ids):
            if token_id in self._marks:
                parts += [self.tokenizer.decode(ids[begun:place]), self._marks[token_id]]
                begun = place + 1
        return "".join([*parts, self.tokenizer.decode(ids[begun:])])

    def parse(self, text: str, *, num_calls: int = 0, is_thinking: bool = False) -> Message:
        """The assistant's message of a sampled text (`tools.parse_message`)."""
        return parse_message(text, self._tool_format, num_calls=num_calls, is_thinking=is_thinking)

    @cached_property
    def _marks(self) -> dict[int, str]:
        marks: dict[int, str] = {}
        for text in (*THINK, *self._tool_format.marks):
            try:
                token_id = self.tokenizer.token_id(text)
            except ConfigError:
                continue
            if self.tokenizer.decode((token_id,)) == "":
                marks[token_id] = text
        return marks

    def _said(self, messages: Sequence[Message], tools: Sequence[ToolSpec], index: int, text: str) -> tuple[int, int]:
        """Where in `text`, the render of the whole chat, the assistant's message begins, and where its content and calls end or are about to.

        It begins where the prompt for it ends. To find the end, and the start where a template renders that prompt in another way later, the message
        is changed: what both renders share before and after it is not the assistant's.
        """
        message = messages[index]
        try:
            prompt = self.render(messages[:index], tools, add_generation_prompt=True)
        except ChatTemplateError:  # it refuses a chat without what follows
            prompt = ""
        changed = replace(message, content=_SENTINEL, reasoning="")
        if message.tool_calls:
            calls = [*message.tool_calls[:-1], replace(message.tool_calls[-1], arguments={_SENTINEL: _SENTINEL})]
            changed = replace(changed, tool_calls=tuple(calls))
        other = self.render([*messages[:index], changed, *messages[index + 1 :]], tools, add_generation_prompt=False)
        start = len(prompt) if prompt and text.startswith(prompt) else _num_shared(text, other)
        return start, max(start, len(text) - _num_shared(text[::-1], other[::-1]))

    def _encode_cut(self, text: str, cuts: Sequence[int]) -> tuple[Ids, list[int]]:
        """Ids of the whole text, and for each of the ascending cuts the first id after it. An id that a cut falls into comes before the cut where a
        span starts (the even ones), after it where one stops."""
        ids = self.encode(text)
        pieces = [self.encode(text[start:stop]) for start, stop in pairwise((0, *cuts, len(text)))]
        if tuple(chain.from_iterable(pieces)) == ids:
            return ids, list(accumulate(map(len, pieces[:-1])))
        return ids, [self._place(text, cut, ids, is_start=i % 2 == 0) for i, cut in enumerate(cuts)]

    def _place(self, text: str, cut: int, ids: Ids, *, is_start: bool) -> int:
        before = self.encode(text[:cut])
        shared = _num_shared(before, ids)
        if shared == len(before) or not is_start:
            return shared
        after = self.encode(text[cut:])
        return max(shared, len(ids) - _num_shared(after[::-1], ids[::-1]))

    def _fields(self, message: Message, names: Mapping[str, str]) -> dict[str, Any]:
        """A message as OpenAI's chat API has it. names: of the tools, by id of the call."""
        content = message.content
        fields: dict[str, Any] = {"role": message.role}
        if message.reasoning and self._shows_reasoning:
            fields |= {"reasoning_content": message.reasoning, "thinking": message.reasoning}
        elif message.reasoning:
            content = f"{THINK[0]}\n{message.reasoning}\n{THINK[1]}\n\n{content}"
        if message.tool_calls and self._shows_calls:
            fields["tool_calls"] = [_call_fields(call) for call in message.tool_calls]
        elif message.tool_calls:
            content = "\n".join(filter(None, (content, self._tool_format.write(message.tool_calls))))
        if message.role == "tool" and message.call_id:
            fields["tool_call_id"] = message.call_id
            fields |= {"name": names[message.call_id]} if message.call_id in names else {}
        return fields | {"content": content}


@final
class Conversation:
    """One episode's chat, from its prompt on: `start`, then `hear` and `reply` in turns. Touched by one task at a time.

    All three raise ChatTemplateError: the template refused the messages or failed.
    """

    def __init__(self, chat: ChatFormat, prompt: Prompt) -> None:
        if not prompt.messages:
            raise ChatTemplateError("a prompt needs at least one message")
        self._chat, self._tools = chat, tuple(prompt.tools)
        self._messages = list(prompt.messages)
        self._num_ids = self._num_sampled = 0  # of the path before what was sampled last, and of that
        self._seen = ""  # the last render that the sampler was given, generation prompt included
        self._said = ""  # the render that ends with what was sampled after it
        self._is_ended = False  # what was sampled ended with an end id
        self._borders = [(0, 0)]  # lengths of beginnings of `_seen`, and how many ids of the path stand for them: where it may fork

    @property
    def messages(self) -> tuple[Message, ...]:
        """The chat so far."""
        return tuple(self._messages)

    def start(self) -> Ids:
        """The first observation: the whole prompt, up to where the assistant speaks."""
        self._seen = self._render(add_generation_prompt=True)
        ids = self._chat.encode(self._seen)
        self._num_ids = len(ids)
        self._borders.append((len(self._seen), len(ids)))
        return ids

    def hear(self, sampled_ids: Ids) -> Message:
        """Record what was sampled, and read it as the assistant's message. Calls that the template refuses to show again stay content."""
        self._is_ended = bool(sampled_ids) and sampled_ids[-1] in self._chat.end_ids
        text = self._chat.decode(sampled_ids[:-1] if self._is_ended else sampled_ids)
        num_calls = sum(len(message.tool_calls) for message in self._messages)
        self._messages.append(self._chat.parse(text, num_calls=num_calls, is_thinking=self._seen.rstrip().endswith(THINK[0])))
        try:
            said = self._render(add_generation_prompt=False)
        except ChatTemplateError:
            self._messages[-1] = Message("assistant", text)
            said = self._render(add_generation_prompt=False)
        base = len(self._seen) if said.startswith(self._seen) and THINK[1] not in text else len(said)
        self._said = said[:base] + _EMPTY_THOUGHT.sub("", said[base:], count=1)
        self._num_sampled = len(sampled_ids)
        return self._messages[-1]

    def reply(self, messages: Sequence[Message]) -> Continuation:
        """Append the environment's messages, all in one render, and give the sampler what it reads next."""
        self._messages.extend(messages)
        text = self._render(add_generation_prompt=True)
        num_shared = _num_shared(self._seen, text)
        self._borders = [border for border in self._borders if border[0] <= num_shared]
        self._num_ids += self._num_sampled
        answer = self._extend(text) if text.startswith(self._said) else self._fork(text)
        self._seen = text
        self._num_ids = (self._num_ids if answer.keep is None else answer.keep) + len(answer.ids)
        self._borders.append((len(text), self._num_ids))
        return answer

    def _extend(self, text: str) -> Continuation:
        """What `text` has after the end of the assistant's turn; with that end, if it was not sampled."""
        if not self._chat.ends_turns:
            return Continuation(None, self._chat.encode(self._plain_end() + text[len(self._said) :]))
        base = len(self._seen) if self._said.startswith(self._seen) else 0
        said, ids = self._chat.encode(self._said[base:]), self._chat.encode(text[base:])
        ends = sum(token_id in self._chat.end_ids for token_id in said)
        place = [i for i, token_id in enumerate(ids) if token_id in self._chat.end_ids][ends - 1]
        first = place + 1 if self._is_ended else place
        if ids[: len(said)] == said:
            self._borders.append((len(self._said), self._num_ids + len(said) - first))
        return Continuation(None, ids[first:])

    def _fork(self, text: str) -> Continuation:
        """From the latest border whose render `text` still begins with. What follows are the ids of one full render, unless a token straddles it."""
        length, keep = self._borders[-1]
        before, ids = self._chat.encode(text[:length]), self._chat.encode(text)
        rest = ids[len(before) :] if ids[: len(before)] == before else self._chat.encode(text[length:])
        return Continuation(keep, rest)

    def _plain_end(self) -> str:
        """What the template writes after the assistant's content, where no token ends the turn."""
        last = max(i for i, message in enumerate(self._messages) if message.role == "assistant")
        probe = [*self._messages[:last], Message("assistant", _SENTINEL)]
        return self._chat.render(probe, self._tools, add_generation_prompt=False).rpartition(_SENTINEL)[2]

    def _render(self, *, add_generation_prompt: bool) -> str:
        return self._chat.render(self._messages, self._tools, add_generation_prompt=add_generation_prompt)


def _call_fields(call: ToolCall) -> dict[str, Any]:
    return {"type": "function", "id": call.call_id, "function": {"name": call.name, "arguments": plain(call.arguments)}}


def _tool_fields(tool: ToolSpec) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": plain(tool.parameters)}}


def _with_tools_in_system(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    lines = "\n".join(json.dumps(_tool_fields(tool)["function"], ensure_ascii=False) for tool in tools)
    text = _TOOLS_TEXT.format(tools=lines)
    if messages and messages[0].role == "system":
        return [replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:]]
    return [Message("system", text), *messages]


def _num_shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common prefix, by bisection: comparing slices is far faster than a loop."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low
