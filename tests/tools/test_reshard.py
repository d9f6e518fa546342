"""Files of a checkpoint, made into those of another number of ranks."""

import pytest
import torch
from elastic import job, states_at

from odb_nodes import (
    Checkpoints,
    ODBDataLoader,
    StateError,
    load_state,
    pop_step_info,
    reshard,
    save_state,
)
from odb_nodes.cli import main
from odb_nodes.contract.state import ENVELOPE, add_digest
from odb_nodes.monitor import Monitor
from odb_nodes.tools.reshard import reshard_folder

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def states():
    return states_at(job(3, steps=2), 2)


def save(folder, states, prefix="odb_nodes-"):
    folder.mkdir(parents=True)
    for rank, state in enumerate(states):
        save_state(state, folder / f"{prefix}rank{rank:05d}-of-{len(states):05d}.pt")
    return folder


def test_files_of_ranks_are_those_of_other_ranks(tmp_path, states):
    folder = save(tmp_path / "saved", states)
    files = reshard_folder(folder, 2, tmp_path / "new" / "folder")
    assert [file.name for file in files] == [
        f"odb_nodes-rank0000{rank}-of-00002.pt" for rank in range(2)
    ]
    assert [load_state(file) for file in files] == reshard(states, 2)


class Part:
    """What a job has saved, which loads anything."""

    def __init__(self):
        self.state = None

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_those_of_checkpoints_can_be_loaded_under_the_same_name(tmp_path, states, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "before", {"loader": Part(), "done": {"epoch": 1}})
    folder = checkpoints.save(6)
    (file,) = folder.iterdir()
    saved = load_state(file)
    file.unlink()
    for rank, state in enumerate(states):
        own = saved | {"checkpoint": saved["checkpoint"] | {"rank": rank, "world_size": 3}}
        own |= {"parts": {"loader": state, "done": {"epoch": 1}}, "replicated": ["model"]}
        if rank == 0:
            own["parts"]["model"] = {"weight": torch.ones(3)}
        save_state(own, folder / f"rank{rank:05d}-of-00003.pt")
    with pytest.raises(
        ValueError, match=f"`out` must have the name .* Give `.*/after/{folder.name}`"
    ):
        reshard_folder(folder, 1, tmp_path / "after")
    reshard_folder(folder, 1, tmp_path / "after" / folder.name)
    parts = {"loader": Part(), "done": {}, "model": Part()}
    assert Checkpoints(tmp_path / "after", parts).load() == 6
    assert [parts["loader"].state] == reshard(states, 1)
    assert parts["done"] == {"epoch": 1}
    assert parts["model"].state["weight"].equal(torch.ones(3))


def save_parts(folder, states):
    """Save what `Checkpoints` does of each rank."""
    folder.mkdir(parents=True)
    for rank, state in enumerate(states):
        about = {"version": 2, "step": 2, "rank": rank, "world_size": len(states)}
        saved = {"checkpoint": about, "parts": {"loader": state}}
        saved |= {"replicated": [], "generators": {}}
        save_state(saved, folder / f"rank{rank:05d}-of-{len(states):05d}.pt")
    return folder


def test_as_many_ranks_as_before_get_their_states_as_they_are(tmp_path, states):
    for folder in (
        save(tmp_path / "states", states),
        save_parts(tmp_path / "parts", states),
    ):
        files = reshard_folder(folder, 3, tmp_path / "new" / folder.name)
        assert [load_state(file) for file in files] == [
            load_state(folder / file.name) for file in files
        ]


def test_files_that_were_mixed_up_are_refused(tmp_path, states):
    folder = save_parts(tmp_path / "saved", [states[1], states[0], states[2]])
    with pytest.raises(StateError, match="mixed up"):
        reshard_folder(folder, 2, tmp_path / "new" / "saved")
    both = save(tmp_path / "both", states)
    save_state({"other": 1}, both / "other-rank00000-of-00003.pt")
    with pytest.raises(StateError, match="of several kinds"):
        reshard_folder(both, 2, tmp_path / "new")


@pytest.mark.parametrize("name", ["checkpoint", "parts", "replicated", "generators"])
def test_a_file_without_its_parts_is_damaged(tmp_path, states, name):
    folder = save_parts(tmp_path / "saved", states)
    file = folder / "rank00001-of-00003.pt"
    save_state(load_state(file) | {name: None}, file)
    with pytest.raises(StateError, match="file of rank 1 is damaged"):
        reshard_folder(folder, 2, tmp_path / "new" / "saved")


def test_a_folder_that_has_states_is_left_alone(tmp_path, states):
    folder = save(tmp_path / "saved", states)
    with pytest.raises(StateError, match="has states already"):
        reshard_folder(folder, 2, folder)
    with pytest.raises(FileNotFoundError, match="no folder"):
        reshard_folder(tmp_path / "none", 2, tmp_path / "new")
    with pytest.raises(ValueError, match="world_size"):
        reshard_folder(folder, 0, tmp_path / "new")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        StateError, match="`.*empty` has no states: pass the folder of a checkpoint"
    ):
        reshard_folder(tmp_path / "empty", 2, tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.fixture
def monitored(tmp_path):
    """The states of a monitor on two ranks, which were told of other losses."""
    loader = ODBDataLoader([{"input_ids": [1] * (n + 1)} for n in range(40)], token_budget=90)
    monitors = [Monitor(tmp_path / f"monitor-{rank}", every=9) for rank in range(2)]
    for _, batch in zip(range(3), loader, strict=False):
        info = pop_step_info(batch)
        for rank, monitor in enumerate(monitors):
            monitor.step(batch, info, loss=float(rank))
    return [monitor.state_dict() for monitor in monitors]


def test_a_monitor_goes_on_after_the_steps_of_the_ranks_there_were(tmp_path, monitored):
    states = states_at(job(2, steps=3), 3)
    run = [
        add_digest({**dict.fromkeys(ENVELOPE), "node": "Run", "loader": loader, "monitor": monitor})
        for loader, monitor in zip(states, monitored, strict=True)
    ]
    of_checkpoints = [
        {
            "checkpoint": {"version": 2, "step": 3, "rank": rank, "world_size": 2},
            "parts": {"loader": states[rank], "monitor": monitored[rank]},
            "replicated": [],
            "generators": {},
        }
        for rank in range(2)
    ]
    expected = Monitor.reshard_states(monitored, 3)
    assert len(expected) == 3 and expected[0]["written"] == expected[0]["step"] == 3
    for name, saved in (("trainer", run), ("checkpoints", of_checkpoints)):
        files = reshard_folder(save(tmp_path / name, saved), 3, tmp_path / "new" / name)
        found = [load_state(file) for file in files]
        parts = [one.get("parts", one) for one in found]
        assert [one["monitor"] for one in parts] == expected
        assert [one["loader"] for one in parts] == reshard(states, 3)
        for one in found:
            sealed = {key: value for key, value in one.items() if key != "digest"}
            assert one == (add_digest(sealed) if name == "trainer" else sealed)


def test_monitors_at_different_steps_are_refused(tmp_path, monitored):
    with pytest.raises(StateError, match="`step` is 3 on rank 0, but 0 on rank 1"):
        Monitor.reshard_states([monitored[0], Monitor(tmp_path / "new").state_dict()], 3)


def run(*arguments):
    with pytest.raises(SystemExit) as exit:
        main([str(one) for one in arguments])
    return exit.value.code or 0


def test_the_command(tmp_path, states, capsys):
    folder = save(tmp_path / "saved", states)
    assert run("reshard", folder, "--ranks", 4, "--out", tmp_path / "new") == 0
    assert "4 states are in" in capsys.readouterr().out
    assert len([*(tmp_path / "new").iterdir()]) == 4
    assert run("reshard", folder, "--ranks", 2, "--out", tmp_path / "new") == 2
    assert "has states already" in capsys.readouterr().err
