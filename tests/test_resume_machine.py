"""The state machine of exact resume: after any sequence of events, a run has the same steps.

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
from jobs import KINDS, Job, JobSpec, by_virtual_rank, check_counts, keys_of, left_out_of

from odb_nodes import StateError, reshard
from odb_nodes.core.contract import copy_state, snapshot

pytestmark = pytest.mark.filterwarnings(*LEFT_OUT, ENDED_EARLY, "ignore:`weights` are not given")
LEFT = 8  # samples of each rank that `exclude_more` leaves at least
NUMBERS = st.integers(0, 99)  # of which a rule makes a choice
PLANNED = 18  # steps at most in which groups come that were formed before: two rounds


class Line:
    """An uninterrupted run, from the beginning or from states."""

    def __init__(self, spec, states=None):
        self.spec, self.job = spec, Job(spec, states)
        self._epochs, self._complete, self._now = {}, set(), None
        self._is_whole = states is None
        self._any_order = self._is_whole and not KINDS[spec.kind].calls

    def epoch(self, number):
        """The steps of an epoch of this run; the first epoch may be a remainder."""
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
        steps = self._epochs[number]
        while number not in self._complete and len(steps) <= step:
            of_ranks = self.job.step()
            if of_ranks is not None:
                steps.append(of_ranks)
                continue
            self._complete.add(number)
            self._now = None
            if number or self._is_whole:
                check_counts(steps)
        return steps[step] if step < len(steps) else None


@cache
def whole(*spec):
    return Line(JobSpec(*spec))


class Place(NamedTuple):
    """The position of a run: after `step` steps of an epoch of a line.

    `before`: the steps of the line's first epoch before the line began.
    """

    line: Line
    epoch: int = 0
    step: int = 0
    before: tuple = ()

    def steps(self):
        """The steps of the epoch so far."""
        before = self.before if self.epoch == 0 else ()
        return [*before, *(self.line.step(self.epoch, step) for step in range(self.step))]

    def rest(self):
        return self.line.epoch(self.epoch)[self.step :]

    def ends_optimizer_step(self):
        done = self.steps()
        return not done or done[-1][0].info.ends_optimizer_step


class ResumeMachine(RuleBasedStateMachine):
    name, folder, job = "", None, None
    next_epoch = True  # whether a changed run must also have the next epoch of a fresh one

    @initialize(choice=NUMBERS, steps=st.integers(0, 12))
    def begin(self, choice, steps):
        self.start(KINDS[self.name].ranks[choice % len(KINDS[self.name].ranks)])
        self.take(steps)

    def start(self, world_size):
        self.kind, self.saved, self.kept, self.lines = KINDS[self.name], [], [], []
        self.first_world_size = world_size
        self.go_to(Place(whole(self.name, world_size, self.folder)))

    def go_to(self, place, states=None):
        """Start a new run at a place, as after a kill."""
        if self.job is not None:
            self.job.end()
        self.place, self.job = place, Job(place.line.spec, states)

    def teardown(self):
        for run in (self, *self.lines):
            run.job.end()
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
        """A snapshot that is completed later equals the state of its moment."""

        def both(loader):
            state, at_once = snapshot(loader.root), copy_state(loader.root.state_dict())
            at_once.pop("digest", None)  # of a state that is handed out alone
            return state, at_once

        self.kept += self.job.each(both, self.job.loaders)

    @precondition(lambda self: self.saved)
    @rule(choice=NUMBERS)
    def load(self, choice):
        """Load a saved state after a kill, or into the running loaders."""
        place, states = self.saved[choice % len(self.saved)]
        if place.line.spec == self.place.line.spec and choice % 2:
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
        """Go to any epoch; after a load, name the epoch of the state."""
        if not self.job.loaded:
            self.job.set_epoch(number)
            self.job.begin()  # before that, a state is within the present epoch
            self.place = Place(self.fresh(self.place.line.spec), number)
        elif self.place.step:
            self.job.set_epoch(self.place.epoch)

    @precondition(lambda self: len(self.kind.ranks) > 1)
    @rule(choice=NUMBERS)
    def change_ranks(self, choice):
        sizes = [size for size in self.kind.ranks if size != self.place.line.spec.world_size]
        self.move(sizes[choice % len(sizes)])

    def move(self, world_size):
        """Resume with another number of ranks, or be refused."""
        spec, rest = self.place.line.spec, self.place.rest()
        if not self.place.ends_optimizer_step():
            with pytest.raises(StateError, match="within an optimizer step"):
                reshard(self.job.states(), world_size)
            return
        try:
            states = reshard(self.job.states(), world_size)
        except StateError:
            assert self.place.steps() and not self.kind.moves
            return
        self.change(spec._replace(world_size=world_size), states)
        if "virtual_ranks" in self.kind.options:
            assert by_virtual_rank(self.place.rest()) == by_virtual_rank(rest)

    @rule(how=st.sampled_from(["few", "half", "rank"]), choices=st.sets(NUMBERS, max_size=5))
    def exclude_more(self, how, choices):
        spec, here = self.place.line.spec, sorted(self.everything())
        if how == "few" or not self.place.step:
            keys = {here[number % len(here)] for number in choices}
        elif how == "half":
            keys = {*here[sum(choices) % 2 :: 2]}
        else:  # all that a rank has left
            rank = sum(choices) % spec.world_size
            keys = {key for step in self.place.rest() for key in step[rank].keys}
        exclude = spec.exclude | keys
        trained = {*self.of_all()[0]}
        if len(trained - exclude) < LEFT * spec.world_size:
            return
        if self.kind.options.get("uneven") == "stop":  # A rank without samples leaves none to any.
            epoch = whole(self.name, spec.world_size, self.folder).epoch(0)
            for share in zip(*epoch, strict=True):
                if len({*keys_of([share])[0]} - exclude) < LEFT:
                    return
        states = self.job.states()
        if self.place.ends_optimizer_step() or exclude == spec.exclude:
            self.change(spec._replace(exclude=exclude), states)
            assert not {*keys_of(self.place.rest())[0]} & exclude
        elif "virtual_ranks" not in self.kind.options:
            job = Job(spec._replace(exclude=exclude), states)
            with pytest.raises(StateError, match="within an optimizer step"):
                job.begin()
            job.end()

    @precondition(lambda self: self.place.line.spec.cuts < 2)
    @rule()
    def lower_budget(self):
        if "virtual_ranks" in self.kind.options and not self.place.ends_optimizer_step():
            return  # emitted batches of a step must stay the same
        spec = self.place.line.spec
        spec = spec._replace(cuts=spec.cuts + 1)
        if self.kind.budget().shapes:
            job = Job(spec, self.job.states())
            with pytest.raises(StateError, match="With `shapes`"):
                job.begin()
            job.end()
            return
        self.change(spec, self.job.states())
        tokens = self.kind.budget(spec.cuts).tokens
        rest = self.place.rest()
        for step in rest[PLANNED * rest[0][0].info.batches_per_step if rest else 0 :]:
            assert all(batch.tokens <= tokens or len(batch.rows) <= 1 for batch in step)

    def of_all(self):
        """The keys of an epoch: of trained samples, and of samples left out."""
        world_size = self.first_world_size if self.kind.counts_unread else 1
        return keys_of(whole(self.name, world_size, self.folder).epoch(0))

    def everything(self):
        return {*sum(self.of_all(), [])}

    def fresh(self, spec):
        """A run from the beginning."""
        if not spec.exclude and not spec.cuts:
            return whole(*spec)
        self.lines.append(Line(spec))
        return self.lines[-1]

    def change(self, spec, states):
        """Continue on another line, which has the rest of this one."""
        before, line = self.place.steps(), Line(spec, states)
        self.lines.append(line)
        self.go_to(Place(line, before=tuple(before)), states)
        rest = line.epoch(0)
        check_counts([*before, *rest])
        rows = [row for step in [*before, *rest] for batch in step for row in batch.rows]
        assert len(rows) == len({*rows}) or self.kind.options.get("sharded")
        if self.kind.once:
            trained, left_out = keys_of([*before, *rest])
            left_of = left_out_of([*before, *rest])
            everything, stops = self.everything(), self.kind.options.get("uneven") == "stop"
            assert len([*trained, *left_out]) == len({*trained, *left_out})
            missing = everything - {*trained, *left_out}
            assert {*trained, *left_out} <= everything
            counted_out = len(left_out) - sum(sample.reason == "unemitted" for sample in left_of)
            if self.kind.make is None:
                out, done, unemitted = line.job.counts()
                assert done == len(trained) and (not rest or out == counted_out)
                counted = out + done + unemitted
                assert counted <= len(everything)
                assert counted == len(everything) or not self.kind.counts_unread
            if rest and stops and not self.kind.counts_unread:
                # All ranks end with the first one: missing samples were not read.
                for rank in range(spec.world_size):
                    shard = sorted(key for key in everything if key[1] % spec.world_size == rank)
                    read = [key for key in shard if key not in missing]
                    assert shard[: len(read)] == read
            elif (rest and not stops) or not spec.exclude:  # Else no step reports them.
                assert not missing
        asks = any(isinstance(call, tuple) for call in self.kind.calls.values())
        if rest and not spec.exclude and self.next_epoch and not asks:
            number = rest[0][0].info.epoch + 1
            assert line.epoch(1) == self.fresh(spec).epoch(number)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("resume")


def machine_of(folder, kind):
    return type("Machine", (ResumeMachine,), {"name": kind, "folder": folder})


# The events of a run in the fast loop: each kind meets one.
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


# One kind of each source, budget and node.
FAST = ["payload", "packed", "threads", "stop iterable", "auto window", "shapes", "own keys"]
FAST += ["records", "collate", "mixed", "stateful", "known wrong lengths", "sampler", "cycle"]
FAST += ["accumulate", "known asks", "own data", "known windows", "virtual threads", "stop"]
FAST += ["set weights", "asks packed", "mixed kinds of sources", "virtual mixed", "no aligner"]
FAST += ["packed level in attention", "known collate", "early iterable", "known random"]
FAST += ["padded level in time"]


@pytest.mark.fast
@pytest.mark.parametrize("kind", FAST)
def test_a_run_resumes_exactly_after_an_event(kind, folder):
    run, number = machine_of(folder, kind)(), FAST.index(kind)
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
def test_a_run_of_any_kind_resumes_exactly_after_any_events(kind, folder, exhaustive):
    """Run the same examples each time; with `--exhaustive`, others."""
    examples = max(1, settings.default.max_examples // 25)
    options = settings(
        stateful_step_count=12, deadline=None, max_examples=examples, derandomize=not exhaustive
    )
    run_state_machine_as_test(machine_of(folder, kind), settings=options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_any_kind_resumes_at_each_step_and_on_other_ranks(kind, folder):
    run = machine_of(folder, kind)()
    *other_sizes, world_size = KINDS[kind].ranks
    run.start(world_size)
    for _ in range(12):
        run.save()
        run.take(1)
    for step in range(12):
        run.load(step)
        run.take(3)
    for step in range(1, 12, 2) if other_sizes else ():
        run.load(step)
        run.move(other_sizes[step // 2 % len(other_sizes)])
    run.lower_budget()
    run.take(3)
    if not KINDS[kind].calls:
        run.set_epoch(0)
        run.load_own_state(closed=True)
        run.take(1)
    run.teardown()
