import io

import pytest
import torch
from elastic import job, states_at

from odb_nodes import DistributedState, StateError, load_rank_state, reshard, save_rank_state

pytestmark = pytest.mark.filterwarnings("ignore:.*exceed", "ignore:.*skipped")


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
        (lambda folder, save_all: None, "hold none of a loader"),
        (damage_by_another, "saved by 2 and 3 ranks: it is two checkpoints"),
        (
            lambda folder, _: (folder / "odb_nodes-rank00001-of-00003.pt").unlink(),
            r"lacks the states of ranks \[1\]",
        ),
    ],
)
def test_what_cannot_be_resharded_is_refused(damage, message, tmp_path, as_rank, save_all):
    save_all(tmp_path, 3)
    damage(tmp_path, save_all)
    as_rank(0, 2)
    with pytest.raises(StateError, match=message):
        load_rank_state(tmp_path)


class Counter:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_another_number_of_ranks_is_resharded(tmp_path, as_rank, caplog):
    states, saved = states_at(job(3, steps=2), 2), {}
    for rank, state in enumerate(states):
        as_rank(rank, 3)
        save_rank_state({"loader": state, "step": 2}, tmp_path)
        saved |= DistributedState(Counter(state)).state_dict()
    for rank, expected in enumerate(reshard(states, 2)):
        as_rank(rank, 2)
        with caplog.at_level("INFO", "odb_nodes"):
            assert load_rank_state(tmp_path) == {"loader": expected, "step": 2}
        assert "3 ranks have saved it, 2 load it" in caplog.text
        fresh = Counter({})
        asked = DistributedState(fresh, saved_by=3)
        assert asked.state_dict().keys() == saved.keys()
        asked.load_state_dict(saved)
        assert fresh.state == expected
        (own,) = asked.state_dict().values()  # what is saved next is this rank's state
        assert own.getvalue()


def test_a_distributed_state_is_one_leaf_of_bytes(as_rank):
    as_rank(1, 2)
    saved = DistributedState(Counter({"count": 5})).state_dict()
    assert [type(leaf) for leaf in saved.values()] == [io.BytesIO]
    fresh = Counter({})
    DistributedState(fresh).load_state_dict(saved)
    assert fresh.state == {"count": 5}
    as_rank(1, 3)
    with pytest.raises(StateError, match="saved by another number of ranks"):
        DistributedState(fresh).load_state_dict(saved)
    with pytest.raises(StateError, match="has no `odb_nodes-rank00000-of-00002.pt`"):
        DistributedState(fresh, saved_by=2).load_state_dict(saved)
