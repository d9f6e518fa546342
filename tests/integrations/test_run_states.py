"""States of runs under trainers: what is damaged is refused when it is loaded, before any step."""

import random
from dataclasses import fields
from functools import cache

import language_models as lm
import pytest
import torch
import trainers
from damaged_states import MISSING, damaged, mutations, replaced, resealed
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import ODBDataLoader, StateError, save_state
from odb_nodes._support.difference import difference
from odb_nodes.integrations.huggingface import run as huggingface
from odb_nodes.integrations.lightning import ODBCallback
from odb_nodes.integrations.lightning import run as lightning
from odb_nodes.training.checkpoints.rank_states import rank_file

pytestmark = pytest.mark.filterwarnings(trainers.OF_LIGHTNING)

SAMPLED = 25
FIELDS = [
    (kind, field.name)
    for kind, declared in (("huggingface", huggingface.RunState), ("lightning", lightning.RunState))
    for field in fields(declared)
]
HOLDERS = {"huggingface": "ODBTrainer", "lightning": "ODBCallback"}
KINDS = sorted(HOLDERS)


class HuggingFace:
    """Saves and loads as `ODBTrainer.train` does, but takes no optimizer step."""

    def __init__(self, folder):
        self.folder, self.trainer = folder, trainers.make_trainer(folder)

    def states(self):
        run = huggingface.TrainRun(self.trainer, None)
        it, states = iter(run.batches), []
        for _ in range(2):
            self.trainer.state.global_step += 1
            next(it)
            states.append(run.state_dict())
        run.batches.loader.close()
        return states

    def load(self, state):
        (self.folder / "checkpoint").mkdir(exist_ok=True)
        save_state(state, self.folder / "checkpoint" / rank_file(0, 1))
        huggingface.TrainRun(self.trainer, str(self.folder / "checkpoint"))


class Lightning:
    """Saves in a run of two steps, and loads as `Trainer.fit` does."""

    def __init__(self, folder):
        self.folder, self.trainer = folder, trainers.lightning_trainer(ODBCallback())
        self.trainer.state.fn = "fit"

    def states(self):
        trainers.train("Lightning", folder=self.folder, size=9, epochs=1, save_every=1)
        paths = (self.folder / f"step-{step}.ckpt" for step in (1, 2))
        return [torch.load(path, weights_only=True)["odb_nodes"][0] for path in paths]

    def load(self, state):
        self.load_all([state])

    def load_all(self, states):
        callback = ODBCallback()
        callback.on_load_checkpoint(self.trainer, trainers.Module(), {"odb_nodes": states})
        callback.batches(ODBDataLoader(lm.Texts(9), token_budget=64, window=12, round_size=4))


@pytest.fixture(scope="module")
def saved_runs(tmp_path_factory):
    """Return a function: kind -> its saver and loader, and its states after two steps."""

    @cache
    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        saver = HuggingFace(folder) if kind == "huggingface" else Lightning(folder)
        return saver, *saver.states()

    return make


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_the_error_of_a_damaged_field_names_holder_and_field(saved_runs, kind, field):
    """Also where the digest fits: as of a state that a faulty version has saved."""
    saver, early, state = saved_runs(kind)
    holder = HOLDERS[kind]
    for name, value in [*mutations(state[field]), ("of the other state", early[field])]:
        if difference(state[field], value):
            with pytest.raises(StateError, match=f"the state of {holder} "):
                saver.load(replaced(state, [field], value))
                pytest.fail(name)
    with pytest.raises(StateError, match=f"the state of {holder} lacks `{field}`"):
        saver.load(resealed(replaced(state, [field], MISSING)))


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_part_is_refused(saved_runs, kind, exhaustive):
    saver, early, state = saved_runs(kind)
    saver.load(state)  # Not all is refused.
    broken = list(damaged(state))
    for damage, broken_state in broken if exhaustive else random.Random(0).sample(broken, SAMPLED):
        with pytest.raises(StateError):
            saver.load(broken_state)
            pytest.fail(damage)
    mixed = {**state["loader"], "root": early["loader"]["root"]}
    with pytest.raises(StateError, match="the state of Loader is damaged"):
        saver.load(resealed({**state, "loader": mixed}))


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_the_state_of_another_trainer_is_refused(saved_runs, kind, other):
    saver, _, state = saved_runs(kind)
    with pytest.raises(StateError, match=f"saved by `{HOLDERS[other]}`, but is loaded into"):
        saver.load(saved_runs(other)[1])
    with pytest.raises(StateError, match="saved by `Loader`, but is loaded into"):
        saver.load(state["loader"])


@pytest.mark.parametrize("states", [5, {"0": {}}, [], [None], [[]], [{}]], ids=repr)
def test_what_holds_no_states_of_ranks_is_refused(saved_runs, states):
    with pytest.raises(StateError):
        saved_runs("lightning")[0].load_all(states)


# --- the expected steps of a run whose number of ranks changes --------------------------------

COUNT = st.integers(1, 50)


def begun(steps_per_epoch, ranks, step=0, rank_steps=0):
    """A run of an estimate, after some steps."""
    plan = {"steps_per_epoch": steps_per_epoch, "planned_ranks": ranks, "rank_steps": rank_steps}
    return huggingface.RunState(step=step, loader={}, **plan)


def gone_on(run, step, ranks):
    """The run where these ranks have taken it to a step."""
    rank_steps = run.rank_steps_at(step, ranks)
    return begun(run.steps_per_epoch, run.planned_ranks, step, rank_steps)


def test_half_the_ranks_take_twice_the_steps():
    run = gone_on(begun(10, 4), 5, 4)
    assert run.schedule_steps(3) == 30
    assert run.total_steps(3, 2) == 5 + 50
    assert [run.schedule_step(step, 2) for step in (5, 6, 7, 55)] == [5, 5.5, 6, 30]
    back = gone_on(run, 15, 2)  # on its ranks again, it is not where it would have been
    assert back.schedule_step(15, 4) == 10 and back.schedule_step(16, 4) == 11


@given(COUNT, COUNT, COUNT)
def test_as_many_ranks_as_before_keep_the_plan(steps_per_epoch, ranks, step):
    run = gone_on(begun(steps_per_epoch, ranks), step, ranks)
    assert run.schedule_step(step + 1, ranks) == step + 1
    assert run.total_steps(9.5, ranks) == max(step, run.schedule_steps(9.5))


@given(COUNT, COUNT, st.lists(st.tuples(COUNT, COUNT), max_size=6))
def test_a_schedule_never_jumps_and_ends_with_the_run(steps_per_epoch, planned, changes):
    run, ranks = begun(steps_per_epoch, planned), planned
    for steps, new_ranks in changes:
        last = run.step + steps
        after = gone_on(run, last, ranks)
        assert after.schedule_step(last, new_ranks) == run.schedule_step(last, ranks)
        run, ranks = after, new_ranks
    end = run.total_steps(2, ranks)
    excess = run.schedule_step(end, ranks) - run.schedule_steps(2)
    assert end == run.step or 0 <= excess < ranks / planned
