"""States of runs under trainers: what is damaged is refused when it is loaded, before any step."""

import random
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")
sys.path.insert(0, str(Path(__file__).parent))

import lightning_runs as r
import torch
import trainer_jobs as t
from damaged_states import MISSING, damaged, mutations, replaced, resealed

from odb_nodes import ODBDataLoader, StateError, save_rank_state
from odb_nodes.integrations.huggingface import run_start as huggingface
from odb_nodes.integrations.lightning import ODBCallback
from odb_nodes.integrations.lightning import run as lightning

SAMPLED = 40
FIELDS = [
    (kind, field.name)
    for kind, declared in (("huggingface", huggingface.RunState), ("lightning", lightning.RunState))
    for field in fields(declared)
]
OPTIONAL = {"steps_per_epoch", "cpu_rng", "gpu_rng", "monitor"}
HOLDERS = {"huggingface": "ODBTrainer", "lightning": "ODBCallback"}
KINDS = sorted(HOLDERS)


class HuggingFace:
    """Saves and loads as `ODBTrainer.train` does, but takes no optimizer step."""

    def __init__(self, folder):
        self.folder = folder
        self.trainer = t.make_trainer(folder)

    def states(self):
        run = huggingface.make_run(self.trainer, None)
        it, found = iter(run.batches), []
        for _ in range(2):
            self.trainer.state.global_step += 1
            next(it)
            found.append(run.state_dict())
        run.batches.loader.close()
        return found

    def load(self, state):
        save_rank_state(state, self.folder / "checkpoint")
        huggingface.make_run(self.trainer, str(self.folder / "checkpoint"))


class Lightning:
    """Saves in a run of two steps, and loads as `Trainer.fit` does."""

    def __init__(self, folder):
        self.folder = folder
        self.trainer = r.trainer_of()
        self.trainer.state.fn = "fit"

    def states(self):
        save = r.SaveEverywhere(self.folder)
        r.fit(save, max_steps=2)
        saved = [torch.load(path, weights_only=True)["odb_nodes"] for path in save.paths]
        by_step = {states[0]["steps"]: states[0] for states in saved}
        return [by_step[1], by_step[2]]

    def load(self, state):
        self.load_all([state])

    def load_all(self, states):
        callback = ODBCallback()
        callback.on_load_checkpoint(self.trainer, r.Module(), {"odb_nodes": states})
        callback.batches(ODBDataLoader(r.g.samples_of(0, r.SIZE), token_budget=60, window=8))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function: kind -> its saver and loader, and its states after two steps."""

    @cache
    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        saver = HuggingFace(folder) if kind == "huggingface" else Lightning(folder)
        return saver, *saver.states()

    return make


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_a_damaged_field_is_refused(made, kind, field):
    saver, _, state = made(kind)
    for name, value in mutations(state[field]):
        if type(value) is not type(state[field]) or value != state[field]:
            with pytest.raises(StateError, match=f"the state of {HOLDERS[kind]} "):
                saver.load(replaced(state, [field], value))
                pytest.fail(name)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_of_any_part_is_refused(made, kind, exhaustive):
    saver, _, state = made(kind)
    saver.load(state)  # Not all is refused.
    broken = list(damaged(state))
    for what, one in broken if exhaustive else random.Random(0).sample(broken, SAMPLED):
        with pytest.raises(StateError):
            saver.load(one)
            pytest.fail(what)


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_the_error_names_holder_and_field(made, kind, field):
    """Also where the digest fits: as of a state that a faulty version has saved."""
    saver, _, state = made(kind)
    for value in (-1, "x", True, 1.5, [], *[None] * (field not in OPTIONAL | {"loader"})):
        with pytest.raises(StateError, match=f"{HOLDERS[kind]} is damaged: `{field}` must"):
            saver.load(resealed(replaced(state, [field], value)))
    with pytest.raises(StateError, match=f"the state of {HOLDERS[kind]} lacks `{field}`"):
        saver.load(resealed(replaced(state, [field], MISSING)))


@pytest.mark.parametrize(("kind", "field"), FIELDS)
def test_parts_of_two_states_do_not_mix(made, kind, field):
    saver, early, late = made(kind)
    if early[field] == late[field]:
        pytest.skip("the same in both states")
    with pytest.raises(StateError, match="its digest is not that of what was saved"):
        saver.load({**late, field: early[field]})


@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_checks_its_own_part(made, kind):
    saver, early, late = made(kind)
    mixed = {**late["loader"], "root": early["loader"]["root"]}
    with pytest.raises(StateError, match="the state of Loader is damaged"):
        saver.load(resealed({**late, "loader": mixed}))


@pytest.mark.parametrize(("kind", "other"), [KINDS, KINDS[::-1]])
def test_the_state_of_another_trainer_is_refused(made, kind, other):
    saver, _, state = made(kind)
    with pytest.raises(StateError, match=f"saved by `{HOLDERS[other]}`, but is loaded into"):
        saver.load(made(other)[1])
    with pytest.raises(StateError, match="saved by `Loader`, but is loaded into"):
        saver.load(state["loader"])


def test_what_is_no_state_of_torch_s_generator_is_refused_before_the_run(made):
    saver, _, state = made("lightning")
    for rng in (state["cpu_rng"][:-1], b"\x00" * len(state["cpu_rng"])):
        with pytest.raises(StateError, match="`cpu_rng` is no state of a generator of torch"):
            saver.load(resealed({**state, "cpu_rng": rng}))


@pytest.mark.parametrize("states", [5, "x", {}, {"0": {}}, [], [None], [5], [[]], [{}]], ids=repr)
def test_what_holds_no_states_of_ranks_is_refused(made, states):
    with pytest.raises(StateError):
        made("lightning")[0].load_all(states)
