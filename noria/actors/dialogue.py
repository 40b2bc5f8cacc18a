"""How an episode's observations become ids, and what the policy said becomes an action: as text, or as messages of a chat.

    Dialogue.begin ──▶ ids ──▶ (sampler) ──▶ hear ──▶ action ──▶ (environment) ──▶ answer ──▶ ids ──▶ ...

Either way ids only ever grow at the end, unless a chat's template rewrites history: then the episode forks (`types.Turn.keep`). Sampled ids are read
here and never written: nothing is encoded that was sampled.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias, TypeVar, final

from noria.actors.rules import EpisodeRules, Seams
from noria.errors import ChatTemplateError
from noria.protocols import Step, Tokenizer
from noria.text.chat import ChatFormat, Continuation, Conversation
from noria.types import Ids, Message, Prompt

T = TypeVar("T")


def dialogue_of(prompt: str | Prompt, seams: Seams, rules: EpisodeRules) -> "Dialogue":
    """The dialogue that a prompt opens. Raises ChatTemplateError for messages to a base without a chat template."""
    if isinstance(prompt, str):
        return TextDialogue(prompt, seams.tokenizer, rules.stop_ids, rules.stop)
    if seams.chat is None:
        raise ChatTemplateError(
            "the environment's reset returned messages, and the run's base has no chat template: return text, or take a base that has one"
        )
    return ChatDialogue(prompt, seams.chat, seams, rules)


def action_of(sampled_ids: Ids, stop_ids: Ids) -> Ids:
    """The sampled ids without the stop id that ended them."""
    return sampled_ids[:-1] if sampled_ids and sampled_ids[-1] in stop_ids else sampled_ids


def text_before(text: str, stop: Iterable[str]) -> str:
    """`text` up to where the first of the stop texts begins; all of it, if it contains none."""
    return text[: min((place for end in stop if (place := text.find(end)) >= 0), default=len(text))]


@final
class TextDialogue:
    """Plain text: each observation is encoded once and appended. The first begins with the model's BOS, once."""

    def __init__(self, prompt: str, tokenizer: Tokenizer, stop_ids: Ids, stop: tuple[str, ...] = ()) -> None:
        self._prompt, self._tokenizer, self.stop_ids, self._stop = prompt, tokenizer, stop_ids, stop

    async def begin(self) -> Ids:
        """Raises InvalidRequestError for a character that the vocabulary cannot spell."""
        bos_id, ids = self._tokenizer.bos_id, self._tokenizer.encode(self._prompt)
        return ids if bos_id is None or ids[:1] == (bos_id,) else (bos_id, *ids)

    async def hear(self, sampled_ids: Ids) -> str:
        """The sampled text, the stop that ended it left out."""
        return text_before(self._tokenizer.decode(action_of(sampled_ids, self.stop_ids)), self._stop)

    async def answer(self, step: Step) -> Continuation:
        """Raises InvalidRequestError, as `begin`."""
        assert isinstance(step.observation, str)
        return Continuation(None, self._tokenizer.encode(step.observation))


@final
class ChatDialogue:
    """Messages, by the base's chat template, whose rendering runs in the run's threads: a template is a program, and a long chat takes a while."""

    def __init__(self, prompt: Prompt, chat: ChatFormat, seams: Seams, rules: EpisodeRules) -> None:
        self._prompt, self._chat, self._seams, self._rules = prompt, chat, seams, rules
        self._conversation: Conversation | None = None
        self.stop_ids = rules.stop_ids

    async def begin(self) -> Ids:
        """Raises ChatTemplateError, as the other methods do."""
        self._conversation, self.stop_ids, ids = await self._in_thread(_opened, self._chat, self._prompt, self._rules.stop_ids)
        return ids

    async def hear(self, sampled_ids: Ids) -> Message:
        """The sampled message, with its tool calls parsed. A stop text stays in it: the template shows it again."""
        assert self._conversation is not None, "begin it first"
        return await self._in_thread(self._conversation.hear, sampled_ids)

    async def answer(self, step: Step) -> Continuation:
        """Several messages are one continuation."""
        assert self._conversation is not None, "begin it first"
        assert isinstance(step.observation, tuple)
        return await self._in_thread(self._conversation.reply, step.observation)

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        work = self._seams.threads.run(self._rules.run_id, function, *args)
        return await self._seams.clock.wait_for(work, self._rules.deadlines.step_s, "the chat template")


Dialogue: TypeAlias = TextDialogue | ChatDialogue
"""One episode's two sides. Touched by the task that plays the episode only. `stop_ids` end a turn, known once it has begun; `begin` gives the ids of
the prompt, `hear` what was sampled as the environment's action, `answer` the ids of an observation and how much of the path stays before them."""


def _opened(chat: ChatFormat, prompt: Prompt, stop_ids: Ids) -> tuple[Conversation, Ids, Ids]:
    """The conversation, all ids that end a turn of it, and the ids of its prompt. The template may end turns with a token of its own."""
    conversation = chat.open(prompt)
    return conversation, tuple(dict.fromkeys((*stop_ids, *chat.end_ids))), conversation.start()
