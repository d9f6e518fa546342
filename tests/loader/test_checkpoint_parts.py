"""Parts that know themselves what another number of ranks goes on with."""

import pytest

from odb_nodes import Checkpoints, StateError, load_state, save_state


class Counter:
    """A part that counts on each rank, and of which the sum over ranks is what matters."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class SharedCounter(Counter):
    ranks = None

    def reshard_states(self, states, world_size):
        total = sum(one["count"] for one in states)
        return [{"count": total if rank == 0 else 0} for rank in range(self.ranks or world_size)]


def save_counts_of_two(folder, part, replicated=()):
    """Save a checkpoint of two ranks, whose parts have counted to 5 and 6."""
    part.count = 5
    saved = Checkpoints(folder, {"part": part, "done": {}}, replicated=replicated).save(3)
    (file,) = saved.iterdir()
    state = load_state(file)
    file.unlink()
    for rank in range(2):
        about = state["checkpoint"] | {"rank": rank, "world_size": 2}
        parts = {"part": {"count": 5 + rank}, "done": {}}
        if rank:
            parts = {name: one for name, one in parts.items() if name not in replicated}
        own = state | {"checkpoint": about, "parts": parts}
        save_state(own, saved / f"rank{rank:05d}-of-00002.pt")


def test_a_part_may_know_what_another_number_of_ranks_goes_on_with(tmp_path):
    save_counts_of_two(tmp_path, SharedCounter())
    part = SharedCounter()
    assert Checkpoints(tmp_path, {"part": part, "done": {}}).load() == 3
    assert part.count == 11
    part.ranks = 2
    with pytest.raises(ValueError, match=r"`parts\['part'\]` must return .* of the 1 ranks.* 2"):
        Checkpoints(tmp_path, {"part": part, "done": {}}).load()
    parts = {"part": Counter(), "done": {}}
    with pytest.raises(
        StateError, match=r"must be equal .* `reshard_states`.* `replicated=\['part'\]`"
    ):
        Checkpoints(tmp_path, parts).load()
    assert Checkpoints(tmp_path, parts, replicated=["part"]).load() == 3
    assert parts["part"].count == 5


def test_a_checkpoint_remembers_what_rank_0_wrote_for_all(tmp_path):
    save_counts_of_two(tmp_path, Counter(), replicated=["part"])
    parts = {"part": Counter(), "done": {}}
    assert Checkpoints(tmp_path, parts).load() == 3
    assert parts["part"].count == 5
