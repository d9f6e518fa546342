"""The gradient of every optimizer step is that of one process that has the batches of all ranks."""

from statistics import median

import pytest
from gradients import SCALINGS, SIZES
from rank_jobs import run_ranks

TOLERANCE = 1e-12

JOB = """
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
    ranks = run_ranks(tmp_path, JOB, world_size, timeout_s=240)
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
