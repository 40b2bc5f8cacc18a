"""The closed set: how many programs a server's learner has, counted by compiling them; and that nothing else is ever compiled."""

from collections import Counter

from jax import monitoring
from learner_builders import ALGORITHM, drain, make_learner, nonzero_state, random_groups, spec

from noria.bench.executors import program_names
from noria.rl.tree import build_tree
from noria.types import LossSpec

CLASSES = (8, 32)
OF_A_CLASS = ("score", "pull", "_take_slot", "_write")
OF_A_CLASSES_WALKS = ("score_chunk", "pull_chunk")
OF_WALKS = ("extend_path",)
SIZES = {"max_positions": 192, "path_positions": 448, "num_slots": 5}
"""Of no other test: what was compiled before is not counted."""
"""No other test has these, so nothing is compiled before."""


def test_two_rank_classes_that_walk_have_sixteen_programs_and_eleven_if_they_do_not():
    compiled = []

    def record(event, _seconds, **named):
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(str(named.get("fun_name")).removeprefix("jit(").removesuffix(")"))

    monitoring.register_event_duration_secs_listener(record)
    try:
        learner = make_learner(**SIZES, rank_classes=CLASSES)
        learner.warm_up()
        found = Counter(name for name in compiled if name in program_names())
        found_losses = found.pop("loss_cotangents")
        assert found == {name: len(CLASSES) for name in OF_A_CLASS + OF_A_CLASSES_WALKS} | dict.fromkeys(OF_WALKS, 1)
        assert found.total() + found_losses <= 16
        assert found.total() + found_losses - found["extend_path"] - len(CLASSES) * len(OF_A_CLASSES_WALKS) <= 11
        compiled.clear()
        everything(learner)
        assert compiled == []
    finally:
        monitoring.unregister_event_duration_listener(record)


def everything(learner):
    """Packed passes, walks of both kinds, a loss over a whole batch, steps, copies out, and paging, in each class."""
    short, _ = build_tree(random_groups(1, num_groups=2), ALGORITHM)
    long, _ = build_tree(random_groups(2, num_groups=1, prompt=300), ALGORITHM)
    constant = learner.planner.plan(long, prefix_gradient="stop")
    assert learner.planner.plan(long).walk is not None
    for width in CLASSES:
        run_ids = [f"{width}.{number}" for number in range(4)]  # one more than slots
        for run_id in run_ids:
            run = spec(run_id, rank=width)
            learner.load_run(run, nonzero_state(1, run, max_rank=width))
        futures = [learner.train(run_ids[0], short), learner.train(run_ids[1], long), learner.train(run_ids[2], constant)]
        futures += [learner.train(run_ids[3], long, loss=LossSpec(m2_cap=1.0)), learner.score_ids(run_ids[0], (1, 2, 3))]
        drain(learner)
        futures += [learner.forward(run_ids[0], long, of_base=True), learner.pending_gradient(run_ids[0]), learner.save(run_ids[1])]
        drain(learner)
        for future in futures:
            future.result(0)
