"""The planner of one rank: its pool, its limits, its window, and what a restart goes on from."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import budgets, facts_of

from odb_nodes import TokenBudget
from odb_nodes.core.planning import MAX_AGE_WINDOWS, StepTime
from odb_nodes.core.planning.auto_window import LEAST_WINDOW
from odb_nodes.core.planning.budget import Limits
from odb_nodes.core.planning.facts import NO_FACTS
from odb_nodes.core.planning.group_planner import (
    GroupPlanner,
    PoolReport,
    RoundSettings,
    UserGroups,
)

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def random_samples(count, seed):
    """Tokens, patches and task of each sample of an epoch."""
    draws = np.random.default_rng(seed).integers((1, 0, 0), (121, 51, 4), (count, 3))
    return [*map(tuple, draws.tolist())]


samples = st.builds(random_samples, st.integers(1, 40), st.integers(0, 2**16))


class Stream:
    """The groups of samples that come one after the other, formed for `step_time` if given."""

    def __init__(self, samples, budget, window, *options, step_time=None, **more):
        self.samples, self.step_time = samples, step_time
        self.make = lambda: GroupPlanner(budget, window, *options, **more)
        self.planner = self.make()
        if step_time is not None:
            self.planner.follow_ranks(step_time)

    def fill(self):
        planner, pool = self.planner, self.planner.pool
        while (room := planner.room()) > 0:
            if pool.pulled + room > len(self.samples):
                planner.end()
            ordinals = np.arange(pool.pulled, min(pool.pulled + room, len(self.samples)))
            planner.add(self.facts(ordinals), len(ordinals))

    def facts(self, ordinals):
        tokens, patches, task = np.array(self.samples, np.int64).reshape(-1, 3)[ordinals].T
        return facts_of(tokens, ordinal=ordinals, patches=patches, task=task)

    def next(self):
        """The next group; none at the end."""
        self.fill()
        return [] if self.planner.is_done else self.planner.next_group().ordinal.tolist()

    def state(self):
        """The planner as plain data."""
        planner = self.planner
        state = {
            "waiting": planner.pool.ordinals().tolist(),
            "pulled": planner.pool.pulled,
            "ended": planner.ended,
            "limits": planner.limits,
            "window": planner.window_state(),
            "caps": planner.pool.caps.tolist(),
            "largest_groups": planner.largest_groups,
        }
        return json.loads(json.dumps(state))

    def restart(self, follows_ranks=False):
        """Go on with another planner, from the state of this one."""
        state = self.state()
        planner = self.planner = self.make()
        if follows_ranks or self.step_time is not None:
            planner.follow_ranks(self.step_time)
        restore(planner, **state | {"waiting": self.facts(np.array(state["waiting"], np.int64))})
        assert self.state() == state


def restore(planner, waiting=NO_FACTS, **state):
    limits, caps = state.pop("limits", None), state.pop("caps", ())
    start = {"pulled": 0, "ended": False, "window": None, "largest_groups": 0}
    limits, caps = limits and Limits(*limits), np.array(caps, np.int64)
    planner.restore(waiting, **start | state, limits=limits, caps=caps)


def epoch_of(stream, events=None, restarts=False, **options):
    """The groups of an epoch; before each, what `events` does, and a restart where asked for."""
    groups = []
    while True:
        if events:
            events(stream.planner, len(groups))
        if restarts:
            stream.restart(**options)
        if not (group := stream.next()):
            return groups
        groups.append(group)


def once_each(groups, count):
    return sorted(index for group in groups for index in group) == [*range(count)]


LOWER = 40


def lower(planner, number):
    """What ranks agree on in the middle of an epoch."""
    if number == 2:
        planner.use(RoundSettings(max_tokens=LOWER))


def lower_and_cap(planner, number):
    """What ranks agree on in the middle of an epoch."""
    if number == 2:
        planner.use(RoundSettings(max_tokens=LOWER), caps=[20, 25, 40])
    if number == 3:
        planner.lower_limits(planner.limits._replace(max_samples=2))


@given(
    samples,
    budgets,
    st.integers(1, 20) | st.just("auto"),
    st.sampled_from([0, 3]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([None, lower_and_cap]),
    st.sampled_from(["full", "early", "auto"]),
    st.sampled_from([None, StepTime(squares=0.05)]),
)
@few
def test_a_planner_that_restarts_before_every_group_forms_the_same_groups(
    samples, budget, window, largest_first, diversity, events, window_start, step_time
):
    diversity = 0.0 if budget.layout == "packed" else diversity
    options = samples, budget, window, largest_first, diversity
    more = {"window_start": window_start, "epoch_samples": lambda: len(samples)}
    more["step_time"] = step_time
    whole, restarted = (
        epoch_of(Stream(*options, **more), events, again) for again in (False, True)
    )
    assert whole == restarted
    assert once_each(whole, len(samples))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=300), st.booleans(), st.booleans())
@settings(few, max_examples=20)
def test_an_auto_window_survives_restarts_at_every_group(lengths, follows_ranks, knows_length):
    samples = [(length, 0, 0) for length in lengths]

    def events(planner, number):
        planner.choose_window_alone()
        if number == 4:  # ranks choose together after their first round
            planner.use(RoundSettings(window=150))

    def stream():
        length = len(samples) if knows_length else None
        stream = Stream(samples, TokenBudget(24), "auto", epoch_samples=lambda: length)
        if follows_ranks:
            stream.planner.follow_ranks()
        return stream

    whole = epoch_of(stream(), events)
    restarted = epoch_of(stream(), events, restarts=True, follows_ranks=follows_ranks)
    assert restarted == whole
    assert once_each(whole, len(samples))


# --- samples that come back, or go ---------------------------------------------------------------


@given(samples, budgets, st.integers(1, 20), st.data())
@few
def test_samples_that_are_put_back_wait_again_as_old_as_they_are(samples, budget, window, data):
    stream = Stream(samples, budget, window)
    taken = []
    for _ in range(data.draw(st.integers(1, 4))):
        taken += stream.next()
    back = np.array(data.draw(st.permutations(taken)), np.int64)[: data.draw(st.integers(0, 20))]
    waiting = stream.planner.pool.ordinals().tolist()
    stream.planner.put_back(stream.facts(back))
    assert stream.planner.pool.ordinals().tolist() == sorted([*waiting, *back.tolist()])
    again = Stream(samples, budget, window)
    again.planner = stream.planner
    again.restart()  # as if they had never been taken
    groups = epoch_of(again)
    assert once_each([*groups, {*taken} - {*back.tolist()}], len(samples))


def test_samples_left_counts_waiting_and_future_samples():
    planner = GroupPlanner(TokenBudget(100), 8, epoch_samples=lambda: 20)
    assert planner.samples_left() == 20
    planner.add(facts_of([10] * 5), 6)  # of which a sample is left out
    assert planner.samples_left() == 5 + 14
    planner.add(facts_of([10] * 3, 6), 16)  # more than was said
    assert planner.samples_left() == 8
    unknown = GroupPlanner(TokenBudget(100), 8)
    unknown.add(facts_of([10] * 5), 6)
    assert unknown.samples_left() is None
    for ended in (planner, unknown):
        ended.end()
        assert ended.samples_left() == len(ended.pool)


# --- limits --------------------------------------------------------------------------------------


@given(samples, budgets, st.integers(1, 20))
@few
def test_a_lower_limit_in_mid_epoch_bounds_all_later_groups_and_loses_no_sample(
    samples, budget, window
):
    stream = Stream(samples, budget, window)
    groups = epoch_of(stream, lower)
    assert once_each(groups, len(samples))
    lowered = Limits.of(budget)._replace(tokens=LOWER).group_budget(budget)
    for number, group in enumerate(groups):
        present = lowered if number >= 2 and budget.tokens > LOWER else budget
        tokens, patches, _ = zip(*(samples[index] for index in group), strict=True)
        assert len(group) == 1 or present.cost(tokens) <= present.tokens
        assert len(group) == 1 or sum(patches) <= (budget.max_patches or sum(patches))
        assert len(group) <= (budget.max_samples or len(group))


def test_a_limit_is_never_raised_again():
    planner = GroupPlanner(TokenBudget(100), 8)
    for asked, tokens in [(120, 100), (0, 100), (60, 60), (80, 60), (0, 60), (50, 50)]:
        planner.use(RoundSettings(max_tokens=asked))
        assert planner.limits.tokens == tokens
        assert planner.limits.sample_tokens == 100  # what a sample exceeds stays
    planner.lower_limits(Limits.of(TokenBudget(90, max_samples=3)))
    assert planner.limits == Limits(50, 3, None, 90, None)
    planner.begin_epoch()
    assert planner.limits == Limits(50, 3, None, 90, None)  # the next epoch has it, too


def test_a_restart_has_the_limits_of_the_state_or_those_of_the_budget():
    planner = GroupPlanner(TokenBudget(100), 8)
    lower = planner.limits._replace(tokens=50)
    restore(planner, limits=lower)
    assert planner.limits == lower
    restore(planner)
    assert planner.limits == Limits.of(TokenBudget(100))


# --- caps ----------------------------------------------------------------------------------------


def test_caps_are_for_the_next_groups_and_the_last_given_count():
    planner = GroupPlanner(TokenBudget(100), 8)
    planner.use(RoundSettings(), [10, 20])
    planner.use(RoundSettings(), [30])
    assert planner.pool.caps.tolist() == [30]
    planner.use(RoundSettings())
    assert planner.pool.caps.tolist() == []


def filled(window=40, budget=None):
    stream = Stream(
        [(5 + index % 40, 0, 0) for index in range(200)], budget or TokenBudget(100), window
    )
    stream.fill()
    return stream


def test_a_rank_offers_costs_for_as_many_caps_as_it_is_asked_for():
    assert len(filled().planner.report(6).offer) == 1 + 6
    assert len(filled().planner.report(0).offer) == 0


def test_a_rank_whose_data_has_ended_offers_no_caps():
    stream = filled()
    stream.planner.end()
    assert len(stream.planner.report(6).offer) == 0


# --- the window ----------------------------------------------------------------------------------


def auto(lengths, epoch_samples=lambda: None, follows_ranks=False, **fields):
    options = {"epoch_samples": epoch_samples}
    stream = Stream([(n, 0, 0) for n in lengths], TokenBudget(100, **fields), "auto", **options)
    if follows_ranks:
        stream.planner.follow_ranks()
    return stream


def test_a_window_that_is_a_number_is_never_chosen():
    planner = Stream([(5, 0, 0)] * 99, TokenBudget(100), 16).planner
    assert planner.window_state() is None
    assert planner.window_is_chosen
    planner.use(RoundSettings(window=500))
    planner.choose_window_alone()
    restore(planner, window=(700, True, 0, 0, 0))
    assert planner.window == planner.pool.window == 16


def test_alone_a_rank_chooses_once_in_an_epoch_by_the_lengths_so_far():
    stream = auto([10] * 128 + [50] * 2000)
    planner = stream.planner
    stream.next()
    assert planner.window == LEAST_WINDOW and not planner.window_is_chosen
    planner.choose_window_alone()
    assert planner.window == planner.pool.window == 32 * 10
    for _ in range(60):
        stream.next()
        planner.choose_window_alone()
    assert planner.window == planner.pool.window == 32 * 10
    planner.begin_epoch()
    assert planner.window == planner.pool.window == 32 * 10  # until this epoch chooses
    stream.samples = [(25, 0, 0)] * 999
    stream.next()
    planner.choose_window_alone()
    assert planner.window == 32 * 4


def test_with_other_ranks_only_agreed_settings_change_the_window():
    stream = auto([10] * 3000, follows_ranks=True)
    stream.next()
    stream.planner.choose_window_alone()
    assert stream.planner.window == LEAST_WINDOW
    assert stream.planner.report(0).lengths == stream.planner.lengths.report(TokenBudget(100))
    assert stream.planner.report(0).lengths[0] == LEAST_WINDOW
    stream.planner.use(RoundSettings(window=300))
    assert stream.planner.window == stream.planner.pool.window == 300
    stream.next()
    assert stream.planner.report(0).lengths == (0, 0)  # what comes later is not told


@pytest.mark.parametrize(
    ("epoch_samples", "window"),
    [
        (4 * 320, 320),  # four windows: the first round would be a large part of it
        (4 * 320 + 1, LEAST_WINDOW),
        (None, LEAST_WINDOW),
    ],
)
def test_in_a_short_epoch_a_rank_chooses_a_first_window(epoch_samples, window):
    stream = auto([10] * 3000, lambda: epoch_samples, follows_ranks=True)
    stream.fill()
    assert stream.planner.window == stream.planner.pool.window == window
    assert len(stream.planner.pool) == window
    assert not stream.planner.window_is_chosen
    stream.planner.use(RoundSettings(window=200))
    assert stream.planner.window == 200


def test_a_rank_chooses_a_first_window_once_and_not_if_alone():
    stream = auto([10] * 128 + [1] * 400, lambda: 528, follows_ranks=True)
    stream.fill()
    assert stream.planner.window == 320  # by its first 128 samples, whatever comes after
    alone = auto([10] * 528, lambda: 528)
    alone.fill()
    assert alone.planner.window == LEAST_WINDOW


def test_a_window_grows_once_it_is_full():
    planner = auto([], lambda: 600, follows_ranks=True).planner
    planner.add(facts_of([10] * (LEAST_WINDOW - 1)), LEAST_WINDOW - 1)
    assert (planner.room(), planner.window) == (1, LEAST_WINDOW)
    planner.add(facts_of([10], LEAST_WINDOW - 1), 1)
    assert (planner.room(), planner.window) == (320 - LEAST_WINDOW, 320)


def test_the_age_bound_holds_while_the_window_grows():
    stream = auto([100, *[10] * 3000])
    while group := stream.next():
        assert stream.planner.pool.pulled - min(group) <= MAX_AGE_WINDOWS * stream.planner.window
        stream.planner.choose_window_alone()


# --- epochs, the largest groups, and room ---------------------------------------------------------


def test_each_epoch_begins_with_largest_first_groups():
    stream = Stream([(n, 0, 0) for n in (10, 50, 20, 40, 30)], TokenBudget(50), 5, 2)
    planner = stream.planner
    for _ in range(2):
        assert planner.is_largest
        groups = [stream.next()]
        assert planner.is_largest
        groups.append(stream.next())
        assert not planner.is_largest
        assert groups == [[1], [3]]
        assert once_each(groups + epoch_of(stream), 5)
        planner.begin_epoch()
        assert (planner.pool.pulled, planner.ended) == (0, False)
    assert not GroupPlanner(TokenBudget(50), 5).is_largest


class Notes:
    """Takes the place of a `PoolCheck`."""

    def __init__(self):
        self.noted = []

    def note(self, lengths, window):
        self.noted.append((lengths, window))


def test_groups_that_are_chosen_freely_are_looked_at_for_their_padding():
    """Neither the largest groups, nor those of a window to come, nor those of the tail."""
    notes = Notes()
    lengths = [40, 40, *[10] * 10]
    stream = Stream([(n, 0, 0) for n in lengths], TokenBudget(40), 5, 1, check=notes)
    assert [stream.next() for _ in range(3)] == [[1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert notes.noted == [([10] * 4, 5)] * 2
    assert len(epoch_of(stream)) == 2 and len(notes.noted) == 2
    stream = Stream([(10, 0, 0)] * 200, TokenBudget(40), "auto", check=notes)
    stream.next()
    assert len(notes.noted) == 2


# --- a pool that begins small --------------------------------------------------------------------


def pulled_at_first(window=400, samples=None, largest_first=0, **options):
    stream = Stream([(10, 0, 0)] * 1000, TokenBudget(100), window, largest_first, **options)
    stream.planner.epoch_samples = lambda: samples
    stream.next()
    return stream.planner.pool.pulled


EARLY = 28  # the first multiple of 400 // 32 before 400 that is two budgets of 10 samples or more


def test_the_first_group_waits_for_the_window_or_for_two_budgets():
    assert pulled_at_first(window_start="full", samples=10**6) == 400
    assert pulled_at_first(window_start="early") == EARLY
    assert pulled_at_first(window_start="early", samples=100) == EARLY


def test_by_default_it_does_not_wait_in_an_epoch_that_is_known_to_be_long():
    assert pulled_at_first(samples=32 * 400) == EARLY
    assert pulled_at_first(samples=32 * 400 - 1) == 400
    assert pulled_at_first(samples=None) == 400


def test_by_default_groups_of_the_longest_samples_are_chosen_from_the_whole_window():
    assert pulled_at_first(samples=10**6, largest_first=1) == 400
    assert pulled_at_first(samples=10**6, largest_first=1, window_start="early") == EARLY


@pytest.mark.parametrize("window_start", ["full", "early", "auto"])
def test_the_128_samples_that_an_auto_window_begins_with_are_waited_for(window_start):
    assert pulled_at_first("auto", 10**6, window_start=window_start) == LEAST_WINDOW


def test_an_auto_window_that_is_chosen_is_grown_to():
    pulled = {}
    for window_start in ("full", "early"):
        stream = Stream([(10, 0, 0)] * 2000, TokenBudget(100), "auto", window_start=window_start)
        stream.next()
        stream.planner.choose_window_alone()
        stream.next()
        pulled[window_start] = stream.planner.pool.pulled
        while stream.planner.pool.pulled < 1000:
            stream.next()
        assert len(stream.planner.pool) >= 320 - 10
        stream.planner.begin_epoch()
        stream.next()
        assert (stream.planner.pool.pulled == 320) == (window_start == "full")
    assert pulled["full"] == 330 and pulled["early"] < 200


@pytest.mark.parametrize("window_start, pulled", [("full", 320), ("auto", 320), ("early", 130)])
def test_the_window_that_a_rank_chooses_alone_in_a_short_epoch_is_grown_to(window_start, pulled):
    samples_ = [(10, 0, 0)] * 1000
    more = {"window_start": window_start, "epoch_samples": lambda: len(samples_)}
    stream = Stream(samples_, TokenBudget(100), "auto", **more)
    stream.planner.follow_ranks()
    stream.next()
    assert (stream.planner.window, stream.planner.pool.pulled) == (320, pulled)


def test_groups_of_a_growing_pool_are_not_looked_at_for_their_padding():
    notes = Notes()
    samples_ = [(10, 0, 0)] * 200
    stream = Stream(samples_, TokenBudget(40), 64, check=notes, window_start="early")
    while stream.planner.pool.pulled < 80:
        assert not notes.noted
        stream.next()
    stream.next()
    assert notes.noted


# --- the groups of a node of the user ------------------------------------------------------------


def test_groups_that_are_given_are_taken_as_they_are_one_at_a_time():
    planner = UserGroups()
    planner.follow_ranks()
    for lengths in ([400, 3], [7]):
        assert (planner.room(), planner.is_done) == (1, False)
        planner.give(group := facts_of(lengths))
        assert (planner.room(), planner.is_done) == (0, False)
        planner.use(RoundSettings(max_tokens=10), [5])
        assert planner.report(8) == PoolReport()
        assert planner.next_group() is group
    planner.give(group)
    planner.end()
    assert (planner.room(), planner.is_done) == (0, False)  # the last one is to be taken yet
    assert planner.next_group() is group
    assert (planner.room(), planner.is_done) == (0, True)


def test_settings_of_a_round_are_plain_data_in_a_state():
    for settings_ in (RoundSettings(), RoundSettings(5, (1, 2, 3), 128, True)):
        state = json.loads(json.dumps(settings_.to_state()))
        assert RoundSettings(*state).to_state() == settings_.to_state()
