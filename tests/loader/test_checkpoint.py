import io

import pytest
import torch

from odb_nodes import DistributedState, StateError, load_rank_state, save_rank_state


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


def test_another_number_of_ranks_is_refused(tmp_path, as_rank):
    save_all(tmp_path, 3, as_rank)
    as_rank(0, 2)
    with pytest.raises(StateError, match="was saved by 3 ranks, but this job has 2"):
        load_rank_state(tmp_path)


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
