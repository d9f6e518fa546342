"""Alignment with real processes over gloo."""

from collections import Counter
from statistics import median

import pytest
from elastic import trained_on
from gradients import SCALINGS, SIZES
from rank_jobs import run_ranks
from worker_functions import SkipSome

SHAPES = {
    2: [[40, 41], [30, 90], [50, 0], [0, 1]],
    4: [[41, 40, 40, 40], [30, 90, 30, 30], [40, 0, 40, 40], [1, 0, 0, 0]],
}


@pytest.mark.parametrize("world_size", SHAPES)
def test_equal_steps_and_every_sample_once(world_size, tmp_path):
    body = """
    for sizes in json.loads(sys.argv[1]):
        for options in ({"read_ahead": 3}, {"accumulate": 3}):
            loader = r.make_loader(sizes[rank], **options)
            r.check_epochs(sizes, r.epochs_of(loader))
            loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, world_size, SHAPES[world_size])


def test_no_hang_whatever_the_seed(tmp_path, sampled):
    # Any shards, budgets and rounds; ranks of different speed; epochs that are left at any step.
    body = """
    for seed in range(0, 50, int(sys.argv[1])):
        draw = random.Random(seed)  # the same on all ranks
        sizes = [draw.choice([0, 1, draw.randrange(100)]) for _ in range(world_size)]
        sizes[draw.randrange(world_size)] += 1
        loader = r.make_loader(
            sizes[rank],
            seed=seed,
            budget=draw.randrange(30, 150),
            window=draw.randrange(1, 30),
            round_size=draw.randrange(1, 40),
            accumulate=draw.randrange(1, 4),
            read_ahead=draw.randrange(3),
        )
        for stop in draw.sample(range(20), 3):
            for step, batch in enumerate(loader):
                time.sleep(random.random() / 1000)
                if step == stop:
                    break
        r.check_epochs(sizes, r.epochs_of(loader, 1))
        loader.close()
    r.finish()
    """
    run_ranks(tmp_path, body, 4, sampled(every=5).get("every", 1), timeout_s=200)


def test_samples_of_mixed_sources_come_once_or_are_counted_as_skipped(tmp_path):
    body = """
    import worker_functions as w
    from odb_nodes.tools.source_report import SourceReport
    sources = {"many": range(90), "one": [91]}  # one rank has nothing of the second
    options = {"token_budget": 96, "window": 8, "round_size": 4, "num_workers": 1}
    with ODBDataLoader(sources, process_fn=w.SkipSome(), **options) as loader:
        for epoch in range(2):
            report, ids = SourceReport(), []
            for batch in loader:
                info = pop_step_info(batch)
                report.add(info)
                assert sum(r.gathered(info.local_samples)) == info.all_samples_this_step
                ids += [] if info.is_filler else batch["id"].tolist()
            counts = {name: one.samples for name, one in report.over_ranks().counts.items()}
            assert r.gathered(counts) == [counts] * 2
    r.finish([sorted(sum(r.gathered(ids), [])), loader.skipped_samples, counts])
    """
    kept = [index for index in [*range(90), 91] if SkipSome().reason(index) is None]
    reasons = Counter(filter(None, map(SkipSome().reason, range(90))))
    first, second = run_ranks(tmp_path, body, 2)
    assert first[0] == second[0] == kept
    assert Counter(first[1]) + Counter(second[1]) == reasons
    assert first[2] == {"many": len(kept) - 1, "one": 1}


# --- real ranks resumed from a distributed checkpoint, also by another number of ranks ------------


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


# --- the gradient of every optimizer step is that of one process that has the batches of all ranks-


TOLERANCE = 1e-12

GRADIENT_JOB = """
    import gradients as g
    r.finish([
        [g.compare(g.SIZES[world_size], how, scaling, accumulate) for scaling in g.SCALINGS]
        for how in ("ddp", "fsdp")
        for accumulate in (1, 3)
    ])
"""


def errors(found, scaling):
    """Of the gradient of each optimizer step, relative to that of one process; of all ranks."""
    seen = [error for rank in found for error in rank[SCALINGS.index(scaling)]["errors"]]
    assert len(seen) >= 5 * len(found)
    return seen


@pytest.mark.parametrize("world_size", SIZES)
def test_the_gradient_of_ranks_is_that_of_one_process(world_size, tmp_path):
    # Under DDP and FSDP2, each with gradient accumulation of 1 and of 3.
    ranks = run_ranks(tmp_path, GRADIENT_JOB, world_size, timeout_s=240)
    for found in zip(*ranks, strict=True):
        # The mean over all supervised tokens; and of the local means, weighed by samples.
        assert max(errors(found, "exact")) <= TOLERANCE
        assert max(errors(found, "approx")) <= TOLERANCE
        exact = [rank[SCALINGS.index("exact")] for rank in found]
        assert sum(rank["masked_groups"] for rank in exact) > 0
        if world_size > 1:
            assert sum(rank["fillers"] for rank in exact) > 0
            assert any(rank["groups"] > rank["groups_alone"] for rank in exact)  # Some were split.
    alone, *others = [median(errors(found, "none")) for found in zip(*ranks, strict=True)]
    # Unscaled means give another gradient, except where there is one mean and nothing to scale.
    assert alone <= TOLERANCE if world_size == 1 else alone > 1e-3
    assert others[0] > 1e-3 and others[2] > 1e-3
