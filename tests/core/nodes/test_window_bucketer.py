import io
import re
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pools import lognormal
from refusals import refuses
from sampling import fewer
from torchdata.nodes import IterableWrapper, Mapper

from odb_nodes import (
    LengthObserver,
    Loader,
    Sample,
    SampleError,
    ShardedSampler,
    StateError,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes._support import progress
from odb_nodes.core.planning.facts import Facts
from odb_nodes.testing import assert_resumes_exactly

LENGTHS = np.random.default_rng(1).integers(1, 60, 200).tolist()


def samples(lengths):
    return IterableWrapper([Sample(i, n, n - 1) for i, n in enumerate(lengths)])


def bucketer(lengths=LENGTHS, budget=100, window=16, **options):
    node = WindowBucketer(samples(lengths), budget, window, **options)
    node.reset(None)
    return node


def again(node, lengths=LENGTHS, **options):
    """Another node that goes on from where one stands."""
    other = bucketer(lengths, node.budget, **options)
    other.reset(node.state_dict())
    return other


def ids(groups):
    return [[sample.data for sample in group] for group in groups]


def warnings_of(node, epochs=1):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            node.reset(None)
            list(node)
    return [str(warning.message) for warning in caught]


def enough(message):
    """The window that a warning names."""
    return int(re.search(r"Raise the window to `window=(\d+)`", message)[1])


# state


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=80),
    tokens=st.integers(40, 200),
    window=st.integers(1, 40),
    state=st.sampled_from(["replay", "payload"]),
    fields=st.sampled_from(
        [{}, {"shapes": 6}, {"row_sizes": "friendly"}, {"max_samples": 3}, {"layout": "packed"}]
    ),
    oversize=st.sampled_from(["alone", "drop"]),
    largest_first=st.sampled_from([0, 5]),
    window_start=st.sampled_from(["full", "early"]),
    every=st.integers(1, 5),
)
@pytest.mark.filterwarnings("ignore:.*exceed.*")
@fewer(5)
def test_it_resumes_exactly_for_any_lengths(
    lengths, tokens, window, state, fields, oversize, largest_first, window_start, every, sampled
):
    budget = TokenBudget(tokens, oversize=oversize, **fields)
    if oversize == "drop":
        lengths = [*lengths, 1]  # at least one group

    def make():
        source = samples(lengths)
        start = {"largest_first": largest_first, "window_start": window_start}
        return WindowBucketer(source, budget, window, state, **start)

    assert_resumes_exactly(make, every=every, **sampled(horizon=12, chain=1))


def test_processing_that_is_not_deterministic_is_an_error_that_names_the_remedy():
    draws = iter(np.random.default_rng(0).integers(1, 50, 10_000).tolist())

    def make(mode, state=None):
        processed = Mapper(ShardedSampler(100, rank=0, world_size=1), lambda _: next(draws))
        node = WindowBucketer(LengthObserver(processed, int), 100, 16, mode)
        node.reset(state)
        return node

    node = make("replay")
    next(node)
    with pytest.raises(StateError, match=r"sample \d+ of the epoch had .* not seeded .*payload"):
        make("replay", node.state_dict())
    node = make("payload")
    first = [len(next(node)) for _ in range(5)]
    assert sum(first) + sum(map(len, make("payload", node.state_dict()))) == 100


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-5], "the source ended before sample 19"),
        (lambda data: data + data[:5], "had ended after 200 samples .* more now"),
        (lambda data: [n + 1 for n in data], r"had \d+ tokens when saved"),
    ],
)
def test_data_that_changed_under_a_state_is_an_error(change, message):
    node = bucketer()
    while not node.state_dict()["ended"]:
        next(node)
    with pytest.raises(StateError, match=message):
        again(node, change(LENGTHS))


def test_a_payload_holds_what_torch_can_load_safely():
    data = {"ids": np.arange(3, dtype=np.uint16), "x": [torch.ones(2), ("a", None, 1.5, True)]}
    data |= {"none": np.zeros((0, 2)), "bytes": b"", "scalar": np.float32(2), 3: np.array(7)}
    source = IterableWrapper([Sample(data, 2, 1)] * 3)
    node = WindowBucketer(source, 2, 4, "payload")
    node.reset(None)
    next(node)
    buffer = io.BytesIO()
    torch.save(node.state_dict(), buffer)
    buffer.seek(0)
    node = WindowBucketer(source, 2, 4, "payload")
    node.reset(torch.load(buffer, weights_only=True))
    back = next(node)[0].data
    assert list(back) == list(data)
    for key in ("ids", "none", 3):
        assert (back[key].dtype, back[key].shape) == (data[key].dtype, data[key].shape)
        assert back[key].tolist() == data[key].tolist()
    assert (back["bytes"], back["scalar"], type(back["scalar"])) == (b"", 2.0, np.float32)
    assert back["x"][0].tolist() == [1, 1]
    assert back["x"][1] == ("a", None, 1.5, True)


class NotPlain(torch.Tensor):
    """As the images of torchvision: `torch.load` refuses it."""


@pytest.mark.parametrize("data", [object(), torch.ones(2).as_subclass(NotPlain)])
def test_a_payload_that_cannot_be_plain_data_is_an_error(data):
    node = WindowBucketer(IterableWrapper([Sample(data, 2, 1)] * 3), 2, 4, "payload")
    node.reset(None)
    next(node)
    with pytest.raises(
        SampleError, match=rf"cannot hold `{type(data).__name__}`.* `state=.replay.`"
    ):
        node.state_dict()


# oversize samples, and errors


@pytest.mark.parametrize("oversize", ["alone", "drop"])
def test_oversize_gives_a_warning_a_summary_and_a_count_that_the_state_keeps(oversize):
    lengths, budget = [300, 5, 5, 200, 5], TokenBudget(100, oversize=oversize)
    node = WindowBucketer(samples(lengths), budget, 16)
    first, summary = warnings_of(node, epochs=3)  # the same summary is not repeated
    assert "sample 0 of the epoch, with 300 tokens" in first
    assert summary.startswith("of the 5 samples read for this epoch, 2 exceed")
    assert ("dropped" in summary) == (oversize == "drop")
    assert len(warnings_of(WindowBucketer(samples([90, 10, 10]), 64, 4))) == 1  # no summary of one
    other = again(node, lengths)
    node.reset(None)
    groups = ids(node)
    assert sorted(groups) == ([[0], [1, 2, 4], [3]] if oversize == "alone" else [[1, 2, 4]])
    for pool_node in (node, other):
        assert pool_node.oversize_samples == 2
        assert pool_node.dropped_samples == (2 if oversize == "drop" else 0)


@pytest.mark.parametrize("mode", ["replay", "payload"])
@pytest.mark.filterwarnings("ignore:.*exceed.*")
def test_an_epoch_whose_samples_were_all_dropped_is_an_error(mode):
    lengths, budget = [200] * 50, TokenBudget(100, oversize="drop")
    node = bucketer(lengths, budget, state=mode)
    before = node.state_dict()
    with pytest.raises(SampleError, match=r"all 50 samples .*TokenBudget\(tokens=100.*dropped"):
        next(node)
    for state in (before, node.state_dict(), None):  # resumed, and in the next epoch
        node = bucketer(lengths, budget, state=mode)
        node.reset(state)
        with pytest.raises(SampleError, match="all 50 samples"):
            next(node)
    assert sum(map(len, bucketer([*lengths, 5], budget))) == 1
    assert list(bucketer([], budget)) == []


class Breaking(IterableWrapper):
    """Raises in place of a sample."""

    def next(self):
        item = super().next()
        if item.data == 50:
            raise OSError("disk")
        return item


@pytest.mark.parametrize("mode", ["replay", "payload"])
@pytest.mark.parametrize(
    ("source", "lengths", "error", "message"),
    [
        (Breaking, LENGTHS, OSError, "disk"),
        (
            IterableWrapper,
            [*LENGTHS[:50], 300, *LENGTHS[51:]],
            SampleError,
            "sample 50 .* 300 tok",
        ),
    ],
)
def test_an_error_in_the_middle_stays_until_a_reset_and_loses_nothing(
    source, lengths, error, message, mode
):
    budget = TokenBudget(100, oversize="error")
    data = list(samples(lengths).iterable)
    node, groups = WindowBucketer(source(data), budget, 16, mode), []
    node.reset(None)
    with pytest.raises(error, match=message):
        for group in node:
            groups.append(group)
    with pytest.raises(error, match=message):
        next(node)
    mended = again(node, state=mode)
    assert ids(groups) + ids(mended) == ids(bucketer(LENGTHS, budget))


def test_items_that_are_no_samples_are_refused():
    node = WindowBucketer(IterableWrapper([1]), 100)
    node.reset(None)
    with pytest.raises(SampleError, match="must yield `Sample`, but `.*` yielded `int`"):
        next(node)


test_arguments_that_are_not_valid_are_named = refuses(
    [
        ({"budget": 0}, "`budget`"),
        ({"window": 0}, "`window`"),
        ({"window": 2.5}, "`window`"),
        ({"largest_first": -1}, "`largest_first`"),
        ({"window_start": "slow"}, r'`window_start` must be one of \("auto", "early", "full"\)'),
        ({"diversity": -0.1}, r"`diversity` must be in \[0, 1\], but is -0.1"),
        ({"diversity": 1.1}, "`diversity`.* is 1.1"),
        ({"diversity": float("nan")}, "`diversity`.* is nan"),
        ({"diversity": "0.5"}, "`diversity` must be a number"),
        ({"diversity": True}, "`diversity` must be a number"),
        ({"state": "pickle"}, "`state`"),
    ],
    lambda options: WindowBucketer(samples([1]), **{"budget": 10, **options}),
    (TypeError, ValueError),
)


# window


@pytest.mark.parametrize(
    ("part", "longest", "budget", "window"),
    [
        (10, 150, TokenBudget(4000, attention_tokens=20), 16),
        (80, 100, TokenBudget(12_000), "auto"),
    ],
)
def test_a_window_too_small_for_the_budget_is_warned_of_with_a_sufficient_one(
    part, longest, budget, window
):
    lengths = [min(1 + length // part, longest) for length in lognormal(80 * 200)]
    source = samples(lengths)
    (message,) = warnings_of(WindowBucketer(source, budget, window), epochs=2)
    assert "of the tokens of the first 16 batches are padding" in message
    assert warnings_of(WindowBucketer(source, budget, enough(message))) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_alone_it_chooses_its_window_after_the_first_group(layout, sampled):
    lengths = [1 + length // 50 for length in lognormal(400)]

    def make():
        return Loader(WindowBucketer(samples(lengths), TokenBudget(200, layout=layout)))

    assert_resumes_exactly(make, **sampled(every=29, horizon=6, chain=0))
    loader = make()
    node = loader.root
    pulled, windows = zip(*[(node.planner.pool.pulled, node.window) for _ in loader], strict=True)
    assert windows[0] == pulled[0] == 128
    assert pulled[1] > windows[1] == windows[-1] > 128
    assert windows[1] == round(32 * 200 * 128 / sum(lengths[:128]))
    next(iter(loader))
    assert node.planner.pool.pulled == windows[-1]  # the next epoch begins with it


@pytest.mark.slow
def test_a_long_fill_and_a_long_replay_say_how_far_they_are(monkeypatch, caplog):
    def slow(sample):
        time.sleep(0.01)
        return sample

    monkeypatch.setattr(progress, "FIRST_S", 0.1)
    node = WindowBucketer(Mapper(samples(LENGTHS), slow), 100, 40, window_start="full")
    node.reset(None)
    next(node)
    filling = r"samples in the pool before the first batch: \d+ of 40 after 0 s"
    assert re.fullmatch(filling, caplog.messages[0]) and len(caplog.messages) <= 3
    caplog.clear()
    node.reset(node.state_dict())
    replaying = r"items read again to restore a state: \d+ of 40 after 0 s"
    assert re.fullmatch(replaying, caplog.messages[0]) and len(caplog.messages) <= 3
    caplog.clear()
    monkeypatch.setattr(progress, "FIRST_S", 0.0)
    list(node)
    assert not caplog.messages  # no later fill does


def test_samples_without_keys_that_are_put_back_are_found_again():
    """They keep their ages, by which a restore reads them."""
    lengths = LENGTHS[:120]

    def fresh():
        data = [{"input_ids": [1] * n, "id": i} for i, n in enumerate(lengths)]
        return WindowBucketer(LengthObserver(IterableWrapper(data)), 100, 16)

    def rest_of(node):
        groups, states = [], [node.state_dict()]
        for group in node:
            groups.append([sample.data["id"] for sample in group])
            states.append(node.state_dict())
        return groups, states

    node = fresh()
    node.reset(None)
    out = [sample.data["id"] for _ in range(6) for sample in next(node)]
    planned = []
    for _ in range(4):
        node.fill()
        planned.append(node.planner.next_group())
    node.put_back(Facts.joined(planned))
    groups, states = rest_of(node)
    assert sorted([*out, *sum(groups, [])]) == [*range(len(lengths))]
    for step in range(0, len(states), 3):
        node = fresh()
        node.reset(states[step])
        assert rest_of(node)[0] == groups[step:], step
