"""One machine for all that is promised of states: whatever befalls a run, it goes on exactly.

A run of any kind of job takes steps, is saved, killed, loaded, closed, left, given more samples to
exclude, and moved to other numbers of ranks, in any order. Its oracle is a run that nobody
interrupts: the same steps, on every rank, to the last bit. Where ranks or exclusions change, the
oracle is a run from the changed states, and both together have each sample once.
"""

from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from jobs import KINDS, Job, keys_of

from odb_nodes import StateError, reshard

RANKS = [1, 2, 4]
EXCLUDED = 5  # at most, each time


class Line:
    """A run that nobody interrupts, from the beginning or from states."""

    def __init__(self, kind, world_size, folder, exclude=frozenset(), states=None):
        self.given = kind, world_size, folder, exclude
        self.kind, self.world_size, self.folder, self.exclude = self.given
        self.job, self._epochs = Job(*self.given, states), []

    def epoch(self, number):
        """The steps of an epoch of this run; the first may be the rest of one."""
        while len(self._epochs) <= number:
            self._epochs.append(self.job.epoch())
        return self._epochs[number]


@cache
def whole(kind, world_size, folder):
    return Line(kind, world_size, folder)


class Place(NamedTuple):
    """Where a run stands: after `step` steps of an epoch of a line.

    `before`: what came of the line's first epoch before the line began.
    """

    line: Line
    epoch: int = 0
    step: int = 0
    before: tuple = ()

    def steps(self):
        """The steps that are done of the epoch."""
        before = self.before if self.epoch == 0 else ()
        return [*before, *self.line.epoch(self.epoch)[: self.step]]


class ResumeMachine(RuleBasedStateMachine):
    kinds, folder, job = (), None, None

    @initialize(data=st.data(), world_size=st.sampled_from(RANKS))
    def begin(self, data, world_size):
        self.kind = data.draw(st.sampled_from(self.kinds))
        self.saved, self.lines = [], []
        self.go_to(Place(whole(self.kind, world_size, self.folder)))

    def go_to(self, place, states=None):
        """Be a new run at a place, as after a kill."""
        if self.job is not None:
            self.job.end()
        self.place, self.job = place, Job(*place.line.given, states)

    def teardown(self):
        for one in (self, *self.lines):
            one.job.end()

    @rule(steps=st.integers(1, 12))
    def take(self, steps):
        for _ in range(steps):
            line, epoch, step, _ = self.place
            expected = line.epoch(epoch)
            if step < len(expected):
                assert self.job.step() == expected[step]
                self.place = self.place._replace(step=step + 1)
            else:
                assert self.job.step() is None
                self.place = Place(line, epoch + 1)

    @rule()
    def save(self):
        self.saved.append((self.place, self.job.states()))

    @precondition(lambda self: self.saved)
    @rule(data=st.data(), at=st.integers(0, 99))
    def load(self, data, at):
        """As after a kill, or into the loaders that run."""
        place, states = self.saved[at % len(self.saved)]
        if place.line.given == self.place.line.given and at % 2:
            self.job.load(states)
            self.place = place
        else:
            self.go_to(place, states)

    @rule(closed=st.booleans())
    def load_own_state(self, closed):
        states = self.job.states()
        if closed:
            self.job.close()
        self.job.load(states)

    @rule()
    def leave(self):
        """Break out of the loop, and begin the next epoch."""
        if self.job.touched:
            self.job.begin()
            self.place = Place(self.place.line, self.place.epoch + 1)

    @rule(world_size=st.sampled_from(RANKS))
    def change_ranks(self, world_size):
        kind, _, folder, exclude = self.place.line.given
        if self.ends_optimizer_step() and world_size != self.place.line.world_size:
            try:
                states = reshard(self.job.states(), world_size)
            except StateError:
                assert (self.place.step or self.place.before) and not KINDS[kind].moves
            else:
                self.change(Line(kind, world_size, folder, exclude, states), states)

    @rule(data=st.data())
    def exclude_more(self, data):
        kind, world_size, folder, exclude = self.place.line.given
        if self.ends_optimizer_step():
            keys = data.draw(st.sets(st.sampled_from(sorted(self.everything())), max_size=EXCLUDED))
            states = self.job.states()
            self.change(Line(kind, world_size, folder, exclude | keys, states), states)

    def ends_optimizer_step(self):
        done = self.place.line.epoch(self.place.epoch)[: self.place.step]
        return not done or done[-1][0].info.ends_optimizer_step

    def everything(self):
        return {key for part in keys_of(whole(self.kind, 1, self.folder).epoch(0)) for key in part}

    def change(self, line, states):
        """Go on as another line, which has what is left of this one."""
        self.lines.append(line)
        before = self.place.steps()
        self.go_to(Place(line, before=tuple(before)), states)
        trained, left_out = keys_of([*before, *line.epoch(0)])
        assert len(trained) == len(set(trained))
        assert {*trained, *left_out} == self.everything()
        assert not {*keys_of(line.epoch(0))[0]} & line.exclude
        if line.epoch(0) and not line.exclude:
            number = line.epoch(0)[0][0].info.epoch
            assert line.epoch(1) == whole(self.kind, line.world_size, self.folder).epoch(number + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


def run_machine(folder, kinds, **options):
    machine = type("Machine", (ResumeMachine,), {"kinds": kinds, "folder": folder})
    given = settings(stateful_step_count=12, deadline=None, **options)
    run_state_machine_as_test(machine, settings=given)


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore")
def test_whatever_befalls_a_run_it_goes_on_exactly(folder):
    run_machine(folder, [*KINDS], max_examples=2 * len(KINDS))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_befalls_a_run_of_any_kind_it_goes_on_exactly(kind, folder):
    run_machine(folder, [kind])
