from functools import cache

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from odb_nodes import ODBDataLoader, TokenBudget
from odb_nodes.integrations.learning_rate import LrScaling, follow
from odb_nodes.integrations.step_estimate import estimate_steps


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)


@pytest.mark.parametrize("rule, factor", [("linear", 4.0), ("sqrt", 2.0)])
def test_the_learning_rate_is_scaled_within_the_block_only(rule, factor):
    sgd = optimizer()
    scaling = LrScaling(reference_samples=8, rule=rule)
    with scaling.applied(sgd, 32):
        assert sgd.param_groups[0]["lr"] == 2.0 * factor
    assert sgd.param_groups[0]["lr"] == 2.0
    assert scaling.factor(8) == 1


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="`rule` must be one of"):
        LrScaling(reference_samples=8, rule="cubic")
    with pytest.raises(ValueError, match="`reference_samples` must be"):
        LrScaling(reference_samples=0)
    with pytest.raises(TypeError, match="must be a `LambdaLR`"):
        follow(StepLR(optimizer(), 3), lambda: 0)


def test_a_schedule_follows_samples():
    sgd, done = optimizer(), [0.0]
    scheduler = follow(LambdaLR(sgd, lambda step: 1 - step / 100), lambda: 100 * done[0])
    for done[0] in (0.1, 0.15, 0.7, 1.0):
        sgd.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(2 * (1 - done[0]))]


@cache
def epoch(accumulate):
    """A dataset, and how many steps an epoch of it has."""
    lengths = torch.distributions.LogNormal(4.0, 0.8)
    torch.manual_seed(0)
    dataset = [{"input_ids": [1] * int(n.clamp(2, 900))} for n in lengths.sample((3000,))]
    loader = ODBDataLoader(dataset, token_budget=2048, window=256, accumulate=accumulate)
    return dataset, sum(batch["odb_step_info"].ends_optimizer_step for batch in loader)


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("looked_at, error", [(10_000, 0.03), (256, 0.15)])
def test_the_estimate_of_steps_is_about_right(accumulate, looked_at, error):
    dataset, steps = epoch(accumulate)
    before = torch.get_rng_state()
    estimate = estimate_steps(
        dataset,
        budget=TokenBudget(2048),
        window=256,
        accumulate=accumulate,
        world_size=1,
        looked_at=looked_at,
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert estimate == pytest.approx(steps, rel=error)
