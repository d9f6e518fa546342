"""Resuming under a trainer: which errors name the remedy in the trainer's own terms."""

import pytest

from odb_nodes import Loader, ShardedSampler, StateError
from odb_nodes.integrations.resuming import begin_or_resume

REMEDY = "Resume with the arguments of the run."


def loader(size=4):
    return Loader(ShardedSampler(size, False, 0, 0, 1))


def saved_within_epoch_0(**options):
    run = loader(**options)
    next(iter(run))
    return run.state_dict()


def test_a_state_of_another_configuration_is_refused_with_the_remedy():
    resumed = loader()
    resumed.load_state_dict(saved_within_epoch_0(size=5))
    with pytest.raises(StateError, match=f"`size` was 5 .*{REMEDY}"):
        begin_or_resume(resumed, REMEDY)


def test_an_epoch_that_contradicts_the_state_is_refused_without_it():
    resumed = loader()
    resumed.load_state_dict(saved_within_epoch_0())
    resumed.set_epoch(3)
    with pytest.raises(StateError, match=r"must be given 0, .* `set_epoch\(3\)`\.$"):
        begin_or_resume(resumed, REMEDY)
    resumed.set_epoch(0)
    assert list(begin_or_resume(resumed, REMEDY)) == [1, 2, 3]
