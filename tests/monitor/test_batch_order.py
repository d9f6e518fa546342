"""A batch that a monitor is told of twice is refused; one that it is not told of is said."""

import pytest
from monitors import loader_of

from odb_nodes import pop_step_info
from odb_nodes.monitor import Monitor

pytestmark = pytest.mark.filterwarnings("error", "ignore:.*waiting for b", "ignore:.*are padding")


def steps_of(loader):
    return [(batch, pop_step_info(batch)) for batch in loader]


def test_a_batch_that_is_told_twice_is_refused(tmp_path):
    (first, second, *_) = steps_of(loader_of())  # micro-steps 0 and 1 of one optimizer step
    monitor = Monitor(tmp_path)
    monitor.step(*first)
    monitor.step(*second)
    with pytest.raises(ValueError, match="called again for step 1 of epoch 0"):
        monitor.step(*second)


def test_a_batch_that_is_not_told_is_warned_of_once_with_its_number(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        with pytest.warns(UserWarning, match="was not called for step 3 of epoch 0") as caught:
            for number, step in enumerate(steps_of(loader_of())):
                if number not in (3, 5):
                    monitor.step(*step)
        assert sum("was not called for" in str(one.message) for one in caught) == 1


def test_the_first_batch_of_an_epoch_that_is_not_told_is_warned_of(tmp_path):
    loader = loader_of()
    monitor = Monitor(tmp_path)
    for step in steps_of(loader):
        monitor.step(*step)
    with pytest.warns(UserWarning, match="was not called for step 0 of epoch 1"):
        monitor.step(*steps_of(loader)[1])


def test_a_loader_that_begins_again_or_goes_on_from_a_state_is_not_warned_of(tmp_path):
    monitor, loader = Monitor(tmp_path, every=1), loader_of()
    for _ in range(2):  # each time the first step of a new loader
        for batch in monitor.watch(loader_of()):
            monitor.step(batch, pop_step_info(batch))
            break
    monitor.reset()
    for step in steps_of(loader)[4:]:
        monitor.step(*step)
