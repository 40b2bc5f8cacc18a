"""Episodes that speak in messages: ids of one full render, what was sampled kept id for id, forks, kinds that do not mix, reward components."""

import math
import threading

import pytest
from actor_builders import EOS, Echo, Factory, Letters, ScriptedSampler, play, rules_for, seams_for
from chat_builders import END, MERGING, PLAIN, STRIPPING, Talk, chat_of

from noria.actors.group import play_all
from noria.actors.room import Room
from noria.actors.rules import rules_of
from noria.clock import VirtualClock
from noria.config import RunConfig
from noria.errors import ChatTemplateError, EnvironmentOutputError, RewardNotFiniteError
from noria.text.chat import ChatFormat
from noria.types import Message, Prompt, Task, ToolCall, ToolSpec


def talk(environment, template, replies, **changes):
    """The episode, and the prompts that the sampler was given."""
    clock = VirtualClock()
    sampler = ScriptedSampler(clock, replies)
    settings = {"max_turns": 9, "max_tokens": 99, "stop_ids": (EOS,)} | changes
    episode = play(lambda: environment, sampler=sampler, clock=clock, chat=None if template is None else chat_of(template), **settings)
    return episode, sampler.requests


def rendered(template, messages, *, prompt=True):
    return Letters().encode(chat_of(template).render(messages, add_generation_prompt=prompt))


def assert_the_sampler_saw(episode, requests):
    """Every request is the path before it, as far as its turn kept it, and its observation; every path is what was seen and sampled."""
    path, paths = (), []
    for turn, request in zip(episode.turns, requests, strict=True):
        paths += [path] if turn.keep is not None else []
        path = request.prompt_ids + turn.completion.sampled_ids
        assert request.prompt_ids[len(request.prompt_ids) - len(turn.observation_ids) :] == turn.observation_ids
    assert episode.paths == (*paths, path)


def test_a_conversation_is_one_render_and_what_was_sampled():
    environment = Talk(Message("user", "and then?"))
    episode, requests = talk(environment, PLAIN, [f"first{END}", f"second{END}"])
    messages = [*environment.prompt.messages, Message("assistant", "first"), Message("user", "and then?")]
    assert requests[0].prompt_ids == rendered(PLAIN, environment.prompt.messages)
    assert requests[1].prompt_ids == rendered(PLAIN, messages)
    assert episode.ids == requests[1].prompt_ids + Letters().encode(f"second{END}")
    assert environment.actions == [Message("assistant", "first"), Message("assistant", "second")]
    assert (episode.reward, episode.truncated) == (1.5, False)
    assert all(turn.keep is None for turn in episode.turns)
    assert_the_sampler_saw(episode, requests)


@pytest.mark.parametrize("template", [PLAIN, MERGING])
def test_two_adjacent_tool_messages_are_what_one_full_render_gives(template):
    results = (Message("tool", "4"), Message("tool", "9"))
    environment = Talk(results)
    episode, requests = talk(environment, template, [f"look{END}", f"done{END}"])
    full = [*environment.prompt.messages, Message("assistant", "look"), *results]
    assert requests[1].prompt_ids == rendered(template, full)
    text = Letters().decode(episode.turns[1].observation_ids)
    assert text.count("<user>") == (template is MERGING)
    assert_the_sampler_saw(episode, requests)


def test_tool_calls_arrive_parsed_and_are_trained_as_they_were_sampled():
    call = '<tool_call>{"name":"add",   "arguments": {"b":2,"a":1}}</tool_call>'
    tools = (ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}}),)
    environment = Talk(Message("tool", "3"), prompt=Prompt((Message("user", "1 + 2?"),), tools))
    episode, requests = talk(environment, PLAIN, [f"{call}{END}", f"3{END}"])
    (parsed,) = environment.actions[0].tool_calls
    assert (parsed.name, dict(parsed.arguments)) == ("add", {"b": 2, "a": 1})
    sampled = tuple(map(ord, f"{call}{END}"))
    assert episode.turns[0].completion.sampled_ids == sampled
    assert sampled == requests[1].prompt_ids[len(requests[0].prompt_ids) :][: len(sampled)]
    assert rendered(PLAIN, [*environment.prompt.messages, environment.actions[0]], prompt=False)[-len(sampled) - 1 : -1] != sampled
    assert_the_sampler_saw(episode, requests)


def test_a_word_in_two_pieces_stays_in_two_pieces():
    environment = Talk(Message("user", "with this"), Message("user", "that"))
    episode, requests = talk(environment, PLAIN, [f"the moth{END}"])
    pieces = tuple(map(ord, f"the moth{END}"))
    assert Letters().encode(f"the moth{END}") != pieces, "the text must be one that a second encoding would change"
    assert all(turn.completion.sampled_ids == pieces for turn in episode.turns)
    starts = [len(r.prompt_ids) for r in requests]
    assert [episode.ids[s : s + len(pieces)] for s in starts] == [pieces] * 3
    assert_the_sampler_saw(episode, requests)


def test_a_template_that_strips_reasoning_forks_the_episode():
    environment = Talk(Message("user", "more"), Message("user", "even more"))
    replies = [f"<think>{word}</think>{word[0]}{END}" for word in ("first", "second", "third")]
    episode, requests = talk(environment, STRIPPING, replies)
    assert [m.reasoning for m in environment.actions] == ["first", "second", "third"]
    assert [turn.keep is None for turn in episode.turns] == [True, False, False]
    said = [environment.actions[0], Message("user", "more"), environment.actions[1], Message("user", "even more")]
    assert requests[1].prompt_ids == rendered(STRIPPING, [*environment.prompt.messages, *said[:2]])
    assert requests[2].prompt_ids == rendered(STRIPPING, [*environment.prompt.messages, *said])
    assert len(episode.paths) == 3
    assert [path[-len(r) :] for path, r in zip(episode.paths, replies, strict=True)] == [tuple(map(ord, r)) for r in replies]
    assert episode.turns[1].keep == len(requests[0].prompt_ids), "all but what was rewritten is kept"
    assert_the_sampler_saw(episode, requests)


def test_a_turn_that_was_cut_gets_its_end_from_the_template_and_never_trains_it():
    environment = Talk(Message("user", "go on"))
    episode, requests = talk(environment, PLAIN, ["abcdefgh", f"x{END}"], max_tokens=4)
    first, second = episode.turns
    assert first.completion.sampled_ids == tuple(map(ord, "abcd"))
    assert second.observation_ids == Letters().encode(f"{END}\n<user>go on{END}\n<assistant>")
    assert environment.actions[0].content == "abcd"
    assert_the_sampler_saw(episode, requests)


def test_the_end_that_the_template_writes_is_a_stop_of_its_episodes():
    class TwoEnds(Letters):
        """Its own end of text is another token than the one that the template writes."""

        eos_id, end_ids = 1, (1,)

    clock = VirtualClock()
    sampler = ScriptedSampler(clock, [f"hello{END}"])
    environment = Talk()
    chat = ChatFormat(PLAIN, TwoEnds())
    episode = play(lambda: environment, sampler=sampler, clock=clock, tokenizer=TwoEnds(), chat=chat, stop_ids=(1, 10))
    assert sampler.requests[0].params.stop_ids == (1, 10, EOS)
    assert not episode.truncated
    assert environment.actions == [Message("assistant", "hello")]


ADD, SUB = ('<tool_call>{"name": "' + name + '", "arguments": {}}</tool_call>' for name in ("add", "sub"))


@pytest.mark.parametrize(
    ("said", "results", "message"),
    [
        (ADD + SUB, (Message("tool", "4"),), "without a call_id, .* several are open .'call00000', 'call00001'"),
        (ADD, (Message("tool", "4"), Message("tool", "5")), "all are answered"),
        (ADD, (Message("tool", "4", call_id="call00001"),), "'call00001', which nobody called; calls: 'call00000'"),
    ],
)
def test_an_answer_to_no_call_or_to_any_is_refused(said, results, message):
    with pytest.raises(EnvironmentOutputError, match=message):
        talk(Talk(results), PLAIN, [f"{said}{END}", f"done{END}"], max_tokens=200)


def test_an_answer_to_the_only_open_call_needs_no_id_and_is_shown_with_it():
    template = PLAIN + "{% if messages[-1].role == 'tool' %}{% for m in messages %}{{ m.tool_call_id }}|{{ m.name }};{% endfor %}{% endif %}"
    environment = Talk((Message("tool", "9", call_id="call00001"), Message("tool", "4")), prompt=Prompt((Message("user", "go"),)))
    _, requests = talk(environment, template, [f"{ADD}{SUB}{END}", f"done{END}"], max_tokens=200)
    assert Letters().decode(requests[1].prompt_ids).endswith("call00001|sub;call00000|add;")


@pytest.mark.parametrize("bos_id", [None, 2])
@pytest.mark.parametrize("writes_bos", [False, True])
def test_there_is_one_bos_or_none(bos_id, writes_bos):
    class WithBos(Letters):
        pass

    WithBos.bos_id = bos_id
    text = type("Text", (Echo,), {"reset": lambda self, task: "\x02task: " if writes_bos else "task: "})
    ids = play(text, tokenizer=WithBos(), max_turns=2).ids
    assert ids.count(2) == (writes_bos or bos_id is not None)
    assert 2 not in ids[1:]
    template = ("{{ bos_token }}" if writes_bos else "") + PLAIN
    clock = VirtualClock()
    chat = ChatFormat(template, WithBos(), bos="\x02")
    sampler = ScriptedSampler(clock, [f"a{END}"])
    ids = play(lambda: Talk(Message("user", "b")), sampler=sampler, clock=clock, tokenizer=WithBos(), chat=chat, stop_ids=(EOS,), max_turns=2).ids
    assert ids.count(2) == ids[:1].count(2) == writes_bos, "the template's own, if it writes one"


def test_messages_for_a_base_without_a_template_fail_at_once_and_are_not_tried_again():
    clock = VirtualClock()
    seams = seams_for(ScriptedSampler(clock), clock)

    async def group():
        return await play_all(seams, rules_for(Talk), [(Task(0, 0), "e", 0)], tries=3, room=Room(1, seams.spans))

    ((played),) = clock.run(group())
    assert (played.failure.code, played.failure.num_tries) == ("chat_template_invalid", 1)
    assert "has no chat template: return text" in played.failure.message
    seams.threads.shutdown()
    seams.loops.shutdown()


def test_a_template_that_refuses_the_messages_fails_the_episode_with_its_own_words():
    template = PLAIN + "{% if messages[-1].role == 'tool' %}{{ raise_exception('no tools, please') }}{% endif %}"
    with pytest.raises(ChatTemplateError, match="no tools, please"):
        talk(Talk(Message("tool", "1")), template, [f"a{END}"])


def test_a_later_message_without_room_truncates():
    clock = VirtualClock()
    sampler = ScriptedSampler(clock, [f"a{END}"], max_context=70)
    episode = play(lambda: Talk(Message("user", "x" * 50)), sampler=sampler, clock=clock, chat=chat_of(PLAIN), stop_ids=(EOS,), max_turns=5)
    assert (len(episode.turns), episode.truncated, episode.reward) == (1, True, 0.5)


def test_no_template_is_rendered_in_the_actors_thread():
    threads = set()

    class Noting(Letters):
        def encode(self, text):
            threads.add(threading.get_ident())
            return super().encode(text)

    clock = VirtualClock()
    environment = Talk(Message("user", "b"))
    play(
        lambda: environment, sampler=ScriptedSampler(clock, [f"a{END}"]), clock=clock, chat=ChatFormat(PLAIN, Noting()), stop_ids=(EOS,), max_turns=2
    )
    assert threads
    assert threading.get_ident() not in threads


# What an environment may return

USER, OWN = Message("user", "x"), Message("assistant", "x")


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        ("text", "it must be a Message, or several: the episode began with a Prompt"),
        (None, "it must be a Message"),
        ((), "empty sequence"),
        (OWN, "only the policy speaks for the assistant"),
        ((USER, OWN), "only the policy speaks for the assistant"),
        ((USER, "x"), "str 'x'; it must be a noria.types.Message"),
        ({"role": "user", "content": "x"}, "dict .* it must be a Message"),
        ([{"role": "user", "content": "x"}], "dict .* must be a noria.types.Message"),
        (Message("User", "x"), "role str 'User'; known roles: system, user, assistant, tool"),
        (Message("user", None), "content is NoneType"),
        (Message("tool", "x", call_id=3), "call_id is int"),
        (Message("tool", "x", call_id="call00000"), "call_id 'call00000', which nobody called; calls: none"),
        (Message("user", "x", tool_calls=({"name": "f"},)), "must be a noria.types.ToolCall"),
        (Message("user", "x", tool_calls=(ToolCall("f", [1]),)), "arguments are list"),
        (Message("user", "x", tool_calls=(ToolCall("f", {"a": math.nan}),)), "plain JSON values"),
        (Message("user", "x", tool_calls="f"), "tool_calls are str"),
        (Message("user", "x", reasoning=1), "reasoning is int"),
    ],
)
def test_an_observation_of_a_wrong_kind_in_a_chat_is_named(observation, message):
    with pytest.raises(EnvironmentOutputError, match=message):
        talk(Talk(observation), PLAIN, [f"a{END}"])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (Prompt(()), "without messages"),
        (Prompt("hello"), "messages are str"),
        (Prompt(("hello",)), "it must be a noria.types.Message"),
        (Prompt((USER, Message("tool", "x", call_id="c"))), "call_id 'c', which nobody called"),
        (Prompt((USER,), ("calculator",)), "it must be a noria.types.ToolSpec"),
        (Prompt((USER,), (ToolSpec("f", "d", {"x": {1, 2}}),)), "plain JSON values"),
        (Prompt((USER,), (ToolSpec("f", None, {}),)), "description is NoneType"),
        ([USER], "must be text, or a noria.types.Prompt"),
        (USER, "must be text, or a noria.types.Prompt"),
    ],
)
def test_a_prompt_of_a_wrong_kind_is_named(prompt, message):
    with pytest.raises(EnvironmentOutputError, match=message):
        talk(Talk(prompt=prompt), PLAIN, [f"a{END}"])


def test_a_message_in_an_episode_of_text_is_named():
    with pytest.raises(EnvironmentOutputError, match=r"it must be text: the episode began with text\. Begin it with a noria\.types\.Prompt"):
        talk(Talk(USER, prompt="plain"), PLAIN, [f"a{END}"])


def test_a_prompt_may_show_the_assistant_at_work_and_lists_are_sequences_too():
    shown = Prompt([USER, OWN, USER], [])
    episode, requests = talk(Talk([USER], prompt=shown), PLAIN, [f"a{END}"])
    assert requests[0].prompt_ids == rendered(PLAIN, shown.messages)
    assert len(episode.turns) == 2


# Reward components


def rewarded(parts, weights, *, num_turns=1, **changes):
    answers = [Message("user", "on")] * (num_turns - 1)
    return talk(Talk(*answers, parts=parts), PLAIN, [f"a{END}"], reward_weights=weights, **changes)[0]


def test_weights_make_the_reward_of_the_summed_components():
    episode = rewarded({"correct": 1.0, "short": 0.25, "seen": 7.0}, {"correct": 2.0, "short": -1.0}, num_turns=3)
    assert episode.reward == 3 * (2.0 - 0.25)
    assert dict(episode.reward_parts) == {"correct": 3.0, "short": 0.75, "seen": 21.0}, "components without a weight are metrics"
    assert rewarded({"correct": 1.0}, {}).reward == 1.0, "without weights the steps' own rewards count"


def test_a_weighted_component_that_was_never_reported_is_an_error_that_names_both():
    with pytest.raises(EnvironmentOutputError, match=r"weighs corect, which .* it reported correct, short"):
        rewarded({"correct": 1.0, "short": 0.0}, {"corect": 1.0, "short": 1.0})
    with pytest.raises(EnvironmentOutputError, match="it reported no reward_parts"):
        rewarded({}, {"correct": 1.0})


def test_an_episode_that_was_cut_before_its_end_lacks_components_without_being_broken():
    episode = rewarded({"called": 1.0}, {"called": 0.5, "correct": 1.0}, num_turns=3, max_turns=2)
    assert (episode.truncated, episode.reward) == (True, 1.0)


def test_a_weighted_sum_that_overflows_fails_the_episode():
    with pytest.raises(RewardNotFiniteError, match="weighted sum"):
        rewarded({"a": 1e308}, {"a": 1e10})


def test_the_weights_come_from_the_run_file():
    config = RunConfig.model_validate(
        {"name": "r", "environment": {"name": "x", "rewards": {"a": 1.0, "b": -0.5}}, "algorithm": {"steps": 1}},
    )
    assert rules_of(config, "r", Factory(Echo), Letters()).reward_weights == {"a": 1.0, "b": -0.5}
