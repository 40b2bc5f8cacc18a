"""Batch forming: the staleness bound holds in every simulated run, nothing waits for ever, and no older group is passed over without need."""

from dataclasses import replace
from itertools import combinations

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from noria.protocols import Outstanding
from noria.rl.staleness import beyond_bound, form_batch


def ready(admission: int, oldest_version: int) -> Outstanding:
    return Outstanding(f"g{admission}", admission, oldest_version, True)


def running(admission: int, version: int) -> Outstanding:
    return Outstanding(f"g{admission}", admission, version, False)


def can_still_keep_the_bound(left: list[Outstanding], *, version: int, max_staleness: int, groups_per_batch: int) -> bool:
    """Whether the groups left behind by a step at `version` can all train in time: the condition of design section 8, spelled out."""
    last_chances = [g.oldest_version + max_staleness for g in left]
    return all(sum(c <= version + j for c in last_chances) <= j * groups_per_batch for j in range(max_staleness + 2))


def test_too_few_ready_groups_wait():
    assert form_batch([], version=0, max_staleness=0, groups_per_batch=1) is None
    assert form_batch([ready(0, 0), running(1, 0)], version=0, max_staleness=1, groups_per_batch=2) is None


def test_oldest_admitted_first_in_order_of_admission():
    groups = [ready(3, 0), ready(0, 0), running(1, 0), ready(2, 0), ready(4, 0)]
    assert form_batch(groups, version=0, max_staleness=4, groups_per_batch=3) == ["g0", "g2", "g3"]


def test_a_group_that_would_exceed_the_bound_after_the_step_is_waited_for():
    groups = [running(0, 2), ready(1, 3), ready(2, 3)]
    assert form_batch(groups, version=3, max_staleness=1, groups_per_batch=2) is None
    assert form_batch(groups, version=3, max_staleness=2, groups_per_batch=2) == ["g1", "g2"]


def test_too_many_groups_with_the_same_last_chance_are_waited_for_before_it_is_too_late():
    slow, old, fresh = [running(k, 0) for k in range(3)], ready(3, 0), ready(4, 1)
    assert form_batch([*slow, old, fresh], version=1, max_staleness=2, groups_per_batch=2) is None
    assert form_batch([*slow[:2], old, fresh], version=1, max_staleness=2, groups_per_batch=2) == ["g3", "g4"]


def test_an_earlier_deadline_overtakes_an_older_admission_only_when_it_must():
    fresh, old = [ready(0, 5), ready(1, 5)], [ready(2, 4), ready(3, 4)]
    assert form_batch([*fresh, *old], version=5, max_staleness=2, groups_per_batch=2) == ["g0", "g1"]
    assert form_batch([*fresh, *old], version=5, max_staleness=1, groups_per_batch=2) == ["g2", "g3"]
    assert form_batch([*fresh, old[0]], version=5, max_staleness=1, groups_per_batch=2) == ["g0", "g2"]


def test_staleness_zero_trains_its_own_version_only():
    groups = [ready(0, 7), ready(1, 7)]
    assert form_batch(groups, version=7, max_staleness=0, groups_per_batch=2) == ["g0", "g1"]
    assert form_batch(groups, version=8, max_staleness=0, groups_per_batch=2) is None
    assert beyond_bound(groups, version=8, max_staleness=0) == ["g0", "g1"]


def test_data_that_arrived_too_old_is_reported_and_blocks_nothing():
    groups = [ready(0, 0), ready(1, 5), ready(2, 5), running(3, 0)]
    assert form_batch(groups, version=5, max_staleness=1, groups_per_batch=2) == ["g1", "g2"]
    assert beyond_bound(groups, version=5, max_staleness=1) == ["g0"]


def test_more_urgent_groups_than_a_batch_holds_are_taken_as_far_as_possible():
    groups = [ready(0, 5), ready(1, 4), ready(2, 4), ready(3, 4)]
    assert form_batch(groups, version=5, max_staleness=1, groups_per_batch=2) == ["g1", "g2"]


@settings(max_examples=500)
@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=8), st.integers(0, 4), st.integers(1, 3), st.permutations(range(8)))
def test_the_batch_is_the_oldest_one_that_keeps_the_bound(ages, max_staleness, groups_per_batch, order):
    version = 10
    groups = [Outstanding(f"g{a}", a, version - min(age, max_staleness), is_ready) for a, (age, is_ready) in enumerate(ages)]
    assume(can_still_keep_the_bound(groups, version=version - 1, max_staleness=max_staleness, groups_per_batch=groups_per_batch))
    rule_ = {"version": version, "max_staleness": max_staleness, "groups_per_batch": groups_per_batch}
    choices = combinations([g for g in groups if g.is_ready], groups_per_batch)
    allowed = (c for c in choices if can_still_keep_the_bound([g for g in groups if g not in c], **rule_))
    expected = next(([g.group_id for g in c] for c in allowed), None)  # combinations come oldest first
    assert form_batch([groups[i] for i in order if i < len(groups)], **rule_) == expected


class Run(RuleBasedStateMachine):
    """One run: groups are admitted into free places at the learner's version, finish or are dropped in any order, and are batched."""

    @initialize(max_staleness=st.integers(0, 4), groups_per_batch=st.integers(1, 3))
    def start(self, max_staleness: int, groups_per_batch: int) -> None:
        self.rule = {"max_staleness": max_staleness, "groups_per_batch": groups_per_batch}
        self.num_places = (max_staleness + 1) * groups_per_batch
        self.version = 0
        self.num_admitted = 0
        self.groups: dict[str, Outstanding] = {}

    @rule(most=st.integers(1, 20))
    def admit(self, most: int) -> None:
        for _ in range(min(most, self.num_places - len(self.groups))):
            group = running(self.num_admitted, self.version)
            self.groups[group.group_id] = group
            self.num_admitted += 1

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.unfinished()))
        oldest = data.draw(st.integers(group.oldest_version, self.version))
        self.groups[group.group_id] = replace(group, oldest_version=oldest, is_ready=True)

    @precondition(lambda self: self.groups)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.groups[data.draw(st.sampled_from(sorted(self.groups)))]

    @rule()
    def step(self) -> None:
        batch = form_batch(list(self.groups.values()), version=self.version, **self.rule)
        if batch is None:
            return
        assert len(set(batch)) == self.rule["groups_per_batch"]
        for group in (self.groups.pop(name) for name in batch):
            assert group.is_ready
            assert 0 <= self.version - group.oldest_version <= self.rule["max_staleness"]
        self.version += 1

    @rule()
    def finish_everything_and_step(self) -> None:
        self.admit(self.num_places)
        for group in self.unfinished():
            self.groups[group.group_id] = replace(group, is_ready=True)
        before = self.version
        self.step()
        assert self.version == before + 1, "all places are full of ready groups and no batch forms"

    @invariant()
    def no_admitted_group_is_lost_to_staleness(self) -> None:
        if hasattr(self, "groups"):
            assert all(self.version - g.oldest_version <= self.rule["max_staleness"] for g in self.groups.values())
            assert not beyond_bound(list(self.groups.values()), version=self.version, max_staleness=self.rule["max_staleness"])

    def unfinished(self) -> list[Outstanding]:
        return [g for g in self.groups.values() if not g.is_ready]


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
