import io

import pytest
import torch
from elastic import job, states_at

from odb_nodes import DistributedState, StateError, load_rank_state, reshard, save_rank_state


@pytest.fixture
def as_rank(monkeypatch):
    """Makes this process one rank of a job."""

    def become(rank, world_size):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world_size))

    return become


def save_all(folder, world_size, as_rank):
    for rank in range(world_size):
        as_rank(rank, world_size)
        save_rank_state({"rank": rank, "weights": torch.arange(rank)}, folder)


def test_each_rank_finds_its_own_state(tmp_path, as_rank):
    save_all(tmp_path / "new" / "folder", 3, as_rank)
    for rank in range(3):
        as_rank(rank, 3)
        assert load_rank_state(tmp_path / "new" / "folder")["rank"] == rank


def test_what_is_no_state_of_a_loader_is_not_resharded(tmp_path, as_rank):
    save_all(tmp_path, 3, as_rank)
    as_rank(0, 2)
    with pytest.raises(StateError, match="hold none of a loader"):
        load_rank_state(tmp_path)


def test_another_number_of_ranks_is_resharded(tmp_path, as_rank, caplog):
    states = states_at(job(3, steps=2), 2)
    for rank, state in enumerate(states):
        as_rank(rank, 3)
        save_rank_state({"loader": state, "step": 2}, tmp_path)
    for rank, expected in enumerate(reshard(states, 2)):
        as_rank(rank, 2)
        with caplog.at_level("INFO", "odb_nodes"):
            assert load_rank_state(tmp_path) == {"loader": expected, "step": 2}
        assert "3 ranks have saved it, 2 load it" in caplog.text


def test_two_checkpoints_in_one_folder_are_refused(tmp_path, as_rank):
    save_all(tmp_path / "three", 3, as_rank)
    save_all(tmp_path / "two", 2, as_rank)
    for file in (tmp_path / "two").iterdir():
        file.rename(tmp_path / "three" / file.name)
    with pytest.raises(StateError, match="saved by 2 and 3 ranks: it is two checkpoints"):
        load_rank_state(tmp_path / "three")


def test_a_rank_that_did_not_save_is_named(tmp_path, as_rank):
    save_all(tmp_path, 3, as_rank)
    (tmp_path / "odb_nodes-rank00001-of-00003.pt").unlink()
    with pytest.raises(StateError, match=r"lacks the states of ranks \[1\]"):
        load_rank_state(tmp_path)


def test_a_checkpoint_of_another_number_of_ranks_is_kept(tmp_path, as_rank):
    save_all(tmp_path, 3, as_rank)
    (tmp_path / "model.pt").write_text("something else")
    with pytest.raises(StateError, match="holds states of 3 ranks, but this job has 2"):
        save_all(tmp_path, 2, as_rank)
    as_rank(2, 3)
    assert load_rank_state(tmp_path)["rank"] == 2


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_a_checkpoint_is_not_found(make, tmp_path):
    folder = tmp_path / "folder"
    if make:
        folder.mkdir()
    with pytest.raises(FileNotFoundError, match="folder"):
        load_rank_state(folder)


class Counter:
    def __init__(self):
        self.state = {"count": 0}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_a_distributed_state_is_one_leaf_of_bytes(as_rank):
    as_rank(1, 2)
    counter = Counter()
    counter.state = {"count": 5}
    saved = DistributedState(counter).state_dict()
    assert [type(leaf) for leaf in saved.values()] == [io.BytesIO]
    fresh = Counter()
    DistributedState(fresh).load_state_dict(saved)
    assert fresh.state == {"count": 5}


def test_a_distributed_state_of_another_number_of_ranks_is_refused(as_rank):
    as_rank(1, 2)
    saved = DistributedState(Counter()).state_dict()
    as_rank(1, 3)
    with pytest.raises(StateError, match="saved by another number of ranks"):
        DistributedState(Counter()).load_state_dict(saved)
    with pytest.raises(StateError, match="has no `odb_nodes-rank00000-of-00002.pt`"):
        DistributedState(Counter(), saved_by=2).load_state_dict(saved)


def test_a_distributed_state_is_resharded_where_it_says_how_many_have_saved(as_rank):
    states = states_at(job(3, steps=2), 2)
    saved = {}
    for rank, state in enumerate(states):
        as_rank(rank, 3)
        counter = Counter()
        counter.state = state
        saved |= DistributedState(counter).state_dict()
    for rank, expected in enumerate(reshard(states, 2)):
        as_rank(rank, 2)
        fresh = Counter()
        asked = DistributedState(fresh, saved_by=3)
        assert asked.state_dict().keys() == saved.keys()
        asked.load_state_dict(saved)
        assert fresh.state == expected
