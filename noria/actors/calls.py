"""Whose answer a tool's message is: every `call_id` names a call that was made, so that no template shows an answer to nothing."""

from collections.abc import Sequence
from dataclasses import replace
from typing import final

from noria.errors import EnvironmentOutputError
from noria.types import Message


@final
class Calls:
    """The tool calls of one conversation. Touched by one call of tenant code at a time."""

    def __init__(self) -> None:
        self._made: set[str] = set()
        self._open: list[str] = []  # of the assistant's last message, not answered yet
        self._is_asked = False  # that message has calls

    def follow(self, messages: Sequence[Message], what: str) -> tuple[Message, ...]:
        """The next messages of the conversation, where a tool's message without a call_id has that of the only open call.

        Raises EnvironmentOutputError, which begins with `what`, for an answer to no call, and for one that could be to several.
        """
        return tuple(self._follow(message, what) for message in messages)

    def _follow(self, message: Message, what: str) -> Message:
        if message.role == "assistant":
            self._open = [call.call_id for call in message.tool_calls]
            self._made.update(self._open)
            self._is_asked = bool(self._open)
        if message.role != "tool":
            return message
        if not message.call_id and self._is_asked:
            if len(set(self._open)) != 1:
                which = f"several are open ({', '.join(map(repr, self._open))})" if self._open else "all are answered"
                raise EnvironmentOutputError(f"{what} a tool's message without a call_id, which needs exactly one call to be open; {which}")
            message = replace(message, call_id=self._open[0])
        elif message.call_id and message.call_id not in self._made:
            made = ", ".join(map(repr, sorted(self._made))) or "none"
            named = repr(message.call_id[:80])
            raise EnvironmentOutputError(f"{what} a tool's message with the call_id {named}, which nobody called; calls: {made[:400]}")
        if message.call_id in self._open:
            self._open.remove(message.call_id)
        return message
