from dataclasses import replace

import numpy as np
import pytest
import torch
from refusals import refuses
from step_logs import TRUE, write_log, write_records

from odb_nodes import ODBDataLoader, TokenBudget
from odb_nodes.core.planning import SimulationOptions, StepTime
from odb_nodes.core.sources import Mixing
from odb_nodes.integrations.learning_rate import LrScaling
from odb_nodes.tools.lengths import LengthTable
from odb_nodes.tools.simulate import TableEpoch, lognormal_lengths, simulate
from odb_nodes.tools.tune import AS_FAST, Choice, outcome_of, tune
from odb_nodes.training.monitor import fitted_step_time

LENGTHS = lognormal_lengths(1_200, cv=1.0, mean_tokens=90, longest_tokens=700)
TABLE = LengthTable.of(LENGTHS)


@pytest.fixture(scope="module")
def tuned():
    return tune(TABLE, world_size=2, limit=3000)


def outcome(lengths, time, world_size=1, accumulate=1, window=4, budget=20):
    epoch = TableEpoch(table=LengthTable.of(lengths), shuffle=False)
    job = SimulationOptions(world_size=world_size, budget=budget)
    budget = TokenBudget.of(budget)
    choice = Choice(budget=budget, window=window, accumulate=accumulate, round_size=32)
    time = StepTime(**dict(zip(("base", "tokens", "squares"), time, strict=True)))
    return outcome_of(choice, epoch=epoch, job=job, step_time=time)


def test_an_outcome_by_hand():
    # One rank, in order: 10 9 | 8 8, of 2 rows each.
    time = 1.0, 0.1, 0.01
    figures = outcome([10, 8, 9, 8], time, accumulate=2)
    assert figures.epoch_s == pytest.approx(1 + 2 + 2 + 1 + 1.6 + 1.28)
    assert (figures.steps, figures.balance, figures.samples_per_step) == (2, 1.0, 4.0)
    assert figures.padding_share == pytest.approx(1 / 36)
    assert (figures.replayed_samples, figures.held_samples) == (4, 4)  # all that there are
    figures = outcome([10, 8, 9, 8] * 9, time, accumulate=2)
    assert figures.replayed_samples == 4 + 12  # the pool, and a round of six steps
    assert figures.held_samples == 16 + 4 + 4 * 2  # in flight; four batches ahead
    # In a packed row, samples attend to themselves; a step takes as long as its slowest rank.
    packed = TokenBudget(7, layout="packed")
    assert outcome([3, 4], (0.0, 1e-9, 1.0), budget=packed).epoch_s == pytest.approx(9 + 16)
    figures = outcome([10, 4], (0.0, 1.0, 0.0), world_size=2, budget=10)
    assert (figures.epoch_s, figures.balance) == (10.0, 0.7)


def test_what_is_held_bounds_what_a_real_restore_makes_again(tuned):
    dataset = [{"input_ids": [1] * length} for length in LENGTHS.tolist()]
    outcome = tune(TABLE, world_size=1, limit=3000).best
    options = {"token_budget": outcome.choice.budget, "window": outcome.choice.window}
    loader = ODBDataLoader(dataset, accumulate=outcome.choice.accumulate, **options)
    states = [loader.state_dict() for _ in loader]
    assert len(states) == outcome.steps
    replayed = []
    for state in states[:: len(states) // 4]:
        resumed = ODBDataLoader(dataset, accumulate=outcome.choice.accumulate, **options)
        resumed.load_state_dict(state)
        iter(resumed)
        replayed.append(resumed.replayed_samples)
    assert 0.5 * outcome.replayed_samples < max(replayed)
    assert max(replayed) <= outcome.replayed_samples + 40  # and the group after the round


def test_an_optimizer_step_has_the_tokens_that_are_asked_for(tuned):
    pairs = {(outcome.choice.budget.tokens, outcome.choice.accumulate) for outcome in tuned.tried}
    assert pairs == {(3000, 1), (1500, 2), (750, 4)}
    more = tune(TABLE, world_size=2, limit=3000, tokens_per_step=16_000)
    pairs = {(outcome.choice.budget.tokens, outcome.choice.accumulate) for outcome in more.tried}
    assert pairs == {(2667, 3), (1334, 6)}


def test_the_front_holds_what_is_best_in_something_and_the_best_holds_least(tuned):
    assert len({str(outcome.choice) for outcome in tuned.tried}) == len(tuned.tried) <= 100
    for outcome in tuned.front:
        assert not any(other.dominates(outcome) for other in tuned.tried)
    for outcome in tuned.tried:
        assert any(o.objectives == outcome.objectives or o.dominates(outcome) for o in tuned.front)
    assert len({outcome.objectives for outcome in tuned.front}) == len(tuned.front)
    fastest = min(outcome.epoch_s for outcome in tuned.tried)
    near = [outcome for outcome in tuned.front if outcome.epoch_s <= (1 + AS_FAST) * fastest]
    assert tuned.best in near
    assert tuned.best.held_samples == min(outcome.held_samples for outcome in near)
    assert tuned.why.startswith(f"{len(tuned.tried)} choices tried. Listed: those that no other")
    assert f"held and replay ({len(tuned.front)}). The arrow marks the one" in tuned.why
    assert f"of the shortest time ({len(near)}). Times are estimates (assumed" in tuned.why
    samples = round(32 * tuned.best.choice.budget.tokens / LENGTHS.mean())
    assert f'`window="auto"` comes to {min(max(samples, 128), 4096):,} samples' in tuned.why


def test_the_code_keeps_weights_and_seed(tuned):
    assert "weights" not in tuned.code() and "seed" not in tuned.code()
    sources = np.arange(1_200) % 2
    mixed = replace(TABLE, sources=sources, names=("a", "b"), sizes=(600, 600))
    datasets = {name: [{"input_ids": [1]}] * 8 for name in "ab"}
    for weights in ({"a": 1, "b": 3}, Mixing(weights={"a": 1, "b": 3}, stop="cycle")):
        code = tune(mixed, world_size=1, limit=3000, weights=weights, seed=5).code()
        assert "data_seed=5`" in code
        names = {"dataset": datasets, "ODBDataLoader": ODBDataLoader, "Mixing": Mixing}
        exec(code.partition("\n")[0], names)
        assert names["loader"].options.weights == weights
        assert names["loader"].options.seed == 5


def test_what_the_limit_drops_is_dropped_by_all_choices():
    limit = TokenBudget(500, oversize="drop")
    tuned = tune(TABLE, world_size=1, limit=limit, tokens_per_step=3000)
    assert {outcome.choice.budget.oversize for outcome in tuned.tried} == {"drop"}
    kept = int((LENGTHS <= 500).sum())
    assert 0 < kept < len(LENGTHS)
    for outcome in tuned.tried:
        report = simulate(TABLE, world_size=1, **vars(outcome.choice))
        assert (report.samples, report.steps) == (kept, outcome.steps)
    with pytest.raises(ValueError, match="drops them all"):
        tune(TABLE, world_size=1, limit=TokenBudget(1, oversize="drop"))


@pytest.mark.parametrize("squares", [3e-5, 1 / 2500, 0.4, 1.0, 2.0, 1e-300])
def test_the_code_has_every_time_of_a_step(tuned, squares):
    step_time = StepTime(squares=squares)
    code = replace(tuned, job=replace(tuned.job, step_time=step_time)).code()
    assert eval(code.partition("step_time=")[2].partition(")")[0] + ")") == step_time


def test_the_code_that_is_printed_runs(tuned):
    from odb_nodes.integrations.huggingface import ODBConfig

    dataset = [{"input_ids": torch.ones(int(length), dtype=torch.long)} for length in LENGTHS[:64]]
    names = {
        "dataset": dataset,
        "ODBDataLoader": ODBDataLoader,
        "ODBConfig": ODBConfig,
        "LrScaling": LrScaling,
        "TokenBudget": TokenBudget,
    }
    packed = tune(TABLE, world_size=1, limit=TokenBudget(1500, layout="packed", max_samples=30))
    for tuning in (tuned, packed):
        assert tuning.code() in str(tuning)
        exec(tuning.code(), names)
        choice = tuning.best.choice
        assert names["loader"].options.budget == choice.budget == names["config"].budget
        assert names["loader"].options.window == choice.window == names["config"].window
        assert names["loader"].accumulate == choice.accumulate
        expected = round(tuning.best.samples_per_step)
        assert names["config"].lr_scaling == LrScaling(reference_samples=expected, rule="sqrt")


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_with_a_log_the_choices_are_planned_by_the_fitted_time(tmp_path, layout):
    log = tmp_path / "steps.jsonl"
    write_log(log, 100)
    options = {"limit": TokenBudget(3000, layout=layout), "round_size": 16}
    fitted = tune(TABLE, world_size=2, log=log, **options)
    half_at = round(TRUE.tokens / TRUE.squares)
    step_time = StepTime(squares=1 / half_at)
    assert fitted.job.step_time == step_time
    assert f", step_time=StepTime(squares=1 / {half_at})" in fitted.code()
    assert fitted.step_time.tokens == pytest.approx(TRUE.tokens)
    assert "fitted to 100 steps" in fitted.why and "planned with the fitted time" in fitted.why
    assert ("samples of one length" in fitted.why) == (layout == "padded")
    for outcome in fitted.tried[::9]:
        report = simulate(TABLE, world_size=2, step_time=step_time, **vars(outcome.choice))
        assert (outcome.steps, outcome.padding_share) == (
            report.steps,
            pytest.approx(report.padding_share),
        )
    # What the caller gives counts, and a lone rank waits for none.
    chosen = tune(TABLE, world_size=2, log=log, step_time=StepTime(squares=0.5, base=2), **options)
    assert chosen.job.step_time == StepTime(squares=0.5, base=2)
    assert ", step_time=StepTime(squares=1 / 2, base=2.0)" in chosen.code()
    alone = tune(TABLE, world_size=1, log=log, **options)
    assert alone.job.step_time is None and "step_time" not in alone.code()
    assert "planned with the fitted time" not in alone.why + chosen.why


@pytest.mark.slow
def test_of_a_large_dataset_some_samples_are_drawn_and_skipped_ones_do_not_count():
    lengths = lognormal_lengths(60_000, cv=1.0, mean_tokens=90, longest_tokens=700)
    whole = LengthTable.of(lengths)
    tuned = tune(whole, world_size=1, limit=6_000)
    steps = simulate(whole, world_size=1, **vars(tuned.best.choice)).steps
    assert tuned.best.steps == pytest.approx(steps, rel=0.05)
    table = replace(TABLE, tokens=np.where(np.arange(1_200) % 2, TABLE.tokens, 0))
    tuned = tune(table, world_size=1, limit=3000)
    assert tuned.best.steps == simulate(table, world_size=1, **vars(tuned.best.choice)).steps


def test_a_log_with_a_negative_time_names_line_and_value(tmp_path):
    log = tmp_path / "steps.jsonl"
    write_log(log, 20)
    lines = log.read_text().splitlines()
    lines[2] = '{"rows": 4, "width": 100, "step_s": -0.5}'
    log.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"`step_s` in line 3 of .*-0\.5"):
        tune(TABLE, world_size=1, log=log)
    lines[2] = '{"rows": 4, "width": 100, "step_s": 0.5, "squares": NaN}'
    log.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=r"`squares` in line 3 of .*nan"):
        tune(TABLE, world_size=1, log=log)


test_errors_name_what_is_wrong = refuses(
    [
        ({"limit": 500}, ValueError, "`limit` must hold the longest sample, which costs 700"),
        ({"limit": 0}, ValueError, "`limit`"),
        ({"world_size": 0}, ValueError, "`world_size`"),
        ({"tokens_per_step": 1_000}, ValueError, "`tokens_per_step` must be in 1400.."),
        ({"log": "nowhere.jsonl"}, FileNotFoundError, "nowhere"),
    ],
    lambda options: tune(TABLE, **{"world_size": 2, **options}),
)


# --- the times of micro-steps ---------------------------------------------------------------------

BUDGET = 16_384


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout", "window", "every"), [(1, "padded", 1024, 1), (8, "packed", 128, 10)]
)
def test_a_run_under_one_budget_tells_the_times_under_smaller_ones(
    tmp_path, ranks, layout, window, every
):
    """Its batches are all full, so that a step's constant cannot be seen, and times are noisy."""
    job = SimulationOptions(world_size=ranks, budget=BUDGET, window=window)
    lengths = lognormal_lengths(24_000, cv=1.0)
    budget = TokenBudget(BUDGET, layout=layout)
    batches = TableEpoch(table=LengthTable.of(lengths)).batches(replace(job, budget=budget))
    tokens, squares = batches.padded, batches.squares
    seconds = TRUE.seconds_of(tokens, squares).max(axis=1)
    seconds *= np.random.default_rng(0).normal(1, 0.02, len(tokens))
    write_records(tmp_path, seconds, tokens, squares, every=every)
    fitted, origin = fitted_step_time(tmp_path)
    assert "too much alike" in origin
    epoch = TableEpoch(table=LengthTable.of(lengths[:8_000]))
    for smaller in (BUDGET, BUDGET // 2, BUDGET // 4):
        choice = Choice(
            budget=TokenBudget(smaller, layout=layout), window=window, accumulate=1, round_size=32
        )
        epoch_s, expected = (
            outcome_of(choice, epoch=epoch, job=job, step_time=step_time).epoch_s
            for step_time in (fitted, TRUE)
        )
        assert epoch_s == pytest.approx(expected, rel=0.15)
