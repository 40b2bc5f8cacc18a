"""Room for episodes: never more than there is, none lost, and equal parts for the runs that want more."""

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.actors.room import Room
from noria.clock import VirtualClock
from noria.observe import SpanRecorder


def test_a_run_with_many_episodes_leaves_room_for_one_with_few():
    clock = VirtualClock()
    room = Room(4, SpanRecorder(clock))
    entered: list[str] = []

    async def play(run_id: str) -> None:
        async with room.enter(run_id):
            entered.append(run_id)
            await clock.sleep(10)

    async def main() -> None:
        flood = [asyncio.ensure_future(play("flood")) for _ in range(40)]
        await clock.sleep(1)
        few = [asyncio.ensure_future(play("few")) for _ in range(2)]
        await asyncio.gather(*few)
        assert clock.now() < 21, "the few enter as soon as places are free"
        await asyncio.gather(*flood)

    clock.run(main())
    assert entered[:6].count("few") == 2
    assert (len(entered), room.num_inside) == (42, 0)


VISITS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.integers(1, 9), st.booleans()), max_size=40)


@given(st.integers(1, 5), VISITS)
@settings(max_examples=60, deadline=None)
def test_room_is_never_exceeded_and_never_lost(size, visits):
    clock = VirtualClock()
    room = Room(size, SpanRecorder(clock))
    inside = Counter()

    async def visit(run_id: str, after_s: int, for_s: int) -> None:
        await clock.sleep(after_s)
        async with room.enter(run_id):
            inside[run_id] += 1
            try:
                assert inside.total() <= size
                await clock.sleep(for_s)
            finally:
                inside[run_id] -= 1

    async def main() -> None:
        tasks = []
        for run_id, after_s, for_s, is_cancelled in visits:
            task = asyncio.ensure_future(visit(run_id, after_s, for_s))
            tasks.append(task)
            if is_cancelled:
                asyncio.get_running_loop().call_later(after_s + for_s / 2, task.cancel)
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [each for each in outcomes if isinstance(each, Exception)]

    clock.run(main())
    assert room.num_inside == 0
    clock.run(_fill(room, size))


async def _fill(room: Room, size: int) -> None:
    """All places are free again: so many may be inside at once."""
    inside = asyncio.Barrier(size)

    async def enter() -> None:
        async with room.enter("x"):
            await inside.wait()

    await asyncio.gather(*(enter() for _ in range(size)))
