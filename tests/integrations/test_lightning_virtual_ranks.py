"""The steps of four ranks under Lightning, on one and on two: real processes, DDP over gloo."""

import pytest

pytest.importorskip("lightning.pytorch")

import lightning_runs as runs
from gradients import OneProcess, relative_error, samples_of
from rank_jobs import run_ranks

from odb_nodes import ODBDataLoader
from odb_nodes.integrations.lightning import ODBCallback

WARM = ("lightning.pytorch", "odb_nodes.integrations.lightning")
TWO = """
    import lightning_runs as l
    r.finish(l.begin_on_two(sys.argv[1], int(sys.argv[2])))
"""


def steps_of(ranks):
    """Per optimizer step, the ids of its samples over all ranks."""
    steps = {}
    for seen in ranks:
        for _, ids, is_filler, step in seen:
            steps.setdefault(step, []).extend([] if is_filler else ids)
    return {step: sorted(ids) for step, ids in steps.items()}


def test_the_gradient_is_that_of_the_mean_over_all_virtual_ranks():
    module, trainer = runs.fit_on_virtual_ranks(
        devices=1, module=runs.Module(lr=0.0), accumulate_grad_batches=8, max_epochs=1
    )
    assert trainer.train_dataloader.loader.options.accumulate == 2
    one = OneProcess([runs.RANKS_SIZE])
    for gradient, groups in zip(module.gradients, module.groups(), strict=True):
        assert relative_error(gradient, one.gradient(groups, "exact")) <= 1e-12
    ids = [index for _, ids, is_filler, _ in module.seen for index in ids if not is_filler]
    assert sorted(ids) == list(range(runs.RANKS_SIZE))


def test_one_rank_goes_on_with_the_steps_that_two_have_begun(tmp_path):
    whole, trainer = runs.fit_on_virtual_ranks(devices=1)
    first_epoch = len({step for epoch, *_, step in whole.seen if epoch == 0})
    stop = first_epoch + 2
    assert stop < trainer.global_step  # within the second epoch
    begun = run_ranks(tmp_path, TWO, 2, str(tmp_path), str(stop), init=False, warm=WARM)
    path = str(tmp_path / "last.ckpt")
    rest, its_trainer = runs.fit_on_virtual_ranks(devices=1, checkpoint=path)

    assert steps_of([*begun, rest.seen]) == steps_of([whole.seen])
    runs.check_resumed(whole, trainer, rest, its_trainer)
    assert its_trainer.fit_loop.total_batch_idx == trainer.fit_loop.total_batch_idx


def test_the_estimate_of_steps_is_that_of_the_virtual_ranks():
    class Estimating(runs.Module):
        def on_train_start(self):
            self.estimated = self.trainer.datamodule.estimated_steps()

    module, trainer = runs.fit_on_virtual_ranks(devices=1, module=Estimating())
    assert abs(module.estimated - trainer.global_step) <= 2


def test_an_accumulation_that_the_virtual_ranks_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="must be a multiple of 4, .* but is 6 instead"):
        runs.fit_on_virtual_ranks(devices=1, accumulate_grad_batches=6)


def test_a_loader_of_ones_own_is_told_what_to_accumulate():
    module, callback = runs.Module(), ODBCallback()
    options = {"token_budget": 60, "window": 8, "virtual_ranks": 4, "accumulate": 4}
    loader = ODBDataLoader(samples_of(0, runs.SIZE), **options)
    module.train_dataloader = lambda: callback.batches(loader)
    with pytest.raises(RuntimeError, match="accumulate=trainer.accumulate_grad_batches // 4`"):
        runs.trainer_of(odb=[callback], max_epochs=1, accumulate_grad_batches=4).fit(module)
