"""What `noria check` and a dump of episodes mark as trained is what the learner is given, token for token."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from rl_batches import algorithm, batches

from noria.buffer.sqlite import SettledGroup
from noria.buffer.tables import TRAINED
from noria.report.check import _mask
from noria.report.episodes import _rows
from noria.rl.credit import trained_turns
from noria.rl.tree import build_tree
from noria.text.tokenizer import ByteTokenizer

ALGORITHMS = st.builds(algorithm, zero_signal=st.sampled_from(["skip", "train", "resample"]), truncated=st.sampled_from(["mask", "penalize", "keep"]))


@settings(deadline=None)
@given(batches(), ALGORITHMS)
def test_marks_are_the_entries_of_the_tree(groups, chosen):
    for group in groups:
        entries = build_tree([group], chosen)[0].entries
        want = Counter(zip(entries.target_M.tolist(), entries.behavior_logprobs_M.tolist(), strict=True))
        dumped = [row for row in _rows(SettledGroup(group, TRAINED, "", 1), chosen, ByteTokenizer())]
        marked = [(row["ids"][i], row["behavior_logprobs"][i]) for row in dumped for i, flag in enumerate(row["trained"]) if flag]
        assert Counter((token, round(logprob, 4)) for token, logprob in marked) == Counter((t, round(p, 4)) for t, p in want.elements())
        episodes = sorted(group.episodes, key=lambda e: e.member)
        shown = [_mask(episode, turns) for episode, turns in zip(episodes, trained_turns(group, chosen), strict=True)]
        assert sum(map(sum, shown)) == len(entries)
        for episode, mask, turns in zip(episodes, shown, trained_turns(group, chosen), strict=True):
            assert len(mask) == sum(len(turn.observation_ids) + len(turn.completion.sampled_ids) for turn in episode.turns)
            assert all(turn.temperature > 0 for turn, trains in zip(episode.turns, turns, strict=True) if trains)
