"""Files of a checkpoint, converted to another number of ranks."""

import subprocess
import sys

import pytest
import torch
from elastic import LEFT_OUT, job, states_at
from toys import Holder

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
from odb_nodes.core.contract.state import ENVELOPE, add_digest
from odb_nodes.tools.reshard import reshard_folder
from odb_nodes.training.monitor import Monitor

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT)


@pytest.fixture(scope="module")
def states():
    return states_at(job(3, steps=2), 2)


def save(folder, states, prefix="odb_nodes-"):
    folder.mkdir(parents=True)
    for rank, state in enumerate(states):
        save_state(state, folder / f"{prefix}rank{rank:05d}-of-{len(states):05d}.pt")
    return folder


def test_those_of_checkpoints_can_be_loaded_under_the_same_name(tmp_path, states, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "before", {"loader": Holder(), "done": {"epoch": 1}})
    folder = checkpoints.save(6)
    (file,) = folder.glob("rank*")
    saved = load_state(file)
    file.unlink()
    for rank, state in enumerate(states):
        content = saved | {"checkpoint": saved["checkpoint"] | {"rank": rank, "world_size": 3}}
        content |= {"parts": {"loader": state, "done": {"epoch": 1}}, "replicated": ["model"]}
        if rank == 0:
            content["parts"]["model"] = {"weight": torch.ones(3)}
        save_state(content, folder / f"rank{rank:05d}-of-00003.pt")
    with pytest.raises(
        ValueError, match=f"`out` must have the name .* Give `.*/after/{folder.name}`"
    ):
        reshard_folder(folder, 1, tmp_path / "after")
    reshard_folder(folder, 1, tmp_path / "after" / folder.name)
    parts = {"loader": Holder(), "done": {}, "model": Holder()}
    assert Checkpoints(tmp_path / "after", parts).load() == 6
    assert [parts["loader"].state] == reshard(states, 1)
    assert parts["done"] == {"epoch": 1}
    assert parts["model"].state["weight"].equal(torch.ones(3))


def save_parts(folder, states, *more):
    """Save what `Checkpoints` does of each rank, or something else in parts of these names."""
    ranks = [
        {
            "checkpoint": {"version": 2, "step": 2, "rank": rank, "world_size": len(states)},
            "parts": {"loader": state},
            "replicated": [],
            "generators": {"of": rank},
            **dict.fromkeys(more if rank == 1 else ()),
        }
        for rank, state in enumerate(states)
    ]
    return save(folder, ranks, prefix="")


def test_as_many_ranks_as_before_get_their_states_as_they_are(tmp_path, states):
    for folder in (save(tmp_path / "states", states), save_parts(tmp_path / "parts", states)):
        files = reshard_folder(folder, 3, tmp_path / "new" / folder.name)
        assert [load_state(file) for file in files] == [
            load_state(folder / file.name) for file in files
        ]


def test_what_cannot_be_resharded_is_refused_and_nothing_is_written(tmp_path, states):
    good = save(tmp_path / "saved", states)
    several = save(tmp_path / "both", states)
    save_state({"other": 1}, several / "other-rank00000-of-00003.pt")
    (tmp_path / "empty").mkdir()
    out = tmp_path / "new"
    damaged = [
        (save_parts(tmp_path / name, states, name), 2, out / name, StateError, "rank 1 is damaged")
        for name in ("checkpoint", "parts", "replicated", "generators")
    ]
    mixed = save_parts(tmp_path / "mixed", [states[1], states[0], states[2]])
    for folder, ranks, to, error, match in (
        *damaged,
        (mixed, 2, out / "mixed", StateError, "mixed up"),
        (several, 2, out, StateError, "of several kinds"),
        (good, 2, good, StateError, "has states already"),
        (good, 0, out, ValueError, "world_size"),
        (tmp_path / "none", 2, out, FileNotFoundError, "no folder"),
        (tmp_path / "empty", 2, out, FileNotFoundError, "empty` has no states: pass the folder"),
    ):
        with pytest.raises(error, match=match):
            reshard_folder(folder, ranks, to)
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
    pairs = [*zip(states, monitored, strict=True)]
    run = [
        add_digest({**dict.fromkeys(ENVELOPE), "node": "Run", "loader": loader, "monitor": monitor})
        for loader, monitor in pairs
    ]
    saved = save_parts(tmp_path / "checkpoints", pairs)
    for path, (loader, monitor) in zip(sorted(saved.iterdir()), pairs, strict=True):
        save_state(load_state(path) | {"parts": {"loader": loader, "monitor": monitor}}, path)
    expected = Monitor.reshard_states(monitored, 3)
    assert len(expected) == 3 and expected[0]["written"] == expected[0]["step"] == 3
    for name, folder in (("trainer", save(tmp_path / "trainer", run)), ("checkpoints", saved)):
        files = reshard_folder(folder, 3, tmp_path / "new" / name)
        new_states = [load_state(file) for file in files]
        parts = [new_state.get("parts", new_state) for new_state in new_states]
        assert [new_state["monitor"] for new_state in parts] == expected
        assert [new_state["loader"] for new_state in parts] == reshard(states, 3)
        drawn = [new_state["generators"] for new_state in new_states if name == "checkpoints"]
        assert drawn in ([], [{"of": 0}, {"of": 1}, {"of": 0}])
        for new_state in new_states:
            sealed = {key: value for key, value in new_state.items() if key != "digest"}
            assert new_state == (add_digest(sealed) if name == "trainer" else sealed)


RESHARD = """
import sys
from odb_nodes import load_state, reshard, save_state
save_state({"ranks": reshard(load_state(sys.argv[1])["ranks"], 3)}, sys.argv[2])
"""


def test_a_monitor_beside_a_loader_is_resharded_by_a_program_that_has_none(tmp_path, monitored):
    loaders = states_at(job(2, steps=3), 3)
    ranks = [{"loader": a, "monitor": b} for a, b in zip(loaders, monitored, strict=True)]
    files = [tmp_path / "before.pt", tmp_path / "after.pt"]
    save_state({"ranks": ranks}, files[0])
    subprocess.run([sys.executable, "-c", RESHARD, *files], check=True, timeout=60)
    new_states = load_state(files[1])["ranks"]
    assert [new_state["loader"] for new_state in new_states] == reshard(loaders, 3)
    assert [new_state["monitor"] for new_state in new_states] == Monitor.reshard_states(
        monitored, 3
    )


def test_monitors_at_different_steps_are_refused(tmp_path, monitored):
    with pytest.raises(StateError, match="`step` is 3 on rank 0, but 0 on rank 1"):
        Monitor.reshard_states([monitored[0], Monitor(tmp_path / "new").state_dict()], 3)


def test_the_command(tmp_path, states, capsys):
    folder = save(tmp_path / "saved", states)
    arguments = ["reshard", str(folder), "--ranks", "2", "--out", str(tmp_path / "new/folder")]
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "2 states are in" in capsys.readouterr().out
    files = [tmp_path / f"new/folder/odb_nodes-rank0000{rank}-of-00002.pt" for rank in range(2)]
    assert [load_state(file) for file in files] == reshard(states, 2)
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "has states already" in capsys.readouterr().err
