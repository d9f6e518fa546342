"""Lightning alone: hooks that save, counters of its loops, and modules of many kinds."""

from pathlib import Path
from types import SimpleNamespace

import language_models as lm
import pytest
import torch
import trainers
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.tuner import Tuner
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from odb_nodes import ODBDataLoader, StateError, pop_step_info
from odb_nodes.integrations.lightning import ODBCallback, ODBDataModule
from odb_nodes.integrations.lightning.callback import _check_guard
from odb_nodes.training.tasks import TaskWeights

pytestmark = [
    pytest.mark.filterwarnings(trainers.OF_LIGHTNING),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`:UserWarning"),
]

SIZE, TOLERANCE = 40, 1e-12


class SaveEverywhere(Callback):
    """Saves at every hook around a batch and an epoch, before other callbacks see it or after."""

    def __init__(self, folder):
        self.folder, self.paths = Path(folder), []

    def save(self, trainer, *_):
        self.paths.append(str(self.folder / f"{len(self.paths):03d}.ckpt"))
        trainer.save_checkpoint(self.paths[-1])

    on_train_start = on_train_epoch_start = on_train_batch_start = save
    on_train_batch_end = on_train_epoch_end = on_train_end = save


def data(size=SIZE, **options):
    return ODBDataModule(lm.Texts(size), **{"token_budget": 64, "window": 12, **options})


def loader_of(**options):
    return ODBDataLoader(lm.Texts(SIZE), **{"token_budget": 64, "window": 12, **options})


def fit(*callbacks, module=None, checkpoint=None, odb=None, datamodule=None, **options):
    """Train, and return the module and its trainer."""
    module = module or trainers.Module()
    odb = [ODBCallback()] if odb is None else odb
    trainer = trainers.lightning_trainer(*callbacks, *odb, **options)
    trainer.fit(module, datamodule=datamodule or data(), ckpt_path=checkpoint)
    return module, trainer


def check_resumed(whole, resumed):
    """The rest of a run is what the whole run had from there on. Returns its batches."""
    (whole, trainer), (resumed, its_trainer) = whole, resumed
    assert its_trainer.global_step == trainer.global_step
    assert resumed.seen == whole.seen[len(whole.seen) - len(resumed.seen) :]
    difference = lm.weights_of(resumed.model) - lm.weights_of(whole.model)
    assert difference.abs().max() <= TOLERANCE
    return len(resumed.seen)


def gradient_error(module):
    """The largest of any step; of a module whose weights have not changed."""
    weights = lm.weights_of(module.model)
    pairs = zip(module.gradients, module.groups(), strict=True)
    errors = [
        (gradient - lm.expected_gradient(weights, ids)).abs().max() for gradient, ids in pairs
    ]
    return max(errors)


# --- the loss -------------------------------------------------------------------------------------


class Weighing(trainers.Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.odb.step_info.loss_scale


class Manual(trainers.Module):
    def __init__(self, **options):
        super().__init__(**options)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        if self.odb.step_info.ends_optimizer_step:
            self.optimizers().step()
            self.optimizers().zero_grad()


def test_a_module_that_weighs_by_the_step_info_does_not_weigh_twice():
    module, _ = fit(module=Weighing(lr=0.0), max_epochs=1, accumulate_grad_batches=3)
    assert gradient_error(module) <= TOLERANCE


def test_manual_optimization_is_exact_too():
    module, callback = Manual(lr=0.0), ODBCallback()
    module.train_dataloader = lambda: callback.batches(loader_of(accumulate=3))
    trainers.lightning_trainer(callback, max_epochs=1).fit(module)
    assert gradient_error(module) <= TOLERANCE


# --- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False], ids=["saved before us", "saved after us"])
@pytest.mark.parametrize(
    ("accumulate", "end"), [(1, {"max_steps": 17}), (3, {"max_epochs": 2}), (3, {"max_steps": 7})]
)
def test_a_run_resumes_exactly_from_every_hook_that_can_save(
    accumulate, end, before, tmp_path, exhaustive
):
    save = SaveEverywhere(tmp_path)
    odb = [save, ODBCallback()] if before else [ODBCallback(), save]
    options = {"accumulate_grad_batches": accumulate, **end}
    whole = fit(odb=odb, **options)
    assert len(save.paths) >= 30
    # Neighbours of each kind of place in turn.
    for path in save.paths if exhaustive else save.paths[before::11] + save.paths[-3:]:
        check_resumed(whole, fit(checkpoint=path, **options))


def test_a_run_that_has_ended_goes_on_with_more_steps(tmp_path, exhaustive):
    options = {"accumulate_grad_batches": 3}
    whole = fit(max_steps=9, **options)
    for steps in range(1, 9) if exhaustive else (2, 5):
        save = SaveEverywhere(tmp_path)
        first, _ = fit(save, max_steps=steps, **options)
        for path in save.paths[-3:]:  # after the last batch, its epoch, and the run
            steps_after = check_resumed(whole, fit(checkpoint=path, max_steps=9, **options))
            assert len(first.seen) + steps_after == len(whole[0].seen)


def test_a_second_fit_begins_the_next_epoch_and_resumes_too(tmp_path):
    options = {"accumulate_grad_batches": 3}
    once, _ = fit(max_epochs=2, **options)
    save, twice = SaveEverywhere(tmp_path), trainers.Module()
    trainer = trainers.lightning_trainer(save, ODBCallback(), max_epochs=1, **options)
    trainer.fit(twice, datamodule=data())
    trainer.fit_loop.max_epochs = 2
    first = len(save.paths)
    trainer.fit(twice, datamodule=data())
    assert twice.seen == once.seen  # not the weights: Lightning makes another optimizer
    for path in save.paths[first + 2 :: 7]:
        check_resumed((twice, trainer), fit(checkpoint=path, max_epochs=2, **options))


def test_what_an_exception_saves_resumes_exactly(tmp_path):
    class Failing(trainers.Module):
        fails_at = 0

        def training_step(self, batch, batch_idx):
            if len(self.seen) == self.fails_at:
                raise KeyboardInterrupt
            return super().training_step(batch, batch_idx)

    class SaveAtException(Callback):
        def on_exception(self, trainer, *_):
            trainer.save_checkpoint(tmp_path / "exception.ckpt")

    options = {"max_epochs": 2, "accumulate_grad_batches": 3}
    whole = fit(**options)
    for fails_at in range(0, len(whole[0].seen), 6):
        failing = Failing()
        failing.fails_at = fails_at
        with pytest.raises(SystemExit):
            fit(SaveAtException(), module=failing, **options)
        resumed = fit(checkpoint=str(tmp_path / "exception.ckpt"), **options)
        begun_at = len(whole[0].seen) - check_resumed(whole, resumed)
        assert begun_at <= fails_at < begun_at + 3


class Validating(trainers.Module):
    """Drops some of its loss at random."""

    def __init__(self):
        super().__init__(dropout=0.3)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.model(**batch)["loss"], batch_size=1)


class ValidatedData(ODBDataModule):
    def val_dataloader(self):
        samples = [
            {key: torch.as_tensor(value)[None] for key, value in sample.items()}
            for sample in lm.Texts(3)[:]
        ]
        return DataLoader(samples, batch_size=None, generator=torch.Generator())


@pytest.mark.parametrize(
    ("every", "end"), [(4, {"max_steps": 17}), (4, {"max_epochs": 2}), (1.0, {"max_epochs": 2})]
)
def test_checkpoints_of_validations_resume_exactly_with_the_same_random_numbers(
    every, end, tmp_path
):
    def run(checkpoint=None):
        saver = ModelCheckpoint(tmp_path, monitor="val_loss", save_top_k=-1)
        options = {"val_check_interval": every, "num_sanity_val_steps": 1, **end}
        valid = ValidatedData(lm.Texts(SIZE), token_budget=64, window=12)
        options |= {"enable_checkpointing": True, "datamodule": valid}
        return fit(saver, module=Validating(), checkpoint=checkpoint, **options)

    whole = run()
    paths = sorted(map(str, tmp_path.glob("*.ckpt")))
    assert len(paths) >= 2
    for path in paths[::2]:
        torch.manual_seed(99)
        check_resumed(whole, run(path))


def test_the_estimate_of_steps_does_not_disturb_a_restore(tmp_path):
    class Scheduled(trainers.Module):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.estimated = self.trainer.estimated_stepping_batches
            steps = self.trainer.datamodule.estimated_steps()
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    save = SaveEverywhere(tmp_path)
    options = {"max_epochs": 2, "max_steps": 11, "accumulate_grad_batches": 2}
    whole = fit(save, module=Scheduled(), **options)
    assert whole[0].estimated == 11
    for path in save.paths[::9]:
        check_resumed(whole, fit(checkpoint=path, module=Scheduled(), **options))


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    save = SaveEverywhere(tmp_path)
    fit(save, max_steps=3)
    path = save.paths[-1]
    before = torch.load(save.paths[4], weights_only=True)["odb_nodes"]
    for change, message in (
        (lambda states: None, "saved without `ODBCallback`"),
        (lambda states: states + before, "the states of the run were saved at different steps"),
    ):
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["odb_nodes"] = change(checkpoint["odb_nodes"])
        torch.save(checkpoint, changed := str(tmp_path / "changed"))
        with pytest.raises(StateError, match=message):
            fit(checkpoint=changed, max_steps=5)
    with pytest.raises(StateError, match=r"`seed` was 0 .* leave out `ckpt_path`"):
        fit(checkpoint=path, datamodule=data(seed=5), max_steps=5)


def test_evaluation_needs_no_states(tmp_path):
    tested = []

    class Testing(trainers.Module):
        def test_step(self, batch, batch_idx):
            tested.append(batch)

    fit(save := SaveEverywhere(tmp_path), max_steps=2)
    loader = DataLoader([1], batch_size=None)
    trainer = trainers.lightning_trainer(ODBCallback())
    trainer.test(Testing(), loader, ckpt_path=save.paths[-1], verbose=False)
    assert tested == [1]


# --- what is refused ------------------------------------------------------------------------------


class Popping(trainers.Module):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * pop_step_info(batch).loss_scale


class Unweighed(Manual):
    def manual_backward(self, loss):
        loss.backward()


class Leaving(trainers.Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


def with_batches(make, **options):
    """Train on what a function makes of a callback."""

    def run():
        module, callback = trainers.Module(), ODBCallback()
        module.train_dataloader = lambda: make(callback)
        trainers.lightning_trainer(callback, max_epochs=1, **options).fit(module)

    return run


REFUSALS = {
    "popped": (lambda: fit(module=Popping()), KeyError, "popped before"),
    "unweighed": (lambda: fit(module=Unweighed()), RuntimeError, r"`self.manual_backward\(loss\)`"),
    "left": (lambda: fit(module=Leaving(), max_epochs=2), RuntimeError, "left before its end"),
    "no callback": (lambda: fit(odb=[]), RuntimeError, "must have one `ODBCallback`, but has 0"),
    "no batches": (
        with_batches(lambda _: DataLoader([*lm.Texts(4)[:]], batch_size=None)),
        RuntimeError,
        "`ODBCallback` has no batches",
    ),
    "a list": (with_batches(lambda odb: [odb.batches(loader_of())]), ValueError, "must return one"),
    "made before": (
        lambda: trainers.lightning_trainer(odb := ODBCallback()).fit(
            trainers.Module(), odb.batches(loader_of())
        ),
        RuntimeError,
        "A loader made before `fit`",
    ),
    "accumulate": (
        with_batches(lambda odb: odb.batches(loader_of()), accumulate_grad_batches=3),
        RuntimeError,
        "`accumulate=trainer.accumulate_grad_batches`",
    ),
    "virtual ranks": (
        with_batches(
            lambda odb: odb.batches(loader_of(virtual_ranks=4, accumulate=4)),
            accumulate_grad_batches=4,
        ),
        RuntimeError,
        "accumulate_grad_batches // 4`",
    ),
    "part of the virtual ranks": (
        lambda: fit(datamodule=data(virtual_ranks=4), accumulate_grad_batches=2),
        ValueError,
        "must be a multiple of 4",
    ),
    "tuner": (
        lambda: Tuner(trainers.lightning_trainer(ODBCallback())).lr_find(
            trainers.Module(), datamodule=data()
        ),
        RuntimeError,
        "`lr_find` and `scale_batch_size`",
    ),
    "on_oom": (lambda: data(on_oom="split"), ValueError, "`callback.batches.OomGuard"),
    "no length": (
        lambda: fit(
            module=Estimating(), datamodule=ODBDataModule({"a": lm.Texts(9)}, token_budget=64)
        ),
        TypeError,
        "it is `dict`",
    ),
}


class Estimating(trainers.Module):
    def configure_optimizers(self):
        self.estimated = self.trainer.datamodule.estimated_steps()
        return super().configure_optimizers()


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_be_exact_is_refused(name):
    run, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        run()


# --- the run --------------------------------------------------------------------------------------


def test_a_fast_dev_run_runs():
    module, _ = fit(fast_dev_run=2, accumulate_grad_batches=3)
    assert len(module.seen) == 2


def test_no_worker_is_left_running_after_a_run_or_an_exception():
    loaders = []

    class Noting(ODBCallback):
        def batches(self, loader):
            loaders.append(loader)
            return super().batches(loader)

    class Failing(trainers.Module):
        def training_step(self, batch, batch_idx):
            assert loaders[-1].worker_pids
            if len(self.seen) == 2:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    with pytest.raises(ArithmeticError):
        fit(odb=[Noting()], module=Failing(), datamodule=data(num_workers=1), max_epochs=1)
    fit(odb=[Noting()], datamodule=data(num_workers=1), max_steps=2)
    assert [loader.worker_pids for loader in loaders] == [[], []]


# --- virtual ranks --------------------------------------------------------------------------------

STEPS = (2, 5, 6)


def fit_virtual(ranks_per_process, *callbacks, **options):
    """A run of 4 virtual ranks, of which a rank hosts some."""
    arguments = {"max_epochs": 2, "accumulate_grad_batches": ranks_per_process}
    arguments |= {"datamodule": data(61, virtual_ranks=4)}
    return fit(*callbacks, **arguments | options)


def saver(folder):
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def on_two_ranks(folder):
    """Go on from checkpoints of one rank, then run as a whole; return all that this rank sees."""
    two = {"strategy": "ddp", "devices": 2}
    starts = [f"{folder}/one/step={step}.ckpt" for step in STEPS]
    seen = [fit_virtual(2, checkpoint=start, **two)[0] for start in starts]
    whole, _ = fit_virtual(2, saver(f"{folder}/two"), enable_checkpointing=True, **two)
    return [(module.seen, lm.weights_of(module.model).tolist()) for module in (*seen, whole)]


def ids_of_steps(seen):
    """The ids of each optimizer step, by its number."""
    steps = {}
    for _, ids, is_filler, step in seen:
        steps[step] = steps.get(step, []) + ([] if is_filler else ids)
    return {step: sorted(ids) for step, ids in steps.items()}


@pytest.mark.slow
def test_runs_of_virtual_ranks_move_between_one_rank_and_two(tmp_path):
    whole, trainer = fit_virtual(4, saver(tmp_path / "one"), enable_checkpointing=True)
    expected, weights = ids_of_steps(whole.seen), lm.weights_of(whole.model)
    assert trainer.global_step == len(expected) > STEPS[-1]
    assert {epoch for epoch, _, _, step in whole.seen if step in STEPS} == {0, 1}

    body = "import test_callback as l\nr.finish(l.on_two_ranks(sys.argv[1]))"
    ranks = trainers.results_of(tmp_path, body, str(tmp_path), init=False)
    for (first, weights_of_rank), (second, _), start in zip(*ranks, (*STEPS, 0), strict=True):
        steps = ids_of_steps([*first, *second])
        assert steps == {step: expected[step] for step in range(start, len(expected))}
        assert (torch.tensor(weights_of_rank, dtype=weights.dtype) - weights).abs().max() <= 1e-9
    for start in STEPS:
        checkpoint = str(tmp_path / "two" / f"step={start}.ckpt")
        resumed, _ = fit_virtual(4, checkpoint=checkpoint)
        steps = ids_of_steps(resumed.seen)
        assert steps == {step: expected[step] for step in range(start, len(expected))}
        assert (lm.weights_of(resumed.model) - weights).abs().max() <= 1e-9


def test_the_gradient_and_the_estimate_of_steps_are_those_of_all_virtual_ranks():
    module, trainer = fit_virtual(8, module=Estimating(lr=0.0), max_epochs=1)
    assert trainer.train_dataloader.loader.options.accumulate == 2
    assert gradient_error(module) <= TOLERANCE
    assert abs(module.estimated - trainer.global_step) <= 2


# --- steps that run out of memory -----------------------------------------------------------------


class Sharded(trainers.GuardedModule):
    """Ranks compute together; one runs out of memory."""

    options = {"timeout_s": 20}  # noqa: RUF012

    def configure_model(self):
        fully_shard(self.model)


def fit_guarded(folder, kind=trainers.GuardedModule, trainer=(), odb=(), **job):
    module = kind(trainers.Job(folder=folder, **{"on_oom": "split", **job}))
    trainers.lightning_trainer(ODBCallback(**dict(odb)), **dict(trainer)).fit(module)
    return module


class Forgets(trainers.GuardedModule):
    def training_step(self, step, batch_idx):
        self.optimizers().step()


class Starts(trainers.GuardedModule):
    """Optimizes automatically."""

    def __init__(self, job):
        super().__init__(job)
        self.automatic_optimization = True


TASKS = {"task_weights": TaskWeights({"even": 1.0, "odd": 9.0})}
UNGUARDED = {
    "tasks": ({"odb": TASKS}, ValueError, "`task_weights` must not be given with an `Oom"),
    "automatic": ({"kind": Starts}, ValueError, "automatic_optimization = False"),
    "no backward": ({"kind": Forgets}, RuntimeError, "did not call `step.backward"),
}


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (FSDPStrategy(), "computes no steps under `FSDPStrategy`"),
        (object.__new__(DeepSpeedStrategy), "computes no steps under `DeepSpeedStrategy`"),
        (DDPStrategy(), "`guard_above` of the `OomGuard` must be 0.0 under DDP"),
    ],
)
def test_a_strategy_needs_steps_that_can_be_taken_back(strategy, message):
    module = SimpleNamespace(automatic_optimization=False)
    trainer = SimpleNamespace(strategy=strategy, lightning_module=module)
    with pytest.raises(ValueError, match=message):
        _check_guard(trainer, SimpleNamespace(guard_above=0.8), None)


@pytest.mark.parametrize("name", UNGUARDED)
def test_what_a_guard_cannot_do_is_refused_by_name(name, tmp_path):
    options, error, message = UNGUARDED[name]
    with pytest.raises(error, match=message):
        fit_guarded(tmp_path, **options)


def test_two_ranks_train_as_without_failures(tmp_path):
    body = """
        from test_callback import fit_guarded
        options = {"trainer": {"strategy": "ddp", "devices": 2}, "accumulate": 2, "size": 37}
        runs = [fit_guarded("", fails_above=above, **options) for above in (10**9, 25)]
        results = [[lm.weights_of(run.model).tolist(), run.model.ooms] for run in runs]
        del runs
        r.finish(results)
    """
    (whole, failing), (second, _) = trainers.results_of(tmp_path, body, init=False)
    assert whole[0] == second[0] and whole[1] == 0 < failing[1]
    assert failing[0] == pytest.approx(whole[0], abs=1e-10)


def test_ranks_that_compute_together_train_and_end_together(tmp_path):
    body = """
        from lightning.pytorch.strategies import ModelParallelStrategy
        from test_callback import Sharded, fit_guarded
        options = {"kind": Sharded, "size": 37}

        def ranks():
            return {"strategy": ModelParallelStrategy(), "devices": 2, "max_epochs": 1}

        print(len(fit_guarded("", trainer=ranks(), **options).infos[0].keys) > 0, flush=True)
        fit_guarded("", fails_above=40 + 9 * rank, trainer=ranks(), **options)
    """
    with trainers.on_ranks(tmp_path, 2, body, init=False) as job:
        results = job.results(150)
    assert all("True" in out for _, out, _ in results), results
    assert all(code and "StepMemoryError" in errors for code, _, errors in results), results
