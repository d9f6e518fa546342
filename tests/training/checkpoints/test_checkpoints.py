"""Checkpoints are found if they are complete, and only then."""

import io
import random
import shutil
from contextlib import nullcontext
from itertools import islice

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from elastic import job as job_of
from elastic import make, states_at
from refusals import refuses
from torch.distributed.checkpoint.stateful import Stateful
from toys import Holder

from odb_nodes import (
    Checkpoints,
    DistributedState,
    ODBDataLoader,
    PeerError,
    StateError,
    load_rank_state,
    load_state,
    pop_step_info,
    reshard,
    save_rank_state,
    save_state,
)
from odb_nodes.training.checkpoints import checkpoints
from odb_nodes.training.checkpoints.checkpoint_folders import Contents, choose

pytestmark = pytest.mark.filterwarnings("ignore:.*exceed", "ignore:.*skipped")

DATASET = [{"input_ids": [1] * (n % 60 + 2)} for n in range(300)]


class Job:
    """The objects of a process of a training job."""

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


def test_a_job_goes_on_where_it_was_saved(tmp_path):
    job = Job(tmp_path / "new" / "folder")
    assert job.checkpoints.load() == 0
    batches = iter(job.loader)
    for _ in range(3):
        next(batches)
    job.model(torch.ones(3)).sum().backward()
    job.optimizer.step()
    job.done["epoch"] = 7
    (folder,) = job.save(3)
    drawn = torch.rand(2), np.random.rand(), random.random()
    remaining_shapes = [batch["input_ids"].shape for batch in batches]

    resumed = Job(tmp_path / "new" / "folder")
    assert resumed.checkpoints.load() == 3
    assert resumed.done == {"epoch": 7}
    assert torch.equal(resumed.model.weight, job.model.weight)
    assert torch.equal(torch.rand(2), drawn[0])
    assert (np.random.rand(), random.random()) == drawn[1:]
    assert [batch["input_ids"].shape for batch in resumed.loader] == remaining_shapes
    assert resumed.optimizer.state_dict()["state"].keys() == {0, 1}
    state = load_state(folder / "rank00000-of-00001.pt")
    assert state["checkpoint"] == {"version": 2, "step": 3, "rank": 0, "world_size": 1}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"prefetch": 0}])
def test_set_epoch_within_an_epoch_loses_nothing_of_it(options, tmp_path):
    """Each step is saved; `set_epoch` is called after the sixth of epoch 0."""

    def taken(folder, stop=None):
        loader = ODBDataLoader(DATASET, token_budget=512, window=64, **options)
        checkpoints, steps = Checkpoints(folder, {"loader": loader}), []
        step = checkpoints.load()
        with loader:
            for _ in range(2):
                for batch in loader:
                    info = pop_step_info(batch)
                    steps.append((info.epoch, info.step, info.keys))
                    if steps[-1][:2] == (0, 5):
                        loader.set_epoch(4)
                    step += 1
                    checkpoints.save(step)
                    if step == stop:
                        return steps
        return steps

    whole = taken(tmp_path / "whole")
    assert {epoch for epoch, *_ in whole} == {0, 4}
    for stop in (5, 6, 7, 11):
        steps = taken(tmp_path / str(stop), stop)
        assert steps + taken(tmp_path / str(stop)) == whole


def test_the_newest_are_kept(tmp_path):
    job = Job(tmp_path, keep=2)
    (tmp_path / "notes.txt").write_text("of somebody else")
    for step in range(4):
        job.save(step)
        assert kept_steps(tmp_path) == [*range(max(0, step - 1), step + 1)]
    assert len([*tmp_path.iterdir()]) == 3


def test_what_was_saved_last_counts_not_the_highest_step(tmp_path):
    Job(tmp_path).save(10, 20)
    job = Job(tmp_path)
    assert job.checkpoints.load() == 20
    job.save(5)
    job = Job(tmp_path)
    assert job.checkpoints.load() == 5
    job.save(5)  # after the loop, say
    assert Job(tmp_path).checkpoints.load() == 5
    assert kept_steps(tmp_path) == [5, 5]


def test_what_a_killed_job_left_is_not_loaded_not_filled_up_and_removed(tmp_path):
    _, second = Job(tmp_path).save(1, 2)
    # Rank 0 of two has saved step 3; a part of a file, and of a removal, are there as well.
    killed = shutil.copytree(second, tmp_path / "000003-step-3-00000000")
    (killed / "rank00000-of-00001.pt").rename(killed / "rank00000-of-00002.pt")
    (killed / "complete").unlink()
    (tmp_path / "000004-step-4-00000000").mkdir()
    (tmp_path / "000004-step-4-00000000" / ".rank00000-of-00001.pt.x").touch()
    shutil.copytree(second, tmp_path / ".removed-000000-step-0-00000000")
    job = Job(tmp_path)
    assert job.checkpoints.load() == 2
    (saved,) = job.save(3)
    assert saved.name.startswith("000005-step-3-")
    assert {*tmp_path.iterdir()} == {second, saved}


def test_a_damaged_checkpoint_is_refused_with_a_remedy(tmp_path):
    first, second = Job(tmp_path).save(1, 2)
    file = second / "rank00000-of-00001.pt"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(StateError, match=f"truncated.* Remove `{second}` to continue"):
        Job(tmp_path).checkpoints.load()
    shutil.copy(first / file.name, file)
    with pytest.raises(StateError, match="'step': 2.*'step': 1"):
        Job(tmp_path).checkpoints.load()
    shutil.rmtree(second)
    assert Job(tmp_path).checkpoints.load() == 1


def test_a_run_that_has_loaded_nothing_saves_into_no_folder_of_another_run(tmp_path):
    Job(tmp_path).save(15, 18)
    forgetful = Job(tmp_path, keep=1)
    rule = r"no checkpoints that were .* has 2, up to `000002-step-18-.* `load\(\)` .* another"
    for _ in range(2):
        with pytest.raises(StateError, match=rule):
            forgetful.save(3)
    assert kept_steps(tmp_path) == [15, 18]
    assert forgetful.checkpoints.load() == 18
    forgetful.save(21)
    assert kept_steps(tmp_path) == [21]


def test_what_could_not_be_loaded_is_not_removed(tmp_path):
    first, second = Job(tmp_path).save(1, 2)
    file = second / "rank00000-of-00001.pt"
    file.write_bytes(file.read_bytes()[:1000])
    job = Job(tmp_path, keep=1)
    with pytest.raises(StateError, match="truncated"):
        job.checkpoints.load()
    with pytest.raises(StateError, match="that were not loaded"):
        job.save(1)
    assert {*tmp_path.iterdir()} == {first, second}


def test_what_a_killed_first_save_left_is_told_of_and_never_removed(tmp_path):
    (source,) = Job(tmp_path / "source").save(1)
    root = tmp_path / "run"
    killed = shutil.copytree(source, root / "000001-step-1-00000000")
    (killed / "rank00000-of-00001.pt").rename(killed / "rank00000-of-00002.pt")
    (killed / "complete").unlink(missing_ok=True)
    job = Job(root, keep=1)
    with pytest.raises(StateError, match="has 1, up to `000001-step-1-"):
        job.save(2)
    with pytest.warns(UserWarning, match="unfinished ones: .'000001-step-1-.* leaves these folder"):
        assert job.checkpoints.load() == 0
    job.save(2, 3)
    job = Job(root, keep=1)
    assert job.checkpoints.load() == 3
    (saved,) = job.save(4)
    assert {*root.iterdir()} == {killed, saved}


@pytest.mark.parametrize(("world_size", "lost"), [(1, (0,)), (2, (1,)), (3, (0, 2))])
@pytest.mark.parametrize("older", [True, False])
def test_a_checkpoint_that_was_complete_and_has_lost_a_file_is_damaged(
    world_size, lost, older, tmp_path, monkeypatch
):
    monkeypatch.setattr(checkpoints, "_PAUSE_S", 0)
    first, second = Job(tmp_path).save(1, 2)
    if not older:
        shutil.rmtree(first)
    file = second / "rank00000-of-00001.pt"
    for rank in {*range(world_size)} - {*lost}:
        shutil.copy(file, second / f"rank{rank:05d}-of-{world_size:05d}.pt")
    file.unlink()
    ranks = " and ".join(map(str, lost))
    job, folders = Job(tmp_path, keep=1), {*tmp_path.iterdir()}
    with pytest.raises(StateError, match=f"`{second}` was complete, but .*s? {ranks} cannot be"):
        job.checkpoints.load()
    with pytest.raises(StateError, match="that were not loaded"):
        job.save(3)
    assert {*tmp_path.iterdir()} == folders
    shutil.rmtree(second)
    assert job.checkpoints.load() == older


def test_a_run_removes_no_checkpoint_that_came_after_it_had_loaded(tmp_path):
    job = Job(tmp_path, keep=1)
    job.save(1, 2)
    (saved,) = job.save(3)
    late = shutil.copytree(saved, tmp_path / "000001-step-9-00000000")
    (saved,) = job.save(4)
    assert {*tmp_path.iterdir()} == {late, saved}


def test_another_run_in_the_same_folder_is_an_error(tmp_path):
    first_run, second_run = Job(tmp_path), Job(tmp_path)
    first_run.save(1)
    second_run.checkpoints.load()
    second_run.save(2)
    for step in (3, 4, 4):  # The other run is still there.
        with pytest.raises(PeerError, match="another run saves into .*`000002-step-2-"):
            first_run.save(step)
    assert second_run.save(4)
    assert Job(tmp_path).checkpoints.load() == 4


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="`folder` must be a folder, but .*file` is a file"):
        Job(tmp_path / "file")


@pytest.mark.parametrize("options", [{"accumulate": 3}, {"virtual_ranks": 2, "accumulate": 2}])
def test_a_checkpoint_is_saved_between_optimizer_steps(options, tmp_path):
    job = Job(tmp_path, ODBDataLoader(DATASET[:80], token_budget=512, window=64, **options))
    for step, batch in enumerate(job.loader):
        info = pop_step_info(batch)
        inside = f"step {info.step + 1} of epoch 0, within an optimizer step of .*gradients"
        if "virtual_ranks" in options:
            inside = "within an optimizer step of 4 batches, of which [123] are done, .*gradients"
        ends = (
            nullcontext() if info.ends_optimizer_step else pytest.raises(StateError, match=inside)
        )
        with ends:
            job.save(step)
        with ends:
            save_rank_state({"step": step, "loader": job.loader.state_dict()}, tmp_path / "rank")
    assert info.ends_optimizer_step
    assert Job(tmp_path, job.loader).checkpoints.load() == step


# Other numbers of ranks.


class Counter:
    """A part of which the sum over ranks is what matters."""

    def __init__(self, count=0):
        self.count, self.ranks = count, None

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class SharedCounter(Counter):
    """One that knows how to share it out."""

    def reshard_states(self, states, world_size):
        total = sum(state["count"] for state in states)
        return [{"count": total if rank == 0 else 0} for rank in range(self.ranks or world_size)]


def save_as_two(checkpoints, parts_of_rank):
    """Save step 3 as two ranks do, each with what `parts_of_rank(rank, parts)` makes of a part."""
    folder = checkpoints.save(3)
    (file,) = folder.glob("rank*")
    for rank in range(2):
        state = load_state(file)
        state["checkpoint"] |= {"rank": rank, "world_size": 2}
        parts_of_rank(rank, state["parts"])
        save_state(state, folder / f"rank{rank:05d}-of-00002.pt")
    file.unlink()


@pytest.mark.parametrize("equal", [True, False])
def test_a_checkpoint_of_another_number_of_ranks_is_resharded_if_all_parts_are(tmp_path, equal):
    states = states_at(job_of(2, steps=3), -1)

    def of_rank(rank, parts):
        parts["loader"] = states[rank]
        parts["model"]["weight"] += rank * (not equal)

    save_as_two(Job(tmp_path, make(None)).checkpoints, of_rank)
    job = Job(tmp_path, make(None))
    before = job.loader.state_dict()
    if equal:
        assert job.checkpoints.load() == 3
        assert [job.loader.state_dict()] == reshard(states, 1)
    else:
        with pytest.raises(StateError, match=r"`parts\['model'\]\['weight'\]` must be equal on"):
            job.checkpoints.load()
        assert job.loader.state_dict() == before


def test_a_part_may_know_what_another_number_of_ranks_goes_on_with(tmp_path):
    def of_rank(rank, parts):
        parts["part"]["count"] += rank

    part = SharedCounter(5)
    save_as_two(Checkpoints(tmp_path, {"part": part}), of_rank)
    assert Checkpoints(tmp_path, {"part": part}).load() == 3
    assert part.count == 11
    part.ranks = 2
    with pytest.raises(ValueError, match=r"`parts\['part'\]` must return .* of the 1 ranks.* 2"):
        Checkpoints(tmp_path, {"part": part}).load()
    part = Counter()
    with pytest.raises(StateError, match=r"`reshard_states`.* `replicated=\['part'\]`"):
        Checkpoints(tmp_path, {"part": part}).load()
    assert Checkpoints(tmp_path, {"part": part}, replicated=["part"]).load() == 3
    assert part.count == 5


def test_a_checkpoint_remembers_what_rank_0_wrote_for_all(tmp_path):
    def of_rank(rank, parts):
        if rank:
            del parts["part"]

    parts = {"part": SharedCounter(5), "done": {}}
    save_as_two(Checkpoints(tmp_path, parts, replicated=["part"]), of_rank)
    parts["part"].count = 0
    assert Checkpoints(tmp_path, parts).load() == 3
    assert parts["part"].count == 5


# What cannot be saved or loaded.


def a_function():
    """Which no state can hold."""


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        *(([1, {"end": value}], r"\[1\]") for value in (a_function, open, b"", np.int64(3))),
        ({"a": 1, np.int64(3): 2}, " has a key .*numpy.int64`"),
    ],
)
def test_what_cannot_be_saved_is_named_by_part_and_key(hooks, message, tmp_path):
    job = Job(tmp_path)
    (folder,) = job.save(1)
    job.done["hooks"] = hooks
    with pytest.raises(StateError, match=rf"step 2 .*`parts\['done'\]\['hooks'\]`?{message}"):
        job.save(2)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [*folder.iterdir()]
    del job.done["hooks"]
    job.save(3)
    assert kept_steps(tmp_path) == [1, 3] and len([*tmp_path.iterdir()]) == 2


class Refuses:
    """A part that was changed since: it refuses the state that it saved."""

    def state_dict(self):
        return [1, 2]

    def load_state_dict(self, state_dict):
        raise KeyError("depth")


SAVED = {"done": {"epoch": 1, "sums": {"loss": 1}}, "model": Refuses()}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"model": Refuses()}, r"has the parts \['done', 'model'\].* has \['model'\]"),
        (
            {"done": {"more": 0}, "model": Refuses()},
            r"`parts\['done'\]` .*\['more'\], but .*Add",
        ),
        (
            {"done": {"sums": {"n": 0}}, "model": Refuses()},
            r"`parts\['done'\]\['sums'\]`.*\['n'\]",
        ),
        ({"done": {}, "model": {1: 1}}, r"`parts\['model'\]` is a dict, but .* it is \[1, 2\]"),
    ],
)
def test_other_parts_are_refused_and_none_is_changed(parts, message, tmp_path):
    Checkpoints(tmp_path, SAVED).save(1)
    before = repr({name: part for name, part in parts.items() if isinstance(part, dict)})
    with pytest.raises(StateError, match=message):
        Checkpoints(tmp_path, parts).load()
    assert repr({name: part for name, part in parts.items() if isinstance(part, dict)}) == before


def test_where_a_part_refuses_its_state_those_that_have_changed_are_named(tmp_path):
    Checkpoints(tmp_path, SAVED).save(5)
    parts = {"done": {"epoch": 2}, "model": Refuses()}
    with pytest.raises(StateError, match=r"`parts\['model'\]` .*'depth'.*already: \['done'\]"):
        Checkpoints(tmp_path, parts).load()
    assert parts["done"] == SAVED["done"]


def made(parts=None, folder="folder", **options):
    return Checkpoints(folder, {"model": {}} if parts is None else parts, **options)


test_arguments = refuses(
    [
        (lambda: made(folder=3), TypeError, "`folder` must be a `str` or "),
        (lambda: made([1]), TypeError, "`parts` must be a `Mapping`"),
        (lambda: made({}), ValueError, "`parts` must .* is empty"),
        (lambda: made({"step": 3}), TypeError, r"`parts\['step'\]` must be a dict"),
        (lambda: made({1: {}}), TypeError, "the name 1 in parts"),
        (lambda: made({"model": torch.nn.Linear}), TypeError, "is the class `Linear`"),
        (lambda: made(keep=0), ValueError, "`keep` must be in 1.."),
        (lambda: made(timeout_s=0), ValueError, "`timeout_s` must be"),
        (lambda: made(replicated="model"), ValueError, "`replicated` must be names of `parts`"),
        (lambda: made(replicated=["weights"]), ValueError, r"but is \['weights'\]"),
        (lambda: made(replicated=[["model"]]), ValueError, r"but is \[\['model'\]\]"),
        (lambda: made(replicated=None), TypeError, "`replicated` .* is None"),
        (
            lambda: made({"loader": ODBDataLoader([1], token_budget=9)}, replicated=["loader"]),
            ValueError,
            "`replicated` must not have 'loader'",
        ),
        (lambda: made().save(-1), ValueError, "`step` must be in 0.."),
    ]
)


# Which checkpoint all ranks load.

NAMES = [f"{number:06d}-step-{10 * number}-0000000a" for number in range(1, 4)]
ALL, ONE_LACKS, OTHER_LACKS = Contents(2, ()), Contents(2, (1,)), Contents(2, (0,))


def test_all_ranks_load_the_newest_that_each_of_them_sees():
    ahead = {NAMES[0]: ALL, NAMES[1]: ALL}
    behind = {NAMES[0]: ALL, NAMES[1]: ONE_LACKS}
    assert choose([ahead, ahead]) == (NAMES[1], NAMES[1])
    assert choose([ahead, behind]) == (NAMES[0], NAMES[1])
    assert choose([behind, behind]) == (NAMES[0], NAMES[0])
    assert choose([ahead, {NAMES[0]: ALL}]) == choose([{NAMES[0]: ALL}, ahead]) == (*NAMES[:2],)
    assert choose([{}, {}]) == choose([{NAMES[0]: ONE_LACKS}] * 2) == (None, None)
    was_complete = {NAMES[1]: ONE_LACKS._replace(was_complete=True)}
    assert choose([{NAMES[0]: ALL, **was_complete}] * 2) == (*NAMES[:2],)
    # Disks that are not shared are noticed.
    assert choose([{NAMES[0]: ONE_LACKS}, {NAMES[0]: OTHER_LACKS}]) == (None, NAMES[0])


# --- checkpoint -----------------------------------------------------------------------------------


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process one rank of a job."""

    def become(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


@pytest.fixture
def save_all(as_rank):
    def save(folder, world_size):
        for rank in range(world_size):
            as_rank(rank, world_size)
            save_rank_state({"rank": rank, "weights": torch.arange(rank)}, folder)

    return save


def test_each_rank_finds_its_own_state_in_a_folder_of_that_number_of_ranks_alone(
    tmp_path, as_rank, save_all
):
    folder = tmp_path / "new" / "folder"
    with pytest.raises(FileNotFoundError, match="folder"):
        load_rank_state(folder)
    folder.mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="folder"):
        load_rank_state(folder)
    save_all(folder, 3)
    (folder / "model.pt").write_text("something else")
    with pytest.raises(StateError, match="holds states of 3 ranks, but this job has 2"):
        save_all(folder, 2)
    for rank in range(3):
        as_rank(rank, 3)
        assert load_rank_state(folder)["rank"] == rank


def damage_by_another(folder, save_all):
    save_all(folder / "two", 2)
    for file in (folder / "two").iterdir():
        file.rename(folder / file.name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder, save_all: None, "must hold the states of loaders"),
        (damage_by_another, "saved by 2 and 3 ranks: it is two checkpoints"),
        (
            lambda folder, _: (folder / "odb_nodes-rank00001-of-00003.pt").unlink(),
            r"lacks .* ranks \[1\]",
        ),
    ],
)
def test_what_cannot_be_resharded_is_refused(damage, message, tmp_path, as_rank, save_all):
    save_all(tmp_path, 3)
    damage(tmp_path, save_all)
    as_rank(0, 2)
    with pytest.raises(StateError, match=message):
        load_rank_state(tmp_path)


def test_another_number_of_ranks_is_resharded(tmp_path, as_rank, caplog):
    states, saved = states_at(job_of(3, steps=2), 2), {}
    for rank, state in enumerate(states):
        as_rank(rank, 3)
        save_rank_state({"loader": state, "step": 2}, tmp_path)
        saved |= DistributedState(Holder(state)).state_dict()
    for rank, expected in enumerate(reshard(states, 2)):
        as_rank(rank, 2)
        with caplog.at_level("INFO", "odb_nodes"):
            assert load_rank_state(tmp_path) == {"loader": expected, "step": 2}
        assert "3 ranks have saved it, 2 load it" in caplog.text
        fresh = Holder({})
        resharding = DistributedState(fresh, saved_by=3)
        assert resharding.state_dict().keys() == saved.keys()
        resharding.load_state_dict(saved)
        assert fresh.state == expected
        (saved_next,) = resharding.state_dict().values()  # what is saved next is this rank's state
        assert saved_next.getvalue()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("steps", [0, 5, None], ids="fresh within ended".split())
def test_a_loader_is_what_torch_calls_stateful(steps, tmp_path):
    """In the calls of `torch.distributed.checkpoint`: `load` takes a state of the fresh loader."""
    loader, resumed = Job(tmp_path).loader, Job(tmp_path).loader
    assert isinstance(loader, Stateful)
    iterator = iter(loader)
    list(islice(iterator, steps))
    dcp.save({"loader": DistributedState(loader)}, checkpoint_id=tmp_path / "checkpoint")
    dcp.load({"loader": DistributedState(resumed)}, checkpoint_id=tmp_path / "checkpoint")
    assert resumed.state_dict() == loader.state_dict()
    expected = [*iterator] or [*loader]
    assert expected
    for batch, expected_batch in zip(resumed, expected, strict=True):
        assert torch.equal(batch["input_ids"], expected_batch["input_ids"])


def test_a_distributed_state_is_one_leaf_of_bytes(as_rank):
    as_rank(1, 2)
    saved = DistributedState(Holder({"count": 5})).state_dict()
    assert [type(leaf) for leaf in saved.values()] == [io.BytesIO]
    fresh = Holder({})
    DistributedState(fresh).load_state_dict(saved)
    assert fresh.state == {"count": 5}
    as_rank(1, 3)
    with pytest.raises(StateError, match="saved by another number of ranks"):
        DistributedState(fresh).load_state_dict(saved)
    with pytest.raises(StateError, match="has no `odb_nodes-rank00000-of-00002.pt`"):
        DistributedState(fresh, saved_by=2).load_state_dict(saved)
