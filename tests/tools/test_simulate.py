"""The simulator against real `RankAligner`s and `ODBDataLoader`s, one thread per rank."""

import threading
import warnings
from itertools import zip_longest

import numpy as np
import pytest
from aligned_ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from refusals import refuses
from toys import Stream

from odb_nodes import (
    LengthObserver,
    Loader,
    Mixing,
    Observation,
    ODBDataLoader,
    RankAligner,
    SampleError,
    ShardedSampler,
    Skipped,
    TokenBudget,
    WeightSchedule,
    WindowBucketer,
    pop_step_info,
)
from odb_nodes.core.planning import SimulationOptions, StepTime
from odb_nodes.tools.lengths import LengthTable, observe_lengths
from odb_nodes.tools.simulate import (
    TableEpoch,
    lognormal_lengths,
    simulate,
    simulate_steps,
)


def with_attention(group):
    longest = max(sample.tokens for sample in group)
    return longest * len(group) * (20 + longest)


def indices(step):
    """The groups of each rank, as samples; `None` for filler."""
    return [group and [sample.data for sample in group] for group in step]


def real_steps(
    lengths, world_size, budget, window, largest_first=0, window_start="auto", **options
):
    """The same as `indices` of all steps, taken by one `RankAligner` per rank."""

    def run(exchange):
        shard = ShardedSampler(lengths, shuffle=False, rank=exchange.rank, world_size=world_size)
        samples = LengthObserver(shard, observe=lengths.__getitem__)
        start = {"largest_first": largest_first, "window_start": window_start}
        bucketer = WindowBucketer(samples, budget, window, **start)
        aligner = RankAligner(bucketer, exchange, **options)
        return [None if item.info.is_filler else item.samples for item in Loader(aligner)]

    return [indices(step) for step in zip(*on_ranks(world_size, run), strict=True)]


def random_lengths(samples, seed):
    return np.random.default_rng(seed).integers(1, 41, samples).tolist()


jobs = {
    "lengths": st.builds(random_lengths, st.integers(1, 400), st.integers(0, 10**6)),
    "world_size": st.integers(1, 5),
    "budget": st.builds(
        TokenBudget,
        st.integers(20, 150),
        max_samples=st.none() | st.integers(1, 9),
        pad_to_multiple_of=st.sampled_from([1, 8]),
        oversize=st.sampled_from(["alone", "drop"]),
        layout=st.sampled_from(["padded", "packed"]),
        shapes=st.none() | st.integers(1, 9),
        attention_tokens=st.none() | st.integers(8, 60),
    )
    | st.builds(
        TokenBudget,
        st.integers(20, 300),
        row_sizes=st.sampled_from(["even", "friendly"]),
        shapes=st.none() | st.integers(1, 9),
    ),
    "window": st.integers(1, 30) | st.just("auto"),
    "window_start": st.sampled_from(["auto", "early", "full"]),
    "largest_first": st.sampled_from([0, 0, 1, 5]),
    "round_size": st.integers(1, 40),
    "accumulate": st.integers(1, 5),
    "seed": st.integers(-9, 9),
    "step_time": st.sampled_from(
        [None, StepTime(), StepTime(squares=1 / 20), StepTime(squares=1, base=30), with_attention]
    ),
}


def steps_of(lengths, **options):
    return list(simulate_steps(lengths, **options))


def planned_samples(lengths, budget):
    """Indices of the samples that a budget does not drop."""
    drop = budget.oversize == "drop"
    return [i for i, length in enumerate(lengths) if not (drop and budget.is_oversize(length))]


@given(**jobs, uneven=st.sampled_from(["fill", "stop"]))
def test_the_steps_are_those_of_real_ranks(lengths, **options):
    # An epoch of which all is dropped is an error of the real ranks.
    shards = [lengths[rank :: options["world_size"]] for rank in range(options["world_size"])]
    if any(shard and not planned_samples(shard, options["budget"]) for shard in shards):
        options["budget"] = TokenBudget(options["budget"].tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of oversize and of unemitted samples
        expected = real_steps(lengths, **options)
    assert [indices(step) for step in steps_of(lengths, **options)] == expected


# A first round has 1 step, and a short epoch does not wait for it.
@pytest.mark.parametrize(
    ("world_size", "mean_tokens", "first", "more"),
    [
        (1, 600, 2, {"max_samples": 20}),
        (3, 600, 1, {"layout": "packed"}),
        (3, 300, 0, {"attention_tokens": 1000}),
    ],
)
def test_the_steps_are_those_of_real_ranks_where_the_window_grows(
    world_size, mean_tokens, first, more
):
    shape = {"mean_tokens": mean_tokens, "longest_tokens": 2000}
    lengths = lognormal_lengths(world_size * 2_500, cv=1.0, **shape).tolist()
    options = {"world_size": world_size, "budget": TokenBudget(8192, **more)}
    expected = real_steps(lengths, **options, window="auto")
    assert [indices(step) for step in steps_of(lengths, **options)] == expected  # the default
    fixed = [indices(step) for step in steps_of(lengths, **options, window=128)]
    changed = [
        str(step) != str(fixed_step) for step, fixed_step in zip(expected, fixed, strict=False)
    ]
    assert changed.index(True) >= first and (first or changed[0])


LONG = TokenBudget(12_288)
PACKED, LONG_PACKED = (TokenBudget(tokens, layout="packed") for tokens in (20, 12_288))
PACKED_COST = 12_288 + (8_192**2 + 4_096**2) / 12_288
BY_HAND = [
    # Rank 0 has 4 x 5, which it splits in two, and 20; rank 1 has 10 + 9, 9 + 9 and 9. By cost:
    # 20 | 20, 10 | 18, 10 | 9.
    (
        ([5, 10, 5, 9, 5, 9, 5, 9, 20, 9], 2, 20),
        {"steps": 3, "samples": 10, "real_tokens": 86, "padded_tokens": 87, "filler_slots": 0}
        | {"density": 86 / 87, "efficiency": 86 / (2 * 48), "balance": 87 / (2 * 48)},
    ),
    # A rank that fills waits.
    (
        ([20, 20, 20], 2, 20),
        {"steps": 2, "filler_slots": 1, "filler_share": 0.25, "filler_loss": 0.25}
        | {"density": 1.0, "efficiency": 0.75},
    ),
    (([20] * 5, 3, 20), {"filler_loss": 1 / 6}),
    # Attention makes long groups dearer: 12,288 tokens cost twice what short samples cost.
    (([12_288, *[1] * 12_288], 1, LONG), {"time_balance": 1.0}),
    (([12_288, 1], 2, LONG), {"balance": 12_289 / 2 / 12_288}),
    (([12_288, 1], 2, LONG), {"time_balance": (24_577 + 1 / 12_288) / 4 / 12_288}),
    # All micro-steps of an optimizer step are mixed together.
    (([5, 5, 20], 1, 20), {"length_spread": 1.0}),
    (([5, 20, 5, 20], 2, 20), {"length_spread": 1.0}),
    (([5] * 8, 2, 5), {"length_spread": 1.0}),
    # Rows of 10, 20 and 40 tokens cost 15, 40 and 120. So 3 x 20 goes with 40, 4 x 10 with 5 x 10;
    # by their tokens, 3 x 20 would go with 5 x 10.
    (
        ([20, 40, 20, 10, 20, *[10] * 8], 2, TokenBudget(120, attention_tokens=20)),
        {"steps": 2, "padded_tokens": 190, "real_tokens": 190}
        | {"efficiency": 190 / (2 * (60 + 50)), "time_balance": 375 / (2 * (120 + 75))},
    ),
    (([3, 3], 1, TokenBudget(16, pad_to_multiple_of=8)), {"steps": 1, "padded_tokens": 16}),
    (([5, 5, 20, 20, 9, 9], 1, 20), {"shapes": 3}),
    (([5, 5, 20, 20, 9, 9], 1, TokenBudget(20, shapes=1)), {"shapes": 1}),
    # Packed rows hold what fits, and attention knows their samples.
    (([12, 8, 5, 15], 1, PACKED), {"steps": 2, "padded_tokens": 40, "density": 1.0}),
    (
        ([8_192, 6_144, 4_096, 6_144], 2, LONG_PACKED),
        {"balance": 1.0, "time_balance": (PACKED_COST + 18_432) / 2 / PACKED_COST},
    ),
]


@pytest.mark.parametrize(("job", "expected"), BY_HAND)
def test_a_report_by_hand(job, expected):
    lengths, world_size, budget = job
    job = {"budget": budget, "accumulate": 4}  # The first round has 4 steps.
    report = simulate(lengths, world_size=world_size, window=20_000, **job)
    assert {name: getattr(report, name) for name in expected} == pytest.approx(expected)


def test_balance_in_time_is_measured_by_the_time_that_ranks_are_levelled_by():
    def of_tokens(group):
        return sum(sample.tokens for sample in group)

    job = {"world_size": 2, "budget": 20, "window": 20_000}
    assert simulate([20, 10], **job, step_time=of_tokens).time_balance == pytest.approx(0.75)
    report = simulate([20, 10], **job, step_time=StepTime(squares=1.0))
    assert report.time_balance == pytest.approx((420 + 110) / 2 / 420)


def test_balance_in_time_counts_image_patches():
    table = LengthTable.of([5, 5])
    table = LengthTable(**{**vars(table), "patches": np.array([0, 10])})
    step_time = StepTime(patches=1.0)
    report = simulate(table, shuffle=False, world_size=2, budget=20, step_time=step_time)
    assert report.time_balance == pytest.approx((5 + 15) / 2 / 15)


def test_steps_of_one_length_have_no_spread():
    report = simulate([5, 5, 5, 5, 20, 20], world_size=1, budget=20, window=8)
    assert report.length_spread == 0.0


def test_a_report_of_some_samples_has_the_counts_of_all():
    report = simulate([5, 9, 5, 9, 20], world_size=2, budget=20)
    large = report.scaled(3)
    counts = {"steps", "samples", "rows", "real_tokens", "padded_tokens", "filler_slots"}
    for name, value in vars(report).items():
        assert getattr(large, name) == value * (3 if name in counts else 1), name


def test_the_steps_have_not_changed():
    """Golden: other steps of the same data would break every saved state."""
    lengths = lognormal_lengths(8 * 500, cv=1.0, seed=7)
    report = simulate(lengths, world_size=8, budget=16_384, window=64, seed=1)
    assert (report.steps, report.real_tokens, report.padded_tokens) == (30, 3_141_500, 3_580_790)
    steps = steps_of(range(3, 43), world_size=3, budget=100, window=8, seed=5)
    assert [indices(step) for step in steps[:3]] == [
        [[12, 15, 18, 21], [13, 16, 19, 22], [17, 20, 23]],
        [[30, 27], [1, 4, 7, 0, 3, 2], [29, 26]],
        [[39], [10, 25], [38]],
    ]


def test_lengths_have_the_variation_asked_for():
    lengths = lognormal_lengths(100_000, cv=0.5, shortest_tokens=1, longest_tokens=10**6)
    assert lengths.mean() == pytest.approx(800, rel=0.01)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.02)
    clipped = lognormal_lengths(1_000, cv=2.0, longest_tokens=900)
    assert (clipped.min(), clipped.max()) == (16, 900)
    for cv in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="`cv` must be in .0, inf"):
            lognormal_lengths(10, cv=cv)


test_errors_name_what_is_wrong = refuses(
    [
        ({"lengths": []}, ValueError, "`lengths`"),
        ({"lengths": [1.5]}, ValueError, "`lengths`"),
        ({"weights": {"a": 1}}, ValueError, "`weights` must be None"),
        ({"window": "Auto"}, ValueError, "`window`"),
        ({"step_time": lambda group: 0.5}, TypeError, "`step_time`"),
        ({"budget": TokenBudget(8, oversize="error")}, SampleError, "9 tokens"),
        ({"budget": TokenBudget(1, oversize="drop")}, ValueError, "no step"),
        ({"world_size": 3}, ValueError, "at most the 2 samples of the data, but is 3"),
        ({"lengths_known": 1}, TypeError, "`lengths_known`"),
    ],
    lambda change: simulate(**{"lengths": [9, 4], "world_size": 2, "budget": 10, **change}),
)


# --- over a table of lengths ----------------------------------------------------------------------

WEIGHTS = {"code": 1, "text": 2.5}


def make_dataset(samples, seed=0):
    lengths = lognormal_lengths(samples, cv=1.0, mean_tokens=90, longest_tokens=700, seed=seed)
    patches = np.random.default_rng(seed).integers(0, 9, samples)
    return [*zip(lengths.tolist(), patches.tolist(), strict=True)]


def process(item):
    tokens, patches = item
    ids = np.ones(tokens, np.int64)
    return Skipped("short") if tokens < 20 else {"input_ids": ids, "patches": patches}


def observe(sample):
    return Observation(len(sample["input_ids"]), patches=sample["patches"])


def loader_steps(dataset, world_size, **options):
    """Rows, width and keys of each rank at each step; `None` for filler or a rank that left."""
    lock = threading.Lock()  # global generators of random numbers are shared by the threads

    def run(exchange):
        with lock:
            loader = ODBDataLoader(
                dataset,
                process_fn=process,
                observe=observe,
                process_group=exchange,
                **options,
            )
        steps = []
        for batch in loader:
            info = pop_step_info(batch)
            keys = [*zip(info.row_sources, info.keys, strict=True)]
            steps.append(None if info.is_filler else (tuple(batch["input_ids"].shape), keys))
        return steps

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of oversize and skipped samples
        return [[*step] for step in zip_longest(*on_ranks(world_size, run))]


def planned_steps(table, world_size, token_budget, shuffle=True, weights=None, **options):
    epoch = TableEpoch(table=table, shuffle=shuffle, weights=weights)
    job = SimulationOptions(world_size=world_size, budget=token_budget, **options)
    budget = TokenBudget.of(token_budget)

    def planned(group):
        rows = [sample.data for sample in group]
        names = [table.names[number] for number in table.sources[rows]]
        shape = budget.shape([sample.tokens for sample in group])
        return shape, [*zip(names, table.keys[rows].tolist(), strict=True)]

    return [[group and planned(group) for group in step] for step in epoch.steps(job)]


BUDGETS = {
    "padded": TokenBudget(1500, pad_to_multiple_of=8, max_patches=60),
    "packed": TokenBudget(1500, layout="packed"),
    "shapes": TokenBudget(1500, shapes=5),
    "dropping": TokenBudget(500, oversize="drop", attention_tokens=400),
}


@pytest.mark.parametrize(
    ("name", "world_size", "window", "step_time"),
    [
        ("padded", 4, 40, None),
        ("padded", 4, 40, StepTime(squares=1 / 100, patches=2)),
        ("packed", 1, "auto", None),
        ("packed", 4, 40, None),
        ("packed", 2, "auto", StepTime(squares=1 / 50, patches=3)),
        ("packed", 2, 40, with_attention),
        ("shapes", 2, 40, StepTime(squares=1 / 100)),
        ("dropping", 4, "auto", None),
    ],
)
def test_steps_and_shapes_are_those_of_a_real_loader(name, world_size, window, step_time):
    dataset, options = make_dataset(500), {"window": window, "seed": 3, "round_size": 8}
    options["step_time"] = step_time
    expected = loader_steps(dataset, world_size, token_budget=BUDGETS[name], **options)
    table = observe_lengths(dataset, process_fn=process, observe=observe)
    steps = planned_steps(table, world_size, BUDGETS[name], **options)
    if name == "shapes":  # Its last rows are empty, which the loader does not tell apart.
        assert [[group and group[1] for group in step] for step in steps] == [
            [group and group[1] for group in step] for step in expected
        ]
    else:
        assert steps == expected
    report = simulate(table, world_size=world_size, budget=BUDGETS[name], **options)
    shapes = [group[0] for step in expected for group in step if group]
    assert report.steps == len(expected)
    assert report.padded_tokens == sum(rows * width for rows, width in shapes)
    assert report.shapes == len({*shapes})


SCHEDULE = WeightSchedule([(0, WEIGHTS), (100, {"code": 0, "text": 1}), (200, WEIGHTS)])
IN_TOKENS = WeightSchedule([(0, WEIGHTS), (20_000, {"code": 3, "text": 1})], ramp=True)


def test_a_schedule_has_its_places_in_the_share_of_the_data_that_is_drawn():
    half = {"code": 1, "text": 0}, {"code": 0, "text": 1}
    weights = WeightSchedule([(0, half[0]), (3_000, half[1]), (6_000, {"code": 1, "text": 1})])
    dataset = {name: make_dataset(4_000, seed) for seed, name in enumerate(("code", "text"))}
    drawn = observe_lengths(dataset, process_fn=process, observe=observe, samples=100)
    epoch = TableEpoch(table=drawn, weights=weights, samples=800)
    table, (rows,) = epoch.order(SimulationOptions(world_size=1, budget=1500))
    assert len(table) == 800
    assert set(table.sources[rows[:300]]) == {0} and set(table.sources[rows[300:600]]) == {1}
    assert len({*rows.tolist()}) == 800


class Sized(Stream):
    def __len__(self):
        return len(self.items)


MIXTURE = {"code": make_dataset(150), "text": make_dataset(250, seed=1)}
SIZED = {name: Sized(items) for name, items in MIXTURE.items()}


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (make_dataset(200), {"shuffle": False}),
        (Stream(make_dataset(200)), {}),
        ({"alone": make_dataset(200)}, {}),
        (MIXTURE | {"text": Stream(make_dataset(120, seed=1))}, {}),
        (SIZED, {"weights": "proportional"}),
        (MIXTURE, {"weights": WEIGHTS, "accumulate": 2}),
        (MIXTURE, {"weights": SCHEDULE}),
        (MIXTURE, {"weights": Mixing(weights=IN_TOKENS, by="tokens")}),
        (MIXTURE, {"weights": Mixing(stop="first_exhausted")}),
    ],
)
def test_the_samples_of_streams_and_mixtures_are_read_as_a_loader_does(dataset, options, tmp_path):
    options = {"window": 40, "seed": 3} | options
    expected = loader_steps(dataset, 2, token_budget=1500, **options)
    observe_lengths(dataset, process_fn=process, observe=observe).save(tmp_path / "lengths.npz")
    table = LengthTable.load(tmp_path / "lengths.npz")
    assert planned_steps(table, 2, 1500, **options) == expected


def test_known_lengths_are_planned_as_by_a_loader_that_has_them():
    lengths = lognormal_lengths(2_500, cv=1.0, mean_tokens=90, longest_tokens=700)
    data = [{"input_ids": np.ones(length, np.int64)} for length in lengths]
    for options in ({"window": 64}, {"window": "auto", "seed": 3}, {"shuffle": False}):
        loader = ODBDataLoader(data, lengths=lengths, token_budget=1500, **options)
        infos = [pop_step_info(batch) for batch in loader]
        for source in (lengths, LengthTable.of(lengths)):
            report = simulate(source, world_size=1, budget=1500, lengths_known=True, **options)
            assert report.steps == len(infos)
            assert report.padded_tokens == sum(info.local_padded_tokens for info in infos)


@pytest.mark.parametrize(
    "dataset", [{"a": make_dataset(30), "b": make_dataset(30)}, Stream(make_dataset(30))]
)
def test_what_no_loader_plans_ahead_is_no_plan_of_known_lengths(dataset):
    table = observe_lengths(dataset, process_fn=process, observe=observe)
    with pytest.raises(ValueError, match="`lengths_known` must be False for a mixture, a stream"):
        simulate(table, world_size=1, budget=1500, lengths_known=True)


def test_jobs_that_differ_in_seed_or_ranks_are_read_anew():
    epoch = TableEpoch(table=LengthTable.of(lognormal_lengths(300, cv=1.0)))
    for seed in (0, 1):
        for world_size in (1, 2):
            job = SimulationOptions(world_size=world_size, budget=16_384, seed=seed)
            alone = TableEpoch(table=epoch.table)
            assert [*epoch.steps(job)] == [*alone.steps(job)]


def test_some_samples_tell_about_the_steps_of_all():
    lengths = lognormal_lengths(40_000, cv=0.6)
    table = LengthTable.of(lengths)
    options = {"world_size": 8, "budget": 16_384, "window": 256}
    whole = simulate(table, **options)
    for seed in range(2):
        picked = np.random.default_rng(seed).permutation(len(lengths))[:512]
        estimate = simulate(table.rows(picked), **options)
        # Their mean has an error that no estimate can know of. Nothing else is off.
        ratio = lengths[picked].mean() / lengths.mean()
        assert estimate.steps / whole.steps == pytest.approx(ratio, rel=0.025)
        assert estimate.efficiency == pytest.approx(whole.efficiency, abs=0.02)
