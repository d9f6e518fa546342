"""Real ranks resumed from a distributed checkpoint, also by another number of ranks."""

from elastic import trained_on
from rank_jobs import run_ranks


def test_a_distributed_checkpoint(tmp_path):
    body = """
    import torch.distributed.checkpoint as dcp
    from odb_nodes import DistributedState
    from odb_nodes.contract.graph import walk
    def loader():
        return r.make_loader([500, 420][rank], window="auto")
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
    (window,) = (n.window for n in walk(resumed.root) if isinstance(n, WindowBucketer))
    r.finish([len(left), window])
    """
    (steps, window), second = run_ranks(tmp_path, body, 2, tmp_path / "checkpoint")
    assert second == [steps, window] and steps > 3 and window > 128


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
