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
_NEXT: Final = "\ue0c4noria\ue0c4"  # stands for what the message after it says
_PROBE_TOOL: Final = ToolSpec("noria", "", {"type": "object", "properties": {}})


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
        ids, places = self._encode_cut(text, [place for start, stop, _ in spans for place in (start, stop)])
        is_trained = [False] * len(ids)
        for first, last, (_, _, num_ending) in zip(places[::2], places[1::2], spans, strict=True):
            end = next((i + 1 for i in range(last, min(last + num_ending, len(ids))) if ids[i] in self.end_ids), last)
            is_trained[first:end] = [True] * (end - first)
        return ids, tuple(is_trained)

    @cached_property
    def end_ids(self) -> Ids:
        """Ids after which the assistant's turn is over: the tokenizer's, and the special tokens that the template writes there if they are others."""
        written = (*self._after_content, *self._after_call)
        special = tuple(i for i in written if self.tokenizer.decode((i,)) == "" and i not in self._marks)
        return tuple(dict.fromkeys(self.tokenizer.end_ids + special))

    @property
    def ends_turns(self) -> bool:
        """Whether the template ends what the assistant says by one of `end_ids`, and not by plain text."""
        return bool(self._after_content) and self._after_content[0] in self.end_ids

    @cached_property
    def _after_content(self) -> Ids:
        """The first id after the content of an assistant's message and white space, () if there is none."""
        probe = (Message("user", "1"), Message("assistant", _SENTINEL))
        try:
            text = self.render(probe, add_generation_prompt=False)
        except ChatTemplateError:  # it has more to say of what a chat is; that its turns end as texts do is the rule
            return self.tokenizer.end_ids[:1]
        return self.encode(text.partition(_SENTINEL)[2].lstrip())[:1]

    @cached_property
    def _after_call(self) -> Ids:
        """The last id after an assistant's tool call but for white space, () if there is none: a template may end such a turn in another way."""
        called = Message("assistant", "", (ToolCall(_PROBE_TOOL.name, {_SENTINEL: _SENTINEL}, "call00000"),))
        try:
            text = self.render((Message("user", "1"), called), (_PROBE_TOOL,), add_generation_prompt=False)
            return self.encode(text.rpartition(_SENTINEL)[2].rstrip())[-1:]
        except ChatTemplateError:  # it knows no calls, or has more to say of them
            return ()

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

    def _said(self, messages: Sequence[Message], tools: Sequence[ToolSpec], index: int, text: str) -> tuple[int, int, int]:
        """Where in `text`, the render of the whole chat, the assistant's message begins, where its content and calls end, and among how many ids from
        there on an end id is the one of its turn: 0 if it has none.

        It begins where the prompt for it ends. To find the end, and the start where a template renders that prompt in another way later, the message
        is changed: what both renders share before and after it is not the assistant's. What ends the turn stands before the next message speaks.
        Raises ChatTemplateError also if that cannot be told, since others repeat what this message says.
        """
        before, message, after = messages[:index], messages[index], messages[index + 1 :]
        try:
            prompt = self.render(before, tools, add_generation_prompt=True)
        except ChatTemplateError:  # it refuses a chat without what follows
            prompt = ""
        changed = _changed(message, _SENTINEL)
        other = self.render([*before, changed, *after], tools, add_generation_prompt=False)
        start = len(prompt) if prompt and text.startswith(prompt) else _num_shared(text, self._unlike(before, after, tools) or other)
        tail = other.rpartition(_SENTINEL)[2]
        closing = self._closing(before, changed, tools) if message.tool_calls else ""
        if not tail.startswith(closing):
            closing = ""
        num_after = _num_shared(text[::-1], other[::-1])
        if not message.tool_calls and _SENTINEL in other and (other.count(_SENTINEL) > 1 or num_after < len(tail)):
            raise ChatTemplateError(
                f"the template of {self.name or 'the model'} repeats an assistant's words elsewhere: which of them train is not known"
            )
        stop = max(start, len(text) - min(num_after, len(tail) - len(closing)))
        gap = self._gap([*before, changed], after, tools, other).removeprefix(closing)
        ending = text[stop : stop + _num_shared(text[stop:], gap)]
        is_ended = any(token_id in self.end_ids for token_id in self.encode(ending.lstrip())[:1])
        return start, stop, 1 + len(self.encode(ending)) if is_ended else 0

    def _unlike(self, before: Sequence[Message], after: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """The render of the chat with another message between `before` and `after`, one without calls; "" if the template refuses it. Results of
        calls that are not there may be refused, and go then with the answer to them."""
        next_question = next((i for i, message in enumerate(after) if message.role == "user"), len(after))
        for rest in (after, after[next_question:]):
            try:
                return self.render([*before, Message("assistant", _SENTINEL), *rest], tools, add_generation_prompt=False)
            except ChatTemplateError:
                continue
        return ""

    def _closing(self, before: Sequence[Message], called: Message, tools: Sequence[ToolSpec]) -> str:
        """What the template writes after the last argument of the last call and still belongs to it: all until an end id, or if there is none,
        what it does not write after mere content."""
        tails = []
        for message in (called, Message("assistant", _SENTINEL)):
            try:
                tails.append(self.render([*before, message], tools, add_generation_prompt=False).rpartition(_SENTINEL)[2])
            except ChatTemplateError:
                return ""
        ends = [place for end_id in self.end_ids if (place := tails[0].find(self.tokenizer.name_of(end_id))) >= 0]
        return tails[0][: min(ends, default=len(tails[0]) - _num_shared(tails[0][::-1], tails[1][::-1]))]

    def _gap(self, until: Sequence[Message], after: Sequence[Message], tools: Sequence[ToolSpec], text: str) -> str:
        """What the template writes between the words of the last message `until` and those of the next one that it shows. text: their render."""
        for place, message in enumerate(after):
            spoken = [*until, *after[:place], _changed(message, _NEXT), *after[place + 1 :]]
            other = self.render(spoken, tools, add_generation_prompt=False)
            if other != text:
                gap, next_words, _ = other.rpartition(_SENTINEL)[2].partition(_NEXT)
                return gap if next_words else ""
        return text.rpartition(_SENTINEL)[2]

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
        end = next((i for i in range(len(said) - 1, -1, -1) if said[i] in self._chat.end_ids), None)
        if end is None or self._chat.tokenizer.decode(said[end + 1 :]).strip():  # that end id is not this turn's, which has none
            return Continuation(None, self._chat.encode(text[len(self._said) :]))
        num_ends = sum(token_id in self._chat.end_ids for token_id in said)
        place = [i for i, token_id in enumerate(ids) if token_id in self._chat.end_ids][num_ends - 1]
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


def _changed(message: Message, words: str) -> Message:
    """The message with other words: of its content, or of its last call's arguments."""
    if not message.tool_calls:
        return replace(message, content=words, reasoning="")
    calls = (*message.tool_calls[:-1], replace(message.tool_calls[-1], arguments={words: words}))
    return replace(message, content=words, reasoning="", tool_calls=calls)


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
