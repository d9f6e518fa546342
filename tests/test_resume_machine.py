"""One machine for all that is promised of states: whatever befalls a run, it goes on exactly.

A run of any kind of job takes steps, is saved, killed, loaded, closed, left, sent to another epoch,
given more samples to exclude, a lower budget, and other numbers of ranks, in any order. Its oracle
is a run that nobody interrupts: the same steps, on every rank, to the last bit. Where ranks, budget
or exclusions change, the oracle is a run from the changed states, and both together have each
sample once, and count it exactly.
"""

from functools import cache
from typing import NamedTuple

import pytest
from elastic import ENDED_EARLY, LEFT_OUT
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from jobs import KINDS, Given, Job, by_virtual_rank, check_counts, keys_of, left_out_of

from odb_nodes import StateError, reshard
from odb_nodes.core.contract import copy_state, snapshot

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT, ENDED_EARLY, "ignore:`weights` are not given")
LEFT = 8  # samples of each rank that `exclude_more` leaves at least
NUMBERS = st.integers(0, 99)  # of which a rule makes a choice
PLANNED = 18  # steps at most in which groups come that were formed before: two rounds


class Line:
    """A run that nobody interrupts, from the beginning or from states."""

    def __init__(self, given, states=None):
        self.given, self.job = given, Job(given, states)
        self._epochs, self._complete, self._now = {}, set(), None
        self._is_whole = states is None
        self._any_order = self._is_whole and not KINDS[given.kind].calls

    def epoch(self, number):
        """The steps of an epoch of this run; the first may be the rest of one."""
        while self.step(number, len(self._epochs.get(number, ()))) is not None:
            pass
        return self._epochs[number]

    def step(self, number, step):
        """A step of an epoch; None at its end."""
        if number not in self._complete and self._now != number:
            if self._any_order:
                self.job.set_epoch(number)
            elif number:
                self.epoch(number - 1)
            self._epochs[number], self._now = [], number
        found = self._epochs[number]
        while number not in self._complete and len(found) <= step:
            if (one := self.job.step()) is not None:
                found.append(one)
                continue
            self._complete.add(number)
            self._now = None
            if number or self._is_whole:
                check_counts(found)
        return found[step] if step < len(found) else None


@cache
def whole(*given):
    return Line(Given(*given))


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
        return [*before, *(self.line.step(self.epoch, one) for one in range(self.step))]

    def rest(self):
        return self.line.epoch(self.epoch)[self.step :]

    def ends_optimizer_step(self):
        done = self.steps()
        return not done or done[-1][0].info.ends_optimizer_step


class ResumeMachine(RuleBasedStateMachine):
    name, folder, job = "", None, None
    next_epoch = True  # whether a changed run must also have the next epoch of a fresh one

    @initialize(at=NUMBERS, steps=st.integers(0, 12))
    def begin(self, at, steps):
        self.start(KINDS[self.name].ranks[at % len(KINDS[self.name].ranks)])
        self.take(steps)

    def start(self, world_size):
        self.kind, self.saved, self.kept, self.lines = KINDS[self.name], [], [], []
        self.first_world_size = world_size
        self.go_to(Place(whole(self.name, world_size, self.folder)))

    def go_to(self, place, states=None):
        """Be a new run at a place, as after a kill."""
        if self.job is not None:
            self.job.end()
        self.place, self.job = place, Job(place.line.given, states)

    def teardown(self):
        for one in (self, *self.lines):
            one.job.end()
        for state, at_once in self.kept:
            assert copy_state(state) == at_once

    @rule(steps=st.integers(1, 12))
    def take(self, steps):
        for _ in range(steps):
            line, epoch, step, _ = self.place
            expected = line.step(epoch, step)
            assert self.job.step() == expected
            if expected is None:
                self.place = Place(line, epoch + 1)
            else:
                self.place = self.place._replace(step=step + 1)

    @rule()
    def save(self):
        self.saved.append((self.place, self.job.states()))

    @precondition(lambda self: self.job.touched)
    @rule()
    def keep(self):
        """A state that is made when it is needed is what it would have been at once."""

        def both(loader):
            state, at_once = snapshot(loader.root), copy_state(loader.root.state_dict())
            at_once.pop("digest", None)  # of a state that is handed out alone
            return state, at_once

        self.kept += self.job.each(both, self.job.loaders)

    @precondition(lambda self: self.saved)
    @rule(at=NUMBERS)
    def load(self, at):
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

    @precondition(lambda self: self.job.touched and not self.kind.calls)
    @rule()
    def leave(self):
        """Break out of the loop, and begin the next epoch."""
        self.job.begin()
        self.place = Place(self.place.line, self.place.epoch + 1)

    @precondition(lambda self: not self.kind.calls)
    @rule(number=st.integers(0, 3))
    def set_epoch(self, number):
        """Go to any epoch; where a state was loaded, say again within which."""
        if not self.job.loaded:
            self.job.set_epoch(number)
            self.job.begin()  # before that, a state is within the present epoch
            self.place = Place(self.fresh(self.place.line.given), number)
        elif self.place.step:
            self.job.set_epoch(self.place.epoch)

    @precondition(lambda self: len(self.kind.ranks) > 1)
    @rule(at=NUMBERS)
    def change_ranks(self, at):
        others = [one for one in self.kind.ranks if one != self.place.line.given.world_size]
        self.move(others[at % len(others)])

    def move(self, world_size):
        """Go on with another number of ranks; whether that can be."""
        given, rest = self.place.line.given, self.place.rest()
        if not self.place.ends_optimizer_step():
            with pytest.raises(StateError, match="within an optimizer step"):
                reshard(self.job.states(), world_size)
            return
        try:
            states = reshard(self.job.states(), world_size)
        except StateError:
            assert self.place.steps() and not self.kind.moves
            return
        self.change(given._replace(world_size=world_size), states)
        if "virtual_ranks" in self.kind.options:
            assert by_virtual_rank(self.place.rest()) == by_virtual_rank(rest)

    @rule(how=st.sampled_from(["few", "half", "rank"]), at=st.sets(NUMBERS, max_size=5))
    def exclude_more(self, how, at):
        given, here = self.place.line.given, sorted(self.everything())
        if how == "few" or not self.place.step:
            keys = {here[number % len(here)] for number in at}
        elif how == "half":
            keys = {*here[sum(at) % 2 :: 2]}
        else:  # all that a rank has left
            rank = sum(at) % given.world_size
            keys = {key for step in self.place.rest() for key in step[rank].keys}
        exclude = given.exclude | keys
        trained = {*self.of_all()[0]}
        if len(trained - exclude) < LEFT * given.world_size:
            return
        if self.kind.options.get("uneven") == "stop":  # A rank without samples leaves none to any.
            epoch = whole(self.name, given.world_size, self.folder).epoch(0)
            for share in zip(*epoch, strict=True):
                if len({*keys_of([share])[0]} - exclude) < LEFT:
                    return
        states = self.job.states()
        if self.place.ends_optimizer_step() or exclude == given.exclude:
            self.change(given._replace(exclude=exclude), states)
            assert not {*keys_of(self.place.rest())[0]} & exclude
        elif "virtual_ranks" not in self.kind.options:
            job = Job(given._replace(exclude=exclude), states)
            with pytest.raises(StateError, match="within an optimizer step"):
                job.begin()
            job.end()

    @precondition(lambda self: self.place.line.given.cuts < 2)
    @rule()
    def lower_budget(self):
        if "virtual_ranks" in self.kind.options and not self.place.ends_optimizer_step():
            return  # the batches of a step that are out must stay what they are
        given = self.place.line.given
        given = given._replace(cuts=given.cuts + 1)
        if self.kind.budget().shapes:
            job = Job(given, self.job.states())
            with pytest.raises(StateError, match="With `shapes`"):
                job.begin()
            job.end()
            return
        self.change(given, self.job.states())
        tokens = self.kind.budget(given.cuts).tokens
        rest = self.place.rest()
        for step in rest[PLANNED * rest[0][0].info.batches_per_step if rest else 0 :]:
            assert all(one.tokens <= tokens or len(one.rows) <= 1 for one in step)

    def of_all(self):
        """The keys of the samples of an epoch: that are trained on, and left out."""
        world_size = self.first_world_size if self.kind.counts_unread else 1
        return keys_of(whole(self.name, world_size, self.folder).epoch(0))

    def everything(self):
        return {*sum(self.of_all(), [])}

    def fresh(self, given):
        """A run from the beginning."""
        if not given.exclude and not given.cuts:
            return whole(*given)
        self.lines.append(Line(given))
        return self.lines[-1]

    def change(self, given, states):
        """Go on as another line, which has what is left of this one."""
        before, line = self.place.steps(), Line(given, states)
        self.lines.append(line)
        self.go_to(Place(line, before=tuple(before)), states)
        rest = line.epoch(0)
        check_counts([*before, *rest])
        rows = [row for step in [*before, *rest] for one in step for row in one.rows]
        assert len(rows) == len({*rows}) or self.kind.options.get("sharded")
        if self.kind.once:
            trained, left_out = keys_of([*before, *rest])
            left_of = left_out_of([*before, *rest])
            everything, stops = self.everything(), self.kind.options.get("uneven") == "stop"
            assert len([*trained, *left_out]) == len({*trained, *left_out})
            missing = everything - {*trained, *left_out}
            assert {*trained, *left_out} <= everything
            told = len(left_out) - sum(one.reason == "unemitted" for one in left_of)
            if self.kind.make is None:
                out, done, unemitted = line.job.counts()
                assert done == len(trained) and (not rest or out == told)
                counted = out + done + unemitted
                assert counted <= len(everything)
                assert counted == len(everything) or not self.kind.counts_unread
            if rest and stops and not self.kind.counts_unread:
                # All ranks end with the first: what a rank misses, it had not read.
                for rank in range(given.world_size):
                    own = sorted(one for one in everything if one[1] % given.world_size == rank)
                    read = [one for one in own if one not in missing]
                    assert own[: len(read)] == read
            elif (rest and not stops) or not given.exclude:  # Else no step is there to tell it.
                assert not missing
        asks = any(isinstance(call, tuple) for call in self.kind.calls.values())
        if rest and not given.exclude and self.next_epoch and not asks:
            number = rest[0][0].info.epoch + 1
            assert line.epoch(1) == self.fresh(given).epoch(number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


def machine_of(folder, kind):
    return type("Machine", (ResumeMachine,), {"name": kind, "folder": folder})


# What befalls a run in the fast loop: each kind meets one of these.
EVENTS = [
    lambda run: run.load_own_state(closed=True),
    lambda run: run.kind.ranks[1:] and run.change_ranks(1),
    lambda run: run.kind.calls or run.leave(),
    lambda run: run.exclude_more("few", {3, 11, 17, 40, 87}),
    lambda run: run.kind.calls or run.set_epoch(2),
    lambda run: run.lower_budget(),
    lambda run: run.load_own_state(closed=False),
    lambda run: run.exclude_more("half", {1}),
    lambda run: run.kind.ranks[1:] and run.change_ranks(2),
    lambda run: run.exclude_more("rank", {2}),
]


@pytest.mark.fast
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_befalls_a_run_it_goes_on_exactly(kind, folder):
    run, number = machine_of(folder, kind)(), [*KINDS].index(kind)
    run.next_epoch = number % 4 == 0
    run.begin(number, 3 + number % 5)
    run.save()
    run.keep()
    run.take(2)
    run.load(number)
    run.take(2)
    EVENTS[number % len(EVENTS)](run)
    run.take(2)
    run.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_befalls_a_run_of_any_kind_it_goes_on_exactly(kind, folder, exhaustive):
    """Run the same examples each time; with `--exhaustive`, others."""
    examples = settings.default.max_examples // 12
    given = settings(
        stateful_step_count=12, deadline=None, max_examples=examples, derandomize=not exhaustive
    )
    run_state_machine_as_test(machine_of(folder, kind), settings=given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_goes_on_from_each_step_and_on_other_ranks(kind, folder):
    run = machine_of(folder, kind)()
    *others, world_size = KINDS[kind].ranks
    run.start(world_size)
    for _ in range(12):
        run.save()
        run.take(1)
    for at in range(12):
        run.load(at)
        run.take(3)
    for at in range(1, 12, 2) if others else ():
        run.load(at)
        run.move(others[at // 2 % len(others)])
    run.lower_budget()
    run.take(3)
    if not KINDS[kind].calls:
        run.set_epoch(0)
        run.load_own_state(closed=True)
        run.take(1)
    run.teardown()
