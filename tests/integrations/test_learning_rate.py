import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, StepLR

from odb_nodes.integrations.learning_rate import LrScaling, follow


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
