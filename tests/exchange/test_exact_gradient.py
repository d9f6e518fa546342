"""The gradient of every optimizer step is that of one process that has the batches of all ranks."""

from statistics import median

import pytest
from gradients import SIZES
from rank_jobs import run_ranks

TOLERANCE = 1e-12

JOB = """
    import gradients as g
    how, sizes = sys.argv[1], g.SIZES[world_size]
    r.finish({
        f"{scaling}, accumulate={accumulate}": g.compare(sizes, how, scaling, accumulate)
        for scaling, accumulate in g.CASES
    })
"""


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def wrapper(request):
    return request.param


@pytest.fixture(scope="module", params=SIZES)
def world_size(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(wrapper, world_size, tmp_path_factory):
    """What each rank of a job has found, by loss scaling and accumulation."""
    return run_ranks(tmp_path_factory.mktemp("job"), JOB, world_size, wrapper)


def errors(ranks, case):
    """Of the gradient of each optimizer step, relative to that of one process; of all ranks."""
    found = [error for rank in ranks for error in rank[case]["errors"]]
    assert len(found) >= 5 * len(ranks)
    return found


@pytest.mark.parametrize("accumulate", [1, 3])
def test_exact_scaling_is_the_mean_over_all_supervised_tokens(ranks, accumulate):
    assert max(errors(ranks, f"exact, accumulate={accumulate}")) <= TOLERANCE


@pytest.mark.parametrize("accumulate", [1, 3])
def test_approx_scaling_is_the_mean_of_the_local_means_weighed_by_samples(ranks, accumulate):
    assert max(errors(ranks, f"approx, accumulate={accumulate}")) <= TOLERANCE


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_mean_of_unscaled_means_is_another_gradient(ranks, world_size, accumulate):
    naive = median(errors(ranks, f"none, accumulate={accumulate}"))
    if world_size == accumulate == 1:
        assert naive <= TOLERANCE  # There is one mean, and nothing to scale.
    else:
        assert naive > 1e-3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_these_data_have_what_is_hard_to_weigh(ranks, world_size, accumulate):
    seen = [rank[f"exact, accumulate={accumulate}"] for rank in ranks]
    assert sum(rank["masked_groups"] for rank in seen) > 0
    if world_size > 1:
        assert sum(rank["fillers"] for rank in seen) > 0
        assert any(rank["groups"] > rank["groups_alone"] for rank in seen)  # Some were split.
