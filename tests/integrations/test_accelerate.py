"""Training loops of Accelerate with dynamic batches, on one rank and on two real ones."""

import gc
import json
import signal
import sys
import weakref
from pathlib import Path
from textwrap import dedent

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import accelerate_jobs as a  # noqa: E402
import language_models as lm  # noqa: E402
from accelerate import Accelerator  # noqa: E402
from accelerate.utils import GradientAccumulationPlugin  # noqa: E402
from ledgers import check_ledger  # noqa: E402
from memory_faults import above  # noqa: E402
from rank_jobs import RankJob, run_ranks  # noqa: E402
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

from odb_nodes import ODBDataLoader, StateError, load_rank_state  # noqa: E402
from odb_nodes.integrations.accelerate import configure_accelerator  # noqa: E402
from odb_nodes.memory import OomGuard  # noqa: E402

SIZE = 40
WARM = ("accelerate", "transformers", "odb_nodes.integrations.accelerate")
IMPORTS = f"import sys; sys.path.insert(0, {str(HERE)!r})\nimport accelerate_jobs as a\n"


def places_of(exhaustive):
    """After the first step, within an epoch, around its end, and at the very end; or all."""
    return None if exhaustive else lambda steps: [1, steps // 2 - 1, steps // 2, steps - 1]


def loader_of(accumulate=1, size=SIZE):
    return ODBDataLoader(lm.Texts(size), token_budget=64, window=12, accumulate=accumulate)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_guarded_loop_trains_as_one_of_accelerate_whose_memory_suffices(tmp_path, accumulate):
    ledger, folder = tmp_path / "ledger", tmp_path / "run"
    expected = a.train(tmp_path, model="Normalizing", accumulate=accumulate)
    options = {"accumulate": accumulate, "ledger": ledger}
    found, ooms = a.train_guarded(folder, above(40), save_at=2, **options)
    assert ooms > 0
    assert found == pytest.approx(expected, abs=1e-10)
    resumed, _ = a.train_guarded(folder, above(40), resume=folder / "step-2", **options)
    assert resumed == pytest.approx(expected, abs=1e-10)
    check_ledger(ledger, SIZE, attempts=2)


def test_a_guarded_loop_of_two_ranks_trains_as_one_of_accelerate(tmp_path):
    body = """
        from memory_faults import above
        folder = sys.argv[1]
        expected = a.train(folder, model="Normalizing", size=37, accumulate=2)
        options = {"size": 37, "accumulate": 2, "ledger": folder + "/ledger"}
        found, ooms = a.train_guarded(folder, above(40), **options)
        r.finish([float((found - expected).abs().max()), ooms])
    """
    results = run_ranks(tmp_path, IMPORTS + dedent(body), 2, str(tmp_path), warm=WARM)
    assert all(error < 1e-10 for error, _ in results)
    assert sum(ooms for _, ooms in results) > 0
    check_ledger(tmp_path / "ledger", 37, attempts=1)


def test_metrics_of_steps_that_a_guard_takes_are_no_figures():
    with configure_accelerator(Accelerator(cpu=True), loader_of()) as loader:
        guard = OomGuard(loader.loader)
        assert next(iter(guard)).infos
        assert loader.take_metrics() == {}
        with pytest.raises(TypeError, match="Pass the `.loader` of this `AcceleratedLoader`"):
            OomGuard(loader)


# --- one rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", ["Averaging", "Normalizing"])
def test_the_gradient_is_that_of_the_mean_over_all_tokens(tmp_path, model, accumulate):
    a.train(tmp_path, model=model, accumulate=accumulate)
    entries = lm.read(tmp_path / "train-0.jsonl")
    error, steps, _ = lm.check_steps([entries], SIZE, accumulate, may_be_short=True)
    assert error < 1e-12
    assert steps > 6
    if accumulate > 1:
        assert any(len(entry["ids"]) < accumulate for entry in entries)


@pytest.mark.parametrize("scale", ["none", "twice"])
def test_the_gradient_check_sees_another_scale(tmp_path, scale):
    a.train(tmp_path, accumulate=3, scale=scale)
    entries = lm.read(tmp_path / "train-0.jsonl")
    assert lm.check_steps([entries], SIZE, 3, may_be_short=True)[0] > 0.1


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, accumulate, exhaustive):
    a.resume_everywhere(tmp_path, places_of(exhaustive), accumulate=accumulate)


def test_saving_within_an_optimizer_step_is_refused(tmp_path):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    with configure_accelerator(accelerator, loader_of(3)) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(StateError, match="step 0 is micro-step 1 of 3"):
            accelerator.save_state(tmp_path)
        next(batches), next(batches)
        accelerator.save_state(tmp_path)
        next(batches)
        accelerator.load_state(tmp_path)
        accelerator.save_state(tmp_path)


def test_an_epoch_that_was_left_within_an_optimizer_step_disturbs_no_other():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    with configure_accelerator(accelerator, loader_of(3)) as loader:
        for most in (1, 1000):
            for number, batch in enumerate(loader, 1):
                info = a.pop_step_info(batch)
                with accelerator.accumulate(model):
                    assert accelerator.sync_gradients == info.ends_optimizer_step
                if number == most:
                    break


def test_another_accumulation_in_mid_run_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    with configure_accelerator(accelerator, loader_of(3)) as loader:
        batches = iter(loader)
        next(batches)
        accelerator.gradient_accumulation_steps = 2
        with pytest.raises(ValueError, match=r"`gradient_accumulation_steps` \(2\)"):
            next(batches)


def test_prepare_leaves_the_loader_as_it_is():
    accelerator = Accelerator(cpu=True)
    with configure_accelerator(accelerator, loader_of()) as loader:
        assert accelerator.prepare(loader) is loader
        assert sum(len(batch["id"]) for batch in loader) == SIZE
        assert loader.dataset is loader.loader.dataset


def test_a_checkpoint_of_another_configuration_says_how_to_load_it(tmp_path):
    def accelerated(window=12):
        loader = ODBDataLoader(lm.Texts(SIZE), token_budget=64, window=window)
        accelerator = Accelerator(cpu=True)
        return accelerator, configure_accelerator(accelerator, loader)

    accelerator, loader = accelerated()
    with loader:
        next(iter(loader))
        accelerator.save_state(tmp_path)
    accelerator, loader = accelerated(window=8)
    with loader:
        accelerator.load_state(tmp_path)
        with pytest.raises(StateError, match=r"`window` was 12 .* `loader.loader.load_state_dict"):
            next(iter(loader))
        loader.loader.load_state_dict(load_rank_state(tmp_path), strict=False)
        with pytest.warns(UserWarning, match="`window` was 12"):
            next(iter(loader))


def test_a_checkpoint_from_before_the_loader_says_how_to_begin_with_it(tmp_path):
    Accelerator(cpu=True).save_state(tmp_path)
    accelerator = Accelerator(cpu=True)
    with configure_accelerator(accelerator, loader_of()):
        with pytest.raises(FileNotFoundError, match="call `load_state` before"):
            accelerator.load_state(tmp_path)
    accelerator = Accelerator(cpu=True)
    accelerator.load_state(tmp_path)
    with configure_accelerator(accelerator, loader_of()) as loader:
        assert sum(len(batch["id"]) for batch in loader) == SIZE


def test_a_length_that_nobody_knows_is_an_error_that_says_what_to_do():
    with configure_accelerator(Accelerator(cpu=True), loader_of()) as loader:
        with pytest.raises(TypeError, match="Measure progress in samples"):
            len(loader)


def test_what_does_not_go_together_is_refused():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(TypeError, match="must be an `ODBDataLoader`"):
        configure_accelerator(accelerator, [1, 2])
    with pytest.raises(ValueError, match=r"`gradient_accumulation_steps` \(2\)"):
        configure_accelerator(accelerator, loader_of(3))
    with configure_accelerator(accelerator, loader_of(2)):
        with pytest.raises(ValueError, match="must have one configured loader"):
            configure_accelerator(accelerator, loader_of(2))
    configure_accelerator(accelerator, loader_of(2)).close()
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    with pytest.raises(ValueError, match="`sync_with_dataloader` must be True"):
        configure_accelerator(
            Accelerator(cpu=True, gradient_accumulation_plugin=plugin), loader_of(2)
        )
    Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1))


def test_an_accelerator_is_not_kept_by_its_loader():
    accelerator = Accelerator(cpu=True)
    configure_accelerator(accelerator, loader_of())
    reference = weakref.ref(accelerator)
    del accelerator
    gc.collect()
    assert reference() is None


def test_metrics_go_to_tensorboard(tmp_path):
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    with configure_accelerator(accelerator, loader_of()) as loader:
        for step, _ in enumerate(loader, 1):
            accelerator.log(loader.take_metrics(), step=step)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert {
        "odb/padding_share",
        "odb/rank_balance",
        "odb/filler_share",
        "odb/data_wait_share",
        "odb/real_tokens_per_step",
        "odb/real_tokens_per_s",
        "odb/samples_per_step",
    } <= {*events.Tags()["scalars"]}
    assert sum(scalar.value for scalar in events.Scalars("odb/samples_per_step")) == SIZE


# --- two ranks ------------------------------------------------------------------------------------


def test_two_ranks_resume_exactly_with_the_gradient_of_one(tmp_path, exhaustive):
    body = """
        places = None if sys.argv[2] == "True" else lambda steps: [1, steps // 2, steps - 1]
        found = []
        for accumulate, size, budget in ((1, 5, 4), (3, 37, 64)):
            folder = f"{sys.argv[1]}/{accumulate}"
            options = dict(accumulate=accumulate, size=size, token_budget=budget)
            entries = r.gathered(a.resume_everywhere(folder, places, **options))
            check = a.language_models.check_steps
            found.append(check(entries, size, accumulate, may_be_short=True))
        r.finish(found)
    """
    arguments = str(tmp_path), str(exhaustive)
    options = {"timeout_s": 250, "warm": WARM}
    first, second = run_ranks(tmp_path, IMPORTS + dedent(body), 2, *arguments, **options)
    assert first == second
    assert all(error < 1e-12 for error, *_ in first)
    (*_, fillers), _ = first
    assert fillers


def test_two_killed_ranks_go_on_from_their_last_checkpoint(tmp_path):
    def job(name, **options):
        given = {"folder": str(tmp_path / "run"), "name": name, "accumulate": 2, **options}
        options = {"init": False, "warm": WARM}
        return RankJob(tmp_path, IMPORTS + "a.main()", 2, json.dumps(given), **options)

    with job("whole") as whole:
        expected = [json.loads(out.splitlines()[-1]) for out in whole.finish(200)]
    ledger = str(tmp_path / "ledger")
    with job("killed", save_every=2, kill_at=3, ledger=ledger) as killed:
        assert [code for code, *_ in killed.results(200)] == [-signal.SIGKILL] * 2
    with job("resumed", resume=str(tmp_path / "run" / "step-2"), ledger=ledger) as resumed:
        assert [json.loads(out.splitlines()[-1]) for out in resumed.finish(200)] == expected
    for rank in range(2):
        whole, rest = (
            [entry["ids"] for entry in lm.read(tmp_path / "run" / f"{name}-{rank}.jsonl")]
            for name in ("whole", "resumed")
        )
        assert rest == whole[2:]
    check_ledger(ledger, SIZE, attempts=2)
