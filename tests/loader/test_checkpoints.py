"""Checkpoints are found if they are complete, and only then."""

import random
import shutil

import numpy as np
import pytest
import torch
from elastic import EXCLUDED, SAMPLES, sample, states_at
from elastic import job as job_of
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import (
    Checkpoints,
    ODBDataLoader,
    PeerError,
    StateError,
    TokenBudget,
    load_state,
    reshard,
    save_state,
)
from odb_nodes.loader.checkpoint_folders import Contents, choose

DATASET = [{"input_ids": [1] * (n % 60 + 2)} for n in range(300)]


class Job:
    """What a process of a training job has."""

    def __init__(self, folder, loader=None, **options):
        self.model = torch.nn.Linear(3, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.loader = loader or ODBDataLoader(DATASET, token_budget=512, window=64)
        self.done = {"epoch": 0}
        self.parts = {
            "model": self.model,
            "optimizer": self.optimizer,
            "loader": self.loader,
            "done": self.done,
        }
        self.checkpoints = Checkpoints(folder, self.parts, **options)

    def save(self, *steps):
        return [self.checkpoints.save(step) for step in steps]


def kept_steps(folder):
    return [int(path.name.split("-")[2]) for path in Job(folder).checkpoints.folders()]


def copied_as(folder, name):
    """A copy of a checkpoint under another name, with its file."""
    copy = shutil.copytree(folder, folder.parent / name)
    return copy / "rank00000-of-00001.pt"


def test_a_job_goes_on_where_it_was_saved(tmp_path):
    job = Job(tmp_path / "new" / "folder")
    assert job.checkpoints.load() == 0
    batches = iter(job.loader)
    for _ in range(3):
        next(batches)
    job.model(torch.ones(3)).sum().backward()
    job.optimizer.step()
    job.done["epoch"] = 7
    job.save(3)
    drawn = torch.rand(2), np.random.rand(), random.random()
    left = [batch["input_ids"].shape for batch in batches]

    resumed = Job(tmp_path / "new" / "folder")
    assert resumed.checkpoints.load() == 3
    assert resumed.done == {"epoch": 7}
    assert torch.equal(resumed.model.weight, job.model.weight)
    assert torch.equal(torch.rand(2), drawn[0])
    assert (np.random.rand(), random.random()) == drawn[1:]
    assert [batch["input_ids"].shape for batch in resumed.loader] == left
    assert resumed.optimizer.state_dict()["state"].keys() == {0, 1}


def test_a_file_is_plain_data(tmp_path):
    (folder,) = Job(tmp_path).save(1)
    state = load_state(folder / "rank00000-of-00001.pt")
    assert state["checkpoint"] == {"version": 2, "step": 1, "rank": 0, "world_size": 1}
    assert state["parts"].keys() == {"model", "optimizer", "loader", "done"}


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(keep, tmp_path):
    job = Job(tmp_path, keep=keep)
    for step in range(6):
        job.save(step)
        assert kept_steps(tmp_path) == [*range(max(0, step - keep + 1), step + 1)]
    (tmp_path / "notes.txt").write_text("of somebody else")
    job.save(6)
    assert len([*tmp_path.iterdir()]) == keep + 1


def test_what_was_saved_last_counts_not_the_highest_step(tmp_path):
    Job(tmp_path).save(10, 20)
    Job(tmp_path).save(5)  # a run from the beginning, which did not load
    job = Job(tmp_path)
    assert job.checkpoints.load() == 5
    job.done["epoch"] = 1
    job.save(5)  # after the loop, say
    assert Job(tmp_path).checkpoints.load() == 5
    assert kept_steps(tmp_path) == [5, 5]


def test_what_a_killed_job_left_is_not_loaded_not_filled_up_and_removed(tmp_path):
    _, second = Job(tmp_path).save(1, 2)
    # Rank 0 of two has saved step 3; a part of a file, and of a removal, are there as well.
    killed = tmp_path / "000003-step-3-00000000"
    copied_as(second, killed.name).rename(killed / "rank00000-of-00002.pt")
    (tmp_path / "000004-step-4-00000000").mkdir()
    (tmp_path / "000004-step-4-00000000" / ".rank00000-of-00001.pt.x").touch()
    copied_as(second, ".removed-000000-step-0-00000000")
    job = Job(tmp_path)
    assert job.checkpoints.load() == 2
    (saved,) = job.save(3)
    assert saved.name.startswith("000005-step-3-")
    assert {*tmp_path.iterdir()} == {second, saved}


@pytest.fixture
def saved_by_two(tmp_path):
    """Makes a checkpoint of two ranks, whose weights are equal or not."""

    def save(*, equal):
        states = states_at(job_of(2, steps=3), -1)
        (folder,) = Job(tmp_path, loader=ElasticLoader()).save(3)
        file = folder / "rank00000-of-00001.pt"
        for rank, loader in enumerate(states):
            state = load_state(file)
            state["checkpoint"] |= {"rank": rank, "world_size": 2}
            state["parts"]["loader"] = loader
            state["parts"]["model"]["weight"] += rank * (not equal)
            save_state(state, folder / f"rank0000{rank}-of-00002.pt")
        file.unlink()
        return states

    return save


class ElasticLoader(ODBDataLoader):
    """The loader of the states, on one rank."""

    def __init__(self):
        given = {"token_budget": TokenBudget(80, oversize="drop"), "window": 16, "round_size": 8}
        super().__init__(
            range(SAMPLES), process_fn=sample, seed=3, exclude=EXCLUDED, timeout_s=20, **given
        )


def test_that_of_another_number_of_ranks_is_resharded(tmp_path, saved_by_two):
    (expected,) = reshard(saved_by_two(equal=True), 1)
    job = Job(tmp_path, loader=ElasticLoader())
    assert job.checkpoints.load() == 3
    assert job.loader.state_dict() == expected


def test_parts_that_differ_are_not_those_of_another_number_of_ranks(tmp_path, saved_by_two):
    saved_by_two(equal=False)
    job = Job(tmp_path, loader=ElasticLoader())
    before = job.loader.state_dict()
    with pytest.raises(StateError, match=r"`parts\['model'\]\['weight'\]` must be equal on all"):
        job.checkpoints.load()
    assert job.loader.state_dict() == before


def test_other_parts_are_refused(tmp_path):
    job = Job(tmp_path)
    job.save(1)
    weight = job.model.weight.detach().clone()
    other = Checkpoints(tmp_path, {"model": job.model, "schedule": {}})
    with pytest.raises(StateError, match=r"has the parts \['done', .*but this job has \['model', "):
        other.load()
    assert torch.equal(job.model.weight, weight)


def test_a_damaged_checkpoint_is_refused_with_a_remedy(tmp_path):
    first, second = Job(tmp_path).save(1, 2)
    file = second / "rank00000-of-00001.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(StateError, match=f"truncated.* Remove `{second}` to go on from the one"):
        Job(tmp_path).checkpoints.load()
    shutil.copy(first / file.name, file)
    with pytest.raises(
        StateError, match="must be the file of .*'step': 2.* is that of .*'step': 1"
    ):
        Job(tmp_path).checkpoints.load()
    shutil.rmtree(second)
    assert Job(tmp_path).checkpoints.load() == 1


def test_a_state_that_cannot_be_loaded_is_not_saved(tmp_path):
    job = Job(tmp_path)
    job.save(1)
    job.done["function"] = test_a_file_is_plain_data
    with pytest.raises(StateError, match="Save plain Python data"):
        job.save(2)
    assert Job(tmp_path).checkpoints.load() == 1


@pytest.mark.parametrize("value", [lambda: 0, random.Random(), open, b"", np.int64(3)])
def test_what_cannot_be_saved_is_named_by_part_and_key(value, tmp_path):
    job = Job(tmp_path)
    (folder,) = job.save(1)
    job.done["hooks"] = [1, {"end": value}]
    with pytest.raises(
        StateError, match=r"step 2 cannot be saved: `parts\['done'\]\['hooks'\]\[1\]"
    ):
        job.save(2)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [*folder.iterdir()]
    del job.done["hooks"]
    job.save(3)
    assert kept_steps(tmp_path) == [1, 3] and len([*tmp_path.iterdir()]) == 2


def test_another_run_in_the_same_folder_is_an_error(tmp_path):
    before, now = Job(tmp_path), Job(tmp_path)
    before.save(1)
    now.save(2)
    with pytest.raises(PeerError, match="another run saves into .*`000002-step-2-"):
        before.save(3)
    assert now.save(4)
    assert Job(tmp_path).checkpoints.load() == 4


def test_a_key_within_a_dict_that_is_newer_is_not_lost(tmp_path):
    job = Job(tmp_path)
    job.done.update(sums={"loss": 1})
    job.save(1)
    job = Job(tmp_path)
    job.done.update(sums={"loss": 0, "accuracy": 0})
    with pytest.raises(StateError, match=r"`parts\['done'\]\['sums'\]` has the keys \['accuracy"):
        job.checkpoints.load()
    assert [*job.done["sums"]] == ["loss", "accuracy"]


def test_a_key_that_cannot_be_saved_is_named(tmp_path):
    job = Job(tmp_path)
    job.done["hooks"] = {"a": 1, np.int64(3): 2}
    with pytest.raises(StateError, match=r"`parts\['done'\]\['hooks'\]` has a key .*numpy.int64`"):
        job.save(1)


class Refuses:
    """A part that was changed since: it refuses the state that it saved."""

    def state_dict(self):
        return {"size": 3}

    def load_state_dict(self, state_dict):
        raise KeyError("depth")


def test_where_a_part_refuses_its_state_those_that_have_changed_are_named(tmp_path):
    done, last = {"epoch": 1}, {"loss": 2.0}
    Checkpoints(tmp_path, {"done": done, "model": Refuses(), "last": last}).save(5)
    done["epoch"], last["loss"] = 2, 1.0
    with pytest.raises(
        StateError, match=r"`parts\['model'\]` refuses .*KeyError: 'depth'.*already: \['done'\]"
    ):
        Checkpoints(tmp_path, {"done": done, "model": Refuses(), "last": last}).load()
    assert (done, last) == ({"epoch": 1}, {"loss": 1.0})


def test_a_dict_becomes_equal_to_what_was_saved_and_loses_nothing(tmp_path):
    Checkpoints(tmp_path, {"model": {"w": 1}, "done": {"epoch": 1, "best": 0.5}}).save(1)
    model, done = {"w": 9}, {"epoch": 7}
    parts = {"model": model, "done": done}
    done["samples"] = 0
    with pytest.raises(
        StateError, match=r"`parts\['done'\]` has the keys \['samples'\], but .*Add"
    ):
        Checkpoints(tmp_path, parts).load()
    assert (model, done) == ({"w": 9}, {"epoch": 7, "samples": 0})
    del done["samples"]
    assert Checkpoints(tmp_path, parts).load() == 1
    assert (model, done) == ({"w": 1}, {"epoch": 1, "best": 0.5})


def test_a_dict_that_was_an_object_when_it_was_saved_is_refused(tmp_path):
    class Position:
        def state_dict(self):
            return [1, 2]

        def load_state_dict(self, state_dict):
            pass

    Checkpoints(tmp_path, {"done": Position()}).save(1)
    with pytest.raises(StateError, match=r"`parts\['done'\]` is a dict, but .* it is \[1, 2\]"):
        Checkpoints(tmp_path, {"done": {1: 1}}).load()


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ((3, {}), "`folder` must be a `str` or "),
        (("folder", [1]), "`parts` must be a `Mapping`, .* Name them"),
        (("folder", {"step": 3}), r"`parts\['step'\]` must be a dict, or have .* is 3 instead"),
        (("folder", {1: {}}), "a name in `parts`"),
        (("folder", {"model": torch.nn.Linear}), "is the class `Linear` instead. Give an object"),
    ],
)
def test_arguments(arguments, rule):
    with pytest.raises(TypeError, match=rule):
        Checkpoints(*arguments)


def test_options(tmp_path):
    for options, rule in [
        ({"keep": 0}, "`keep` must be in 1.."),
        ({"timeout_s": 0}, "`timeout_s` must be"),
        ({"replicated": "model"}, "`replicated` must be names of `parts`"),
        ({"replicated": ["weights"]}, r"of \['done', .*but is \['weights'\] instead"),
        ({"replicated": [["model"]]}, r"but is \[\['model'\]\] instead"),
        ({"replicated": ["model", "loader"]}, "`replicated` must not have 'loader': each rank's"),
    ]:
        with pytest.raises(ValueError, match=rule):
            Job(tmp_path, **options)
    with pytest.raises(TypeError, match="`replicated` must be a `Collection`, but is None"):
        Job(tmp_path, replicated=None)
    with pytest.raises(ValueError, match="`parts` must have what is to be saved, but is empty"):
        Checkpoints(tmp_path, {})
    with pytest.raises(ValueError, match="`step` must be in 0.."):
        Job(tmp_path).save(-1)


# --- which checkpoint all ranks load --------------------------------------------------------------

NAMES = [f"{number:06d}-step-{10 * number}-0000000a" for number in range(1, 4)]
ALL, ONE_LACKS = Contents(2, ()), Contents(2, (1,))


def test_all_ranks_load_the_newest_that_each_of_them_sees():
    ahead = {NAMES[0]: ALL, NAMES[1]: ALL}
    behind = {NAMES[0]: ALL, NAMES[1]: ONE_LACKS}
    assert choose([ahead, ahead]) == (NAMES[1], NAMES[1])
    assert choose([ahead, behind]) == (NAMES[0], NAMES[1])
    assert choose([behind, behind]) == (NAMES[0], NAMES[0])
    assert choose([{}, {}]) == (None, None)
    assert choose([{NAMES[0]: ONE_LACKS}] * 2) == (None, None)


def test_disks_that_are_not_shared_are_noticed():
    views = [{NAMES[0]: Contents(2, (1,))}, {NAMES[0]: Contents(2, (0,))}]
    assert choose(views) == (None, NAMES[0])


CONTENTS = st.sets(st.integers(0, 2)).map(lambda missing: Contents(3, tuple(sorted(missing))))


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), CONTENTS), min_size=1, max_size=3))
def test_a_choice_is_complete_for_every_rank(views):
    name, newest = choose(views)
    assert name is None or all(view[name].missing == () for view in views)
    assert name is None or (newest is not None and newest >= name)
    assert choose(views[::-1]) == (name, newest)
