"""A batch that a monitor is told of twice is refused; one that it is not told of is said."""

import pytest
from monitors import loader_of, steps_of

from odb_nodes import pop_step_info
from odb_nodes.monitor import Monitor, read_run

pytestmark = pytest.mark.filterwarnings("ignore:.*waiting for b")


def test_a_batch_that_is_told_twice_is_refused(tmp_path):
    (first, second, *_) = steps_of(loader_of())  # micro-steps 0 and 1 of one optimizer step
    monitor = Monitor(tmp_path)
    monitor.step(*first)
    monitor.step(*second)
    with pytest.raises(ValueError, match="for step 1 of epoch 0, for which it was called again"):
        monitor.step(*second)


def test_a_batch_that_is_not_told_is_warned_of_once_with_its_number(tmp_path):
    with Monitor(tmp_path, every=1) as monitor:
        with pytest.warns(UserWarning, match="was not called for step 3 of epoch 0") as caught:
            for number, step in enumerate(steps_of(loader_of())):
                if number not in (3, 5):
                    monitor.step(*step)
        assert sum("was not called for" in str(one.message) for one in caught) == 1
    loader, monitor = loader_of(), Monitor(tmp_path / "later")
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


@pytest.mark.parametrize(
    ("place", "is_watched"), [("first", True), ("first", False), ("middle", False), ("after", True)]
)
def test_a_batch_of_another_loader_is_refused_and_the_epoch_stays_whole(
    tmp_path, place, is_watched
):
    def evaluate():
        batches = steps_of(loader_of(window=5))[1:]
        with pytest.raises(ValueError, match="the batches of one loader: .* evaluation"):
            for step in batches:
                monitor.step(*step)

    loader = loader_of()
    with Monitor(tmp_path, every=1) as monitor:
        monitor.attach(loader)
        for number, batch in enumerate(monitor.watch(loader) if is_watched else loader):
            info = pop_step_info(batch)
            if is_watched and (place, number) == ("first", 0):
                evaluate()
            monitor.step(batch, info)
            if (place, number) in (("first", 2), ("middle", 5)):
                evaluate()
        if place == "after":
            evaluate()
    (epoch,) = read_run(tmp_path).epochs
    assert epoch["sum"]["samples"] == 100


def test_a_loader_that_was_evaluated_before_is_refused_in_a_later_epoch_too(tmp_path):
    other = loader_of()
    steps_of(other)
    monitor, loader = Monitor(tmp_path), loader_of()
    for batch in monitor.watch(loader):
        monitor.step(batch, pop_step_info(batch))
        with pytest.raises(ValueError, match="for step 0 of epoch 1, but its loader stands at"):
            monitor.step(*steps_of(other)[0])
        break


def test_a_second_watch_within_an_epoch_is_an_error(tmp_path):
    monitor = Monitor(tmp_path)
    with pytest.raises(RuntimeError, match="another `watch` of this monitor began"):
        for batch in monitor.watch(loader_of()):
            monitor.step(batch, pop_step_info(batch))
            for other in monitor.watch(loader_of()):
                monitor.step(other, pop_step_info(other))


@pytest.mark.parametrize(
    ("told", "expected"), [([], "any step of epoch 0"), ([0, 1, 2], "step [0-9]+ of epoch 0")]
)
def test_an_epoch_whose_end_is_not_told_is_warned_of_once(tmp_path, told, expected):
    with Monitor(tmp_path) as monitor:
        with pytest.warns(UserWarning, match=f"was not called for {expected}") as caught:
            loader = loader_of()
            for _ in range(2):
                for number, batch in enumerate(monitor.watch(loader)):
                    if number in told:
                        monitor.step(batch, pop_step_info(batch))
    told_of = [one.filename for one in caught if "was not called" in str(one.message)]
    assert told_of == [__file__]
