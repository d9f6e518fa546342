"""Virtual ranks under Lightning: the same optimizer steps on one rank and on two."""

from pathlib import Path

import pytest

pytest.importorskip("lightning.pytorch")

import lightning_runs as runs
import torch
from gradients import OneProcess, relative_error, samples_of
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_jobs import run_ranks

from odb_nodes import ODBDataLoader
from odb_nodes.integrations.lightning import ODBCallback

WARM = ("lightning.pytorch", "odb_nodes.integrations.lightning")
STEPS = (2, 5, 6)
ON_TWO = """
    sys.path.insert(0, {folder!r})
    import test_lightning_virtual_ranks as l
    r.finish(l.on_two_ranks(sys.argv[1]))
"""


def fit(hosted, *callbacks, **options):
    """A run of 4 virtual ranks, of which a rank hosts some."""
    given = {"max_epochs": 2, "accumulate_grad_batches": hosted, "size": runs.RANKS_SIZE}
    return runs.fit(*callbacks, data_options={"virtual_ranks": 4}, **given | options)


def saver(folder):
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")


def checkpoint(folder, step):
    return str(Path(folder, f"step={step}.ckpt"))


def on_two_ranks(folder):
    """Go on from checkpoints of one rank, then run as a whole; return all that this rank sees."""
    two = {"strategy": "ddp", "devices": 2}
    own, one = Path(folder, "two"), Path(folder, "one")
    seen = [fit(2, checkpoint=checkpoint(one, step), **two)[0] for step in STEPS]
    whole, _ = fit(2, saver(own), enable_checkpointing=True, **two)
    return [(module.seen, module.weights.tolist()) for module in (*seen, whole)]


def ids_of_steps(seen):
    """The ids of each optimizer step, by its number."""
    steps = {}
    for _, ids, is_filler, step in seen:
        steps[step] = steps.get(step, []) + ([] if is_filler else ids)
    return {step: sorted(ids) for step, ids in steps.items()}


def test_runs_move_between_one_rank_and_two(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    whole, trainer = fit(4, saver(one), enable_checkpointing=True)
    expected, weights = ids_of_steps(whole.seen), whole.weights
    assert trainer.global_step == len(expected) > STEPS[-1]
    epoch_of = {step: epoch for epoch, _, _, step in whole.seen}
    assert {epoch_of[step] for step in STEPS} == {0, 1}

    program = ON_TWO.format(folder=str(Path(__file__).parent))
    ranks = run_ranks(tmp_path, program, 2, str(tmp_path), init=False, warm=WARM)
    for (first, found), (second, _), start in zip(*ranks, (*STEPS, 0), strict=True):
        steps = ids_of_steps([*first, *second])
        assert steps == {step: expected[step] for step in range(start, len(expected))}
        assert (torch.tensor(found, dtype=weights.dtype) - weights).abs().max() <= 1e-9

    for start in STEPS:
        resumed, its_trainer = fit(4, checkpoint=checkpoint(two, start))
        assert its_trainer.global_step == trainer.global_step
        steps = ids_of_steps(resumed.seen)
        assert steps == {step: expected[step] for step in range(start, len(expected))}
        assert (resumed.weights - weights).abs().max() <= 1e-9


def test_batches_of_a_step_must_be_those_of_all_virtual_ranks():
    with pytest.raises(ValueError, match="`accumulate_grad_batches` must be a multiple of 4"):
        fit(2)


def test_the_estimate_of_steps_is_that_of_the_virtual_ranks():
    class Estimating(runs.Module):
        def configure_optimizers(self):
            self.estimated = self.trainer.datamodule.estimated_steps()
            return super().configure_optimizers()

    module, trainer = fit(4, module=Estimating())
    assert abs(module.estimated - trainer.global_step) <= 2


def test_the_gradient_is_that_of_the_mean_over_all_virtual_ranks():
    module, trainer = fit(8, module=runs.Module(lr=0.0), max_epochs=1)
    assert trainer.train_dataloader.loader.options.accumulate == 2
    one = OneProcess([runs.RANKS_SIZE])
    for gradient, groups in zip(module.gradients, module.groups(), strict=True):
        assert relative_error(gradient, one.gradient(groups, "exact")) <= 1e-12


def test_a_loader_of_ones_own_is_told_what_to_accumulate():
    module, callback = runs.Module(), ODBCallback()
    options = {"token_budget": 60, "window": 8, "virtual_ranks": 4, "accumulate": 4}
    loader = ODBDataLoader(samples_of(0, runs.SIZE), **options)
    module.train_dataloader = lambda: callback.batches(loader)
    with pytest.raises(RuntimeError, match="accumulate=trainer.accumulate_grad_batches // 4`"):
        runs.trainer_of(odb=[callback], max_epochs=1, accumulate_grad_batches=4).fit(module)
