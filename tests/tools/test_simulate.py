"""The simulator against real `RankAligner`s, one thread per rank."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import (
    LengthObserver,
    Loader,
    RankAligner,
    SampleError,
    ShardedSampler,
    TokenBudget,
    WindowBucketer,
)
from odb_nodes.alignment.exchange.in_process import InProcessHub
from odb_nodes.planning.group_costs import padded_tokens
from odb_nodes.tools.simulate import (
    lognormal_lengths,
    main,
    simulate,
    simulate_steps,
)

TIMEOUT_S = 20.0


def with_attention(group):
    longest = max(sample.tokens for sample in group)
    return longest * len(group) * (20 + longest)


def indices(step):
    """Of the samples of each rank; `None` where it fills, or has left."""
    return [group and [sample.data for sample in group] for group in step]


def real_steps(lengths, world_size, budget, window, dearest_first=0, **options):
    """The same as `indices` of all steps, taken by one `RankAligner` per rank."""
    hub = InProcessHub(world_size, TIMEOUT_S)

    def run(rank):
        shard = ShardedSampler(lengths, shuffle=False, rank=rank, world_size=world_size)
        samples = LengthObserver(shard, observe=lengths.__getitem__)
        bucketer = WindowBucketer(samples, budget, window, dearest_first=dearest_first)
        aligner = RankAligner(bucketer, hub.exchange(rank), timeout_s=TIMEOUT_S, **options)
        return [None if item.info.is_filler else item.samples for item in Loader(aligner)]

    with ThreadPoolExecutor(world_size) as pool:
        ranks = [pool.submit(run, rank) for rank in range(world_size)]
        return [indices(step) for step in zip_longest(*(rank.result(60) for rank in ranks))]


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
    "dearest_first": st.sampled_from([0, 0, 1, 5]),
    "round_size": st.integers(1, 40),
    "accumulate": st.integers(1, 5),
    "seed": st.integers(-9, 9),
    "cost_fn": st.sampled_from([None, padded_tokens, with_attention]),
}


def steps_of(lengths, **options):
    return list(simulate_steps(lengths, **options))


def planned_samples(lengths, budget):
    """Indices of the samples that a budget does not drop."""
    drop = budget.oversize == "drop"
    return [i for i, length in enumerate(lengths) if not (drop and budget.is_oversize(length))]


@given(**jobs, uneven=st.sampled_from(["fill", "join", "stop"]))
def test_the_steps_are_those_of_real_ranks(lengths, **options):
    # An epoch of which all is dropped is an error of the real ranks.
    shards = [lengths[rank :: options["world_size"]] for rank in range(options["world_size"])]
    if any(shard and not planned_samples(shard, options["budget"]) for shard in shards):
        options["budget"] = TokenBudget(options["budget"].tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of oversize and of unemitted samples
        expected = real_steps(lengths, **options)
    assert [indices(step) for step in steps_of(lengths, **options)] == expected


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_steps_are_those_of_real_ranks_over_many_rounds(accumulate):
    lengths = lognormal_lengths(3_000, cv=1.0).tolist()
    options = {"world_size": 8, "budget": 4096, "window": 64, "round_size": 16, "seed": 3}
    options |= {"accumulate": accumulate}
    expected = real_steps(lengths, **options)
    assert len(expected) > 4 + 8 + 16
    without_caps = steps_of(lengths, **options, cost_fn=padded_tokens)
    assert [indices(step) for step in without_caps] != expected
    assert [indices(step) for step in steps_of(lengths, **options)] == expected


# A first round has 4 steps, of one rank 1, and a short epoch does not wait for it.
@pytest.mark.parametrize(
    ("world_size", "mean_tokens", "first"), [(1, 600, 2), (3, 600, 4), (3, 300, 0)]
)
@pytest.mark.parametrize(
    "budget",
    [
        TokenBudget(8192, max_samples=20),
        TokenBudget(8192, layout="packed"),
        TokenBudget(8192, attention_tokens=1000),
    ],
    ids=["max_samples", "packed", "attention"],
)
def test_the_steps_are_those_of_real_ranks_where_the_window_grows(
    budget, world_size, mean_tokens, first
):
    lengths = lognormal_lengths(
        world_size * 2_500, cv=1.0, mean_tokens=mean_tokens, longest_tokens=2000
    ).tolist()
    options = {"world_size": world_size, "budget": budget}
    expected = real_steps(lengths, **options, window="auto")
    assert [indices(step) for step in steps_of(lengths, **options)] == expected  # the default
    fixed = [indices(step) for step in steps_of(lengths, **options, window=128)]
    changed = next(
        place
        for place, pair in enumerate(zip(expected, fixed, strict=False))
        if len({*map(str, pair)}) > 1
    )
    assert changed >= first if first else changed == 0


@given(**{**jobs, "world_size": st.integers(1, 40)}, uneven=st.sampled_from(["fill", "join"]))
def test_every_sample_is_planned_exactly_once(lengths, budget, world_size, **options):
    steps = steps_of(lengths, budget=budget, world_size=world_size, **options)
    planned = [index for step in steps for group in indices(step) for index in group or []]
    assert sorted(planned) == planned_samples(lengths, budget)
    for step in steps:
        assert len(step) == world_size
        for rank, group in enumerate(indices(step)):  # None gives samples away before the end.
            own = {index % world_size for index in group or []} <= {rank}
            assert own or options["uneven"] == "fill"


def test_a_report_by_hand():
    # Rank 0 has 4 x 5, which it splits in two, and 20; rank 1 has 10 + 9, 9 + 9 and 9. By cost:
    # 20 | 20, 10 | 18, 10 | 9.
    report = simulate([5, 10, 5, 9, 5, 9, 5, 9, 20, 9], world_size=2, budget=20, window=16)
    assert (report.steps, report.samples, report.real_tokens) == (3, 10, 86)
    assert (report.padded_tokens, report.filler_slots) == (20 + 20 + 10 + 18 + 10 + 9, 0)
    assert report.density == 86 / 87
    assert report.efficiency == 86 / (2 * (20 + 18 + 10))
    assert report.balance == 87 / (2 * (20 + 18 + 10))


def test_a_rank_that_fills_waits():
    report = simulate([20, 20, 20], world_size=2, budget=20)
    assert (report.steps, report.filler_slots, report.filler_share) == (2, 1, 0.25)
    assert (report.density, report.efficiency, report.filler_loss) == (1.0, 0.75, 0.25)


def test_attention_makes_long_groups_dearer():
    # 12,288 tokens cost twice what as many tokens of short samples cost, or nearly so.
    report = simulate([12_288, *[1] * 12_288], world_size=1, budget=12_288, window=20_000)
    assert report.attention_balance == 1.0
    lengths = [12_288 if index == 0 else 1 for index in range(2 * 12_287)]
    report = simulate(lengths[:2], world_size=2, budget=12_288)
    assert report.balance == (12_288 + 1) / 2 / 12_288
    assert report.attention_balance == pytest.approx((2 * 12_288 + 1 + 1 / 12_288) / 4 / 12_288)


def test_length_spread_runs_from_one_length_per_step_to_the_same_mix_in_all():
    assert simulate([5, 5, 20], world_size=1, budget=20).length_spread == 0.0
    assert simulate([5, 20, 5, 20], world_size=2, budget=20).length_spread == 1.0
    assert simulate([5] * 8, world_size=2, budget=5).length_spread == 1.0


def test_padding_is_counted_by_shape_and_groups_are_matched_by_cost():
    # Rows of 10, 20 and 40 tokens cost 15, 40 and 120. So 3 x 20 goes with 40, 4 x 10 with 5 x 10;
    # by their tokens, 3 x 20 would go with 5 x 10.
    lengths = [20, 40, 20, 10, 20, 10, 10, 10, 10, 10, 10, 10, 10]
    report = simulate(lengths, world_size=2, budget=TokenBudget(120, attention_tokens=20))
    assert (report.steps, report.padded_tokens, report.real_tokens) == (2, 190, 190)
    assert report.efficiency == 190 / (2 * (60 + 50))
    assert report.attention_balance == (120 + 120 + 60 + 75) / (2 * (120 + 75))


def test_padding_to_a_multiple_is_padding():
    report = simulate([3, 3], world_size=1, budget=TokenBudget(16, pad_to_multiple_of=8))
    assert (report.steps, report.padded_tokens) == (1, 16)


def test_shapes_are_counted():
    assert simulate([5, 5, 20, 20, 9, 9], world_size=1, budget=20).shapes == 3
    budget = TokenBudget(20, shapes=1)
    assert simulate([5, 5, 20, 20, 9, 9], world_size=1, budget=budget).shapes == 1


def test_packed_rows_hold_what_fits_and_attention_knows_their_samples():
    budget = TokenBudget(20, layout="packed")
    report = simulate([12, 8, 5, 15], world_size=1, budget=budget)
    assert (report.steps, report.padded_tokens, report.density) == (2, 40, 1.0)
    budget = TokenBudget(12_288, layout="packed")
    report = simulate([8_192, 6_144, 4_096, 6_144], world_size=2, budget=budget)
    assert (report.steps, report.balance) == (1, 1.0)
    costs = [12_288 + (8_192**2 + 4_096**2) / 12_288, 12_288 + 6_144]
    assert report.attention_balance == pytest.approx(sum(costs) / 2 / max(costs))


def test_the_figures_have_not_changed():
    """Golden: other steps of the same data would break every saved state."""
    lengths = lognormal_lengths(8 * 500, cv=1.0, seed=7)
    report = simulate(lengths, world_size=8, budget=16_384, window=64, seed=1)
    assert (report.steps, report.samples) == (30, 4_000)
    assert (report.real_tokens, report.padded_tokens, report.filler_slots) == (
        3_141_500,
        3_628_569,
        0,
    )


def test_the_order_of_steps_has_not_changed():
    steps = steps_of(range(3, 43), world_size=3, budget=100, window=8, seed=5)
    assert [indices(step) for step in steps[:3]] == [
        [[12, 15, 18, 21], [13, 16, 19, 22], [35, 38]],
        [[30, 33], [31, 34], [29, 32]],
        [[36, 39], [7, 10, 25], [17, 20, 23]],
    ]


def test_lengths_have_the_variation_asked_for():
    lengths = lognormal_lengths(100_000, cv=0.5, shortest_tokens=1, longest_tokens=10**6)
    assert lengths.mean() == pytest.approx(800, rel=0.01)
    assert lengths.std() / lengths.mean() == pytest.approx(0.5, rel=0.02)
    clipped = lognormal_lengths(1_000, cv=2.0, longest_tokens=900)
    assert (clipped.min(), clipped.max()) == (16, 900)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"lengths": []}, ValueError, "`lengths`"),
        ({"lengths": [3, 0]}, ValueError, "`lengths`"),
        ({"lengths": [[3]]}, ValueError, "`lengths`"),
        ({"lengths": [1.5]}, ValueError, "`lengths`"),
        ({"world_size": 0}, ValueError, "`world_size`"),
        ({"budget": 0}, ValueError, "`budget`"),
        ({"window": 0}, ValueError, "`window`"),
        ({"window": "Auto"}, ValueError, "`window`"),
        ({"round_size": 0}, ValueError, "`round_size`"),
        ({"accumulate": 1.5}, TypeError, "`accumulate`"),
        ({"uneven": "pad"}, ValueError, "`uneven`"),
        ({"cost_fn": lambda group: 0.5}, TypeError, "`cost_fn`"),
        ({"budget": TokenBudget(8, oversize="error")}, SampleError, "9 tokens"),
        ({"budget": TokenBudget(1, oversize="drop")}, ValueError, "no step"),
        ({"world_size": 3, "uneven": "stop"}, ValueError, "no step"),
    ],
)
def test_errors_name_what_is_wrong(change, error, words):
    options = {"lengths": [9, 4], "world_size": 2, "budget": 10, **change}
    with pytest.raises(error, match=words):
        simulate(**options)


def test_the_command_line_prints_a_line_for_each_combination(capsys):
    main(["--ranks", "2", "3", "--window", "8", "16", "--samples-per-rank", "50"])
    titles, rule, *lines = capsys.readouterr().out.splitlines()
    assert "efficiency" in titles and set(rule) == set("| -:")
    assert "extra padding" not in titles
    main(["--ranks", "2", "--samples-per-rank", "50", "--attention-tokens", "128"])
    with_attention = capsys.readouterr().out.splitlines()[2]
    main(["--ranks", "2", "--samples-per-rank", "50", "--row-sizes", "friendly"])
    friendly = capsys.readouterr().out.splitlines()[2]
    main(["--ranks", "2", "--samples-per-rank", "50"])
    assert len({with_attention, friendly, capsys.readouterr().out.splitlines()[2]}) == 3
    columns = [[cell.strip() for cell in line.split("|")[1:4]] for line in lines]
    assert columns == [["1.0", ranks, window] for ranks in "23" for window in ("8", "16")]


def test_the_command_line_says_what_bounded_shapes_cost(capsys):
    main(["--ranks", "1", "--window", "64", "--samples-per-rank", "2000", "--shapes", "12"])
    titles, _, line = capsys.readouterr().out.splitlines()
    cells = dict(
        zip(map(str.strip, titles.split("|")), map(str.strip, line.split("|")), strict=True)
    )
    assert int(cells["shapes"]) <= 12
    assert 3 < float(cells["extra padding"].rstrip("%")) < 40


@pytest.mark.parametrize("cv", [-1.0, float("nan"), float("inf")])
def test_a_variation_is_a_number(cv):
    with pytest.raises(ValueError, match="`cv` must be a number of at least 0"):
        lognormal_lengths(10, cv=cv)
