"""Which groups make the next batch, such that no admitted group is ever trained beyond the staleness bound (design section 8).

Every outstanding group has a last chance: the largest version at which it may train, `oldest_version + max_staleness`. A batch trains `n` groups
and raises the version by one. So the bound can be kept if and only if, for every j >= 0, at most `j * n` of the groups left behind have their
last chance before `version + 1 + j`; this is the schedulability test of earliest deadline first with n machines and unit jobs. The former picks the
oldest admitted groups that keep it true, and waits rather than break it.

By induction it stays true for a run with (max_staleness + 1) * n places whose groups are admitted at the learner's version: a new group has
max_staleness + 1 chances, so the places themselves bound the groups it competes with.
"""

from collections.abc import Sequence

from noria.protocols import Outstanding


def form_batch(outstanding: Sequence[Outstanding], *, version: int, max_staleness: int, groups_per_batch: int) -> list[str] | None:
    """Group ids of the batch to train at `version`, by admission; None = wait for more groups to be ready.

    outstanding: every group of the run that holds a place, in any order; `oldest_version` of a group that is not ready is a lower bound (its
    version at admission), so waiting for it errs on the safe side. version: the learner's, >= 0. max_staleness >= 0. groups_per_batch >= 1.

    Oldest admitted first among the ready groups, except where deadlines leave no choice; then the earliest deadline first. A group that is already
    past the bound is never picked and never waited for (see `beyond_bound`). If more groups have their last chance now than a batch holds (only
    possible when groups were pushed or admitted from outside these rules), the batch takes as many of them as it can.
    """
    chances_left = {g.group_id: min(g.oldest_version + max_staleness - version, max_staleness) for g in outstanding}
    alive = sorted((g for g in outstanding if chances_left[g.group_id] >= 0), key=lambda g: g.admission)
    # room[j]: how many groups may be picked that can wait for more than j further steps. Groups that cannot take the rest of the batch.
    room = []
    for j in range(max_staleness + 1):
        num_urgent = sum(chances_left[g.group_id] <= j for g in alive)
        room.append(groups_per_batch - min(max(num_urgent - j * groups_per_batch, 0), groups_per_batch))
    batch: list[str] = []
    for group in alive:
        patience = chances_left[group.group_id]
        if len(batch) < groups_per_batch and group.is_ready and all(room[:patience]):
            batch.append(group.group_id)
            room[:patience] = [r - 1 for r in room[:patience]]
    return batch if len(batch) == groups_per_batch else None


def rate_scale(staleness: float, k: float) -> float:
    """What the learning rate of a step is multiplied by: 1 / (1 + k * staleness), since the bias of stale data grows as staleness times learning rate
    (arXiv 2607.01083). staleness >= 0: of the batch, in versions. k >= 0; 0 = off."""
    return 1.0 / (1.0 + k * staleness)


def beyond_bound(outstanding: Sequence[Outstanding], *, version: int, max_staleness: int) -> list[str]:
    """Ids of ready groups that can no longer train within the bound, to be dropped as "stale".

    Empty for groups that were admitted and batched by these rules; groups pushed from outside may arrive too old.
    """
    return [g.group_id for g in outstanding if g.is_ready and g.oldest_version + max_staleness < version]
