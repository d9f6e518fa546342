"""The simulator against real `RankAligner`s, one thread per rank."""

import warnings
from concurrent.futures import ThreadPoolExecutor

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
    """Of the samples of each rank; `None` where it fills."""
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
        return [indices(step) for step in zip(*(rank.result(60) for rank in ranks), strict=True)]


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


# A first round has 4 steps, of one rank 1, and a short epoch does not wait for it.
@pytest.mark.parametrize(
    ("world_size", "mean_tokens", "first", "more"),
    [
        (1, 600, 2, {"max_samples": 20}),
        (3, 600, 4, {"layout": "packed"}),
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
    changed = [str(one) != str(other) for one, other in zip(expected, fixed, strict=False)]
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
    (([12_288, *[1] * 12_288], 1, LONG), {"attention_balance": 1.0}),
    (([12_288, 1], 2, LONG), {"balance": 12_289 / 2 / 12_288}),
    (([12_288, 1], 2, LONG), {"attention_balance": (24_577 + 1 / 12_288) / 4 / 12_288}),
    # From one length per step to the same mix in all.
    (([5, 5, 20], 1, 20), {"length_spread": 0.0}),
    (([5, 20, 5, 20], 2, 20), {"length_spread": 1.0}),
    (([5] * 8, 2, 5), {"length_spread": 1.0}),
    # Rows of 10, 20 and 40 tokens cost 15, 40 and 120. So 3 x 20 goes with 40, 4 x 10 with 5 x 10;
    # by their tokens, 3 x 20 would go with 5 x 10.
    (
        ([20, 40, 20, 10, 20, *[10] * 8], 2, TokenBudget(120, attention_tokens=20)),
        {"steps": 2, "padded_tokens": 190, "real_tokens": 190}
        | {"efficiency": 190 / (2 * (60 + 50)), "attention_balance": 375 / (2 * (120 + 75))},
    ),
    (([3, 3], 1, TokenBudget(16, pad_to_multiple_of=8)), {"steps": 1, "padded_tokens": 16}),
    (([5, 5, 20, 20, 9, 9], 1, 20), {"shapes": 3}),
    (([5, 5, 20, 20, 9, 9], 1, TokenBudget(20, shapes=1)), {"shapes": 1}),
    # Packed rows hold what fits, and attention knows their samples.
    (([12, 8, 5, 15], 1, PACKED), {"steps": 2, "padded_tokens": 40, "density": 1.0}),
    (
        ([8_192, 6_144, 4_096, 6_144], 2, LONG_PACKED),
        {"balance": 1.0, "attention_balance": (PACKED_COST + 18_432) / 2 / PACKED_COST},
    ),
]


@pytest.mark.parametrize(("job", "expected"), BY_HAND)
def test_a_report_by_hand(job, expected):
    lengths, world_size, budget = job
    report = simulate(lengths, world_size=world_size, budget=budget, window=20_000)
    assert {name: getattr(report, name) for name in expected} == pytest.approx(expected)


def test_the_steps_have_not_changed():
    """Golden: other steps of the same data would break every saved state."""
    lengths = lognormal_lengths(8 * 500, cv=1.0, seed=7)
    report = simulate(lengths, world_size=8, budget=16_384, window=64, seed=1)
    assert (report.steps, report.real_tokens, report.padded_tokens) == (30, 3_141_500, 3_628_569)
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
        ({"lengths": [1.5]}, ValueError, "`lengths`"),
        ({"world_size": 0}, ValueError, "`world_size`"),
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


@pytest.mark.parametrize("cv", [-1.0, float("nan"), float("inf")])
def test_a_variation_is_a_number(cv):
    with pytest.raises(ValueError, match="`cv` must be a number of at least 0"):
        lognormal_lengths(10, cv=cv)


def test_the_command_line_prints_a_line_for_each_combination(capsys):
    def printed(*options):
        main(["--samples-per-rank", "50", *options])
        titles, rule, *lines = capsys.readouterr().out.splitlines()
        assert set(rule) == set("| -:")
        cells = [[cell.strip() for cell in line.split("|")] for line in (titles, *lines)]
        return [dict(zip(cells[0], line, strict=True)) for line in cells[1:]]

    found = printed("--ranks", "2", "3", "--window", "8", "16")
    assert [(one["ranks"], one["window"]) for one in found] == [
        (ranks, window) for ranks in "23" for window in ("8", "16")
    ]
    assert "efficiency" in found[0] and "extra padding" not in found[0]
    options = [[], ["--attention-tokens", "128"], ["--row-sizes", "friendly"]]
    assert len({str(printed("--ranks", "2", *one)) for one in options}) == 3
    (bounded,) = printed("--ranks", "1", "--samples-per-rank", "2000", "--shapes", "12")
    assert int(bounded["shapes"]) <= 12 and 3 < float(bounded["extra padding"].rstrip("%")) < 40
