"""Real ranks resumed: at every step, from files after a kill, from a distributed checkpoint."""

import json
import os
import signal

import pytest
import rank_jobs as r
from elastic import trained_on
from rank_jobs import RankJob, run_ranks


@pytest.mark.parametrize("options", [{}, {"accumulate": 3, "read_ahead": 2}], ids=str)
@pytest.mark.parametrize("sizes", [[45, 46], [20, 70], [40, 0]], ids=str)
def test_every_step(sizes, options, tmp_path, sampled):
    # In rounds, at their edges, in the tail, after the end of the epoch, and in the next one.
    body = """
    size, options = json.loads(sys.argv[1])[rank], json.loads(sys.argv[2])
    def events(loader, count):
        found = []
        while len(found) < count:
            for batch in loader:
                found.append(r.describe(batch))
                yield found[-1]
            found.append("end")
            yield "end"
    loader = r.make_loader(size, **options)
    expected, states = [], [loader.state_dict()]
    for event in events(loader, 2 * len(list(r.make_loader(size, **options))) + 2):
        expected.append(event)
        states.append(loader.state_dict())
    loader.close()
    for start in range(0, len(states), int(sys.argv[3])):
        loader = r.make_loader(size, **options)
        loader.load_state_dict(states[start])
        left = expected[start:]
        got = [event for event, _ in zip(events(loader, len(left)), left)]
        assert got == left, (start, got, left)
        loader.close()
    dist.barrier()  # The store of the job ends with rank 0.
    r.finish(len(states))
    """
    every = sampled(every=5).get("every", 1)
    steps = run_ranks(tmp_path, body, 2, json.dumps(sizes), json.dumps(options), every)
    assert steps[0] == steps[1] > 15


TRAINER = """
    from odb_nodes import Checkpoints
    (data, folder, *kill_after), said = sys.argv[1:], []

    def say(line):
        print(line, flush=True)
        said.append(line)
        if kill_after == [str(len(said))]:
            time.sleep(600)  # to be killed, while the other rank is where it is

    if data == "shards of one dataset":
        loader = r.make_dataloader(400, shuffle=False, process_fn=r.longer_if_even)
    else:
        loader = r.make_loader([150, 110][rank], read_ahead=2)
    done = {"epoch": 0}
    checkpoints = Checkpoints(folder, {"loader": loader, "done": done})
    step = checkpoints.load()
    for done["epoch"] in range(done["epoch"], 2):
        for batch in loader:
            step += 1
            say(json.dumps(r.describe(batch)))
            if step % 4 == 0:
                checkpoints.save(step)
        say("end")
    dist.destroy_process_group()
"""


def killed_and_resumed(tmp_path, data, kill_after):
    """What each rank says up to a kill, and when it is started again: as without a kill."""
    with RankJob(tmp_path, TRAINER, 2, data, tmp_path / "whole") as job:
        expected = [out.splitlines() for out in job.finish()]
    folder = tmp_path / "killed"
    with RankJob(tmp_path, TRAINER, 2, data, folder, kill_after) as job:
        killed = [[program.line() for _ in range(kill_after)] for program in job.ranks]
        for program in job.ranks:
            os.kill(program.process.pid, signal.SIGKILL)
    with RankJob(tmp_path, TRAINER, 2, data, folder) as job:
        resumed = [out.splitlines() for out in job.finish()]
    for whole, before, rest in zip(expected, killed, resumed, strict=True):
        assert 0 < len(rest) < len(whole)
        assert rest == whole[-len(rest) :]
        assert before == whole[:kill_after]
    return killed, resumed


@pytest.mark.parametrize("kill_after", [7, 18, 30])
def test_killing_all_ranks_and_starting_again_from_files(kill_after, tmp_path):
    killed_and_resumed(tmp_path, "data of each rank", kill_after)


def test_a_kill_while_samples_of_another_rank_are_trained_on_loses_and_repeats_none(tmp_path):
    kill_after = 43
    killed, resumed = killed_and_resumed(tmp_path, "shards of one dataset", kill_after)
    saved = kill_after - kill_after % 4
    epochs = [
        [json.loads(line) for line in [*before[:saved], *rest[: rest.index("end")]]]
        for before, rest in zip(killed, resumed, strict=True)
    ]
    assert sorted(key for epoch in epochs for key in r.real_ids(epoch)) == [*range(400)]
    given_away = [
        place
        for rank, epoch in enumerate(epochs)
        for place, step in enumerate(epoch)
        if any(index % 2 != rank for index in r.real_ids([step]))
    ]
    assert min(given_away) < saved and kill_after < max(given_away)


@pytest.mark.parametrize(("sizes", "window"), [([60, 45], 8), ([500, 420], "auto")])
def test_a_distributed_checkpoint(sizes, window, tmp_path):
    body = """
    import torch.distributed.checkpoint as dcp
    from odb_nodes import DistributedState
    def loader():
        sizes, window = json.loads(sys.argv[2])
        return r.make_loader(sizes[rank], window=window)
    whole = loader()
    iterator = iter(whole)
    for _ in range(7):
        next(iterator)
    dcp.save({"loader": DistributedState(whole)}, checkpoint_id=sys.argv[1])
    left = [r.describe(batch) for batch in iterator]
    left += [r.describe(batch) for batch in whole]
    resumed = loader()
    dcp.load({"loader": DistributedState(resumed)}, checkpoint_id=sys.argv[1])
    assert [r.describe(batch) for _ in range(2) for batch in resumed] == left
    windows = r.gathered(r.window_of(resumed))
    r.finish([len(left), *windows])
    """
    given = json.dumps([sizes, window])
    found = run_ranks(tmp_path, body, 2, tmp_path / "checkpoint", given)
    (steps, first, second), _ = found
    assert found == [[steps, first, second]] * 2 and steps > 3
    assert (first == 8) if window == 8 else first > 128
    assert first == second


def test_a_distributed_checkpoint_of_another_number_of_ranks(tmp_path):
    body = """
    import torch.distributed.checkpoint as dcp
    from elastic import make
    from odb_nodes import DistributedState, pop_step_info
    loader, trained, saved_by = make(None, timeout_s=60), [], sys.argv[2]
    state = {"loader": DistributedState(loader, saved_by=int(saved_by) or None)}
    if saved_by != "0":
        dcp.load(state, checkpoint_id=sys.argv[1])
    for step, batch in enumerate(loader):
        info = pop_step_info(batch)
        trained += [] if info.is_filler else info.keys
        if step == 3 and saved_by == "0":
            break
    if saved_by == "0":
        dcp.save(state, checkpoint_id=sys.argv[1])
    r.finish(trained)
    """
    found = run_ranks(tmp_path, body, 2, tmp_path / "checkpoint", 0)
    found += run_ranks(tmp_path, body, 3, tmp_path / "checkpoint", 2)
    assert sorted(index for of_rank in found for index in of_rank) == trained_on()
