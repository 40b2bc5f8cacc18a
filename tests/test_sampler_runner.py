"""The runner alone, dispatch by dispatch: what is scored, what is drawn, and what may change neither."""

import numpy as np
import pytest
from sampler_builders import adapter, config, merged, prompt, tiny

from noria.model.transformer import forward_logits
from noria.sampler.pages import PAGE, PageMove
from noria.sampler.runner import Runner, Shapes
from noria.sampler.sequence import BLOCK_PAGES, CHUNK, LANES_PER_TILE, DecodeDispatch, LaneTile, PrefillDispatch, PrefillRow, Sequence
from noria.types import MAX_TOP, SampleRequest, SamplingParams

PAGES_EACH = 8


def runner(widths=(16, 32)):
    """Slots 1 and 2 hold adapters of seeds 1 and 2, of ranks 4 and 12."""
    model, _, base = tiny()
    found = Runner(base, model, config(num_slots=4), rank_classes=(4, 16), shapes=Shapes(lanes=widths, rows=(4,)))
    found.write_slot(1, adapter(1), 0.5)
    found.write_slot(2, adapter(2, rank=12), 0.5)
    return found


def sequence(number, ids, *, num_top=0, **params):
    request = SampleRequest(f"r{number}", "t", "", f"e{number}", ids, SamplingParams(**{"max_tokens": 8, "seed": number} | params), num_top=num_top)
    return Sequence(request, (), table=list(range(1 + number * PAGES_EACH, 1 + (number + 1) * PAGES_EACH)))


def rows_of(each, slot, *, is_scored=False, num_top=0):
    """All positions of the prompt but the last."""
    ids = each.request.prompt_ids
    for start in range(0, len(ids) - 1, CHUNK):
        stop = min(start + CHUNK, len(ids) - 1)
        targets = ids[start + 1 : stop + 1] if is_scored else ()
        yield PrefillRow(ids[start:stop], start, each.table[: -(-stop // PAGE)], slot, targets, num_top)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    return logits - logits.max(-1, keepdims=True) - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))


@pytest.mark.parametrize("slot", [0, 1, 2])
def test_prompt_logprobs_are_those_of_a_full_forward_pass_and_so_are_the_most_likely_ids(slot):
    each = sequence(0, prompt(50))
    scored = runner().prefill(PrefillDispatch([], list(rows_of(each, slot, is_scored=True, num_top=5))))
    weights = tiny()[1] if slot == 0 else merged(tiny()[1], adapter(slot, rank=(4, 12)[slot - 1]), 0.5)
    expected = log_softmax(forward_logits(weights, tiny()[0], np.array(each.request.prompt_ids)))
    found = [x for row in scored for x in row.logprobs]
    np.testing.assert_allclose(found, expected[np.arange(49), each.request.prompt_ids[1:]], atol=1e-4)
    top = [x for row in scored for x in row.top]
    assert [len(ids) for ids in top] == [5] * 49
    for position, ids in enumerate(top):
        np.testing.assert_allclose([logprob for _, logprob in ids], np.sort(expected[position])[::-1][:5], atol=1e-4)
        np.testing.assert_allclose([expected[position, id_] for id_, _ in ids], [logprob for _, logprob in ids], atol=1e-4)


def test_a_prefill_without_rows_only_moves_pages():
    device = runner()
    device.prefill(PrefillDispatch([], list(rows_of(sequence(0, prompt(50)), 1))))
    before = [np.asarray(x).copy() for x in (*device._k, *device._v)]
    assert device.prefill(PrefillDispatch([], [], stores=[PageMove(1, 0), PageMove(2, 1)], loads=[PageMove(20, 1)])) == []
    for old, new in zip(before, map(np.asarray, (*device._k, *device._v)), strict=True):
        assert np.array_equal(new[20], old[2])
        assert np.array_equal(new[1:20], old[1:20])


def test_scoring_writes_the_same_pages_bit_for_bit():
    pools = []
    for is_scored in (False, True):
        device = runner()
        device.prefill(PrefillDispatch([], list(rows_of(sequence(0, prompt(50)), 1, is_scored=is_scored))))
        pools.append([np.asarray(x)[1:5].tobytes() for x in (*device._k, *device._v)])
    assert pools[0] == pools[1]


def decode(sequences_and_slots, lanes_per_tile, widths=(16, 32)):
    """What each was sampled in one dispatch."""
    device = runner(widths)
    for each, slot in sequences_and_slots:
        device.prefill(PrefillDispatch([], list(rows_of(each, slot))))
    tiles = [LaneTile(slot, 0, [each]) for each, slot in sequences_and_slots]
    if lanes_per_tile == LANES_PER_TILE:
        slots = sorted({slot for _, slot in sequences_and_slots})
        tiles = [LaneTile(slot, 0, [each for each, own in sequences_and_slots if own == slot]) for slot in slots]
    sampled = device.decode(DecodeDispatch([], tiles, is_fixed=False, lanes_per_tile=lanes_per_tile))
    return {s.request.request_id: lane for tile, lanes in zip(tiles, sampled, strict=True) for s, lane in zip(tile.sequences, lanes, strict=True)}


def test_lanes_sample_the_same_bits_whether_their_prefix_is_read_once_or_by_each():
    found = []
    for num_shared in (0, BLOCK_PAGES):
        device = runner((16,))
        mine = [sequence(n, (*prompt(70), *prompt(3 + n, seed=n)), num_top=2) for n in range(6)]
        for each in mine:
            device.prefill(PrefillDispatch([], list(rows_of(each, 2))))
            each.table[:BLOCK_PAGES] = mine[0].table[:BLOCK_PAGES]
        found.append(device.decode(DecodeDispatch([], [LaneTile(2, 0, mine, num_shared)])))
    assert found[0] == found[1]


def test_lanes_in_tiles_of_their_own_sample_the_same_bits_as_in_tiles_of_eight():
    """On CPU, in a program of the same width: which of the two it is depends on neighbours."""
    mine = [(sequence(n, prompt(20 + n, seed=n), num_top=3 * (n % 2)), n % 2 + 1) for n in range(12)]
    wide = [*mine, *((sequence(n, prompt(9, seed=n)), 0) for n in range(12, 15))]
    single = decode(wide, 1, (32,))
    assert single == decode(wide, LANES_PER_TILE, (32,))
    assert single == decode(wide[::-1], 1, (32,))
    for name, lane in decode(mine, 1, (32,)).items():
        assert lane == single[name]


def test_a_plain_lane_samples_the_same_bits_beside_constrained_ones_and_gets_no_tops():
    plain = [(sequence(n, prompt(20, seed=n)), 1) for n in range(4)]
    cut = [(sequence(n, prompt(20, seed=n), top_k=3, top_p=0.8, num_top=MAX_TOP), 1) for n in range(4, 8)]
    alone, beside = decode(plain, 1), decode([*plain, *cut], 1)
    for each, _ in plain:
        name = each.request.request_id
        assert beside[name] == alone[name]
        assert beside[name].top == ()
    for each, _ in cut:
        lane = beside[each.request.request_id]
        assert [len(top) for top in lane.top] == [MAX_TOP] * len(lane.ids)
        for id_, logprob, top in zip(lane.ids, lane.behavior_logprobs, lane.top, strict=True):
            assert (id_, logprob) in top[:3]
