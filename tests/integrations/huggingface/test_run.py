"""Checkpoints of a `Trainer`: which of them a run resumes from, and which are refused."""

import errno
import os
import re
import shutil
import zipfile
from functools import partial

import pytest
import trainers

from odb_nodes import StateError

SIZE = 40


def test_a_checkpoint_without_a_fitting_state_is_refused(tmp_path):
    trainers.make_trainer(tmp_path, save_steps=3, num_train_epochs=1).train()
    early, late = (tmp_path / f"checkpoint-{step}" for step in (3, 6))
    changed = "`accumulate` was 1 when saved.* is `gradient_accumulation_steps`.* `from_pretrained`"
    with pytest.raises(StateError, match=changed):
        trainers.resume(tmp_path, "rest", 6, gradient_accumulation_steps=2)
    shutil.copy(early / STATE, late)
    with pytest.raises(StateError, match="resumes at optimizer step 6, but .* saved at step 3"):
        trainers.resume(tmp_path, "rest", 6)
    (late / STATE).unlink()
    with pytest.raises(FileNotFoundError, match="has no state of a loader: .* `save_only_model`"):
        trainers.resume(tmp_path, "rest", 6)
    with pytest.raises(FileNotFoundError, match="is no folder"):
        trainers.resume(tmp_path, "rest", 4)


STATE = "odb_nodes-rank00000-of-00001.pt"
TORN = {
    "no state": (STATE, 0, "`checkpoint-6` has no state of the batches, .* `save_only_model`"),
    "cut state": (STATE, 0.5, "is truncated or not a state file"),
    "no weights": ("model.safetensors", 0, r"`model.safetensors` .* must have \d+ bytes, .* has 0"),
    "cut weights": ("model.safetensors", 0.5, r"must have \d+ bytes, .* but has \d+"),
    "no state of the Trainer": ("trainer_state.json", 0, r"`trainer_state.json` .* but has 0"),
    "no optimizer": ("optimizer.pt", 0, r"`optimizer.pt` .* but has 0"),
}


def train_to_six(folder):
    """Train an epoch; return the checkpoint of step 6, the newest that is left, and the entries."""
    trainers.make_trainer(folder, num_train_epochs=1, save_steps=3).train()
    for checkpoint in folder.glob("checkpoint-*"):
        if checkpoint.name not in ("checkpoint-3", "checkpoint-6"):
            shutil.rmtree(checkpoint)
    return folder / "checkpoint-6", trainers.entries_of(folder)


@pytest.mark.parametrize("damage", TORN)
def test_a_torn_checkpoint_is_skipped_with_a_warning_that_names_it(tmp_path, damage):
    checkpoint, entries = train_to_six(tmp_path)
    name, share, why = TORN[damage]
    path = checkpoint / name
    if share:
        os.truncate(path, int(path.stat().st_size * share))
    else:
        path.unlink()
    with pytest.raises((StateError, FileNotFoundError)):
        trainers.resume(tmp_path, "refused", 6, num_train_epochs=1)

    trainer = trainers.make_trainer(tmp_path, "rest", num_train_epochs=1)
    with pytest.warns(UserWarning, match="`checkpoint-6` .* is skipped.*`checkpoint-3`") as caught:
        trainer.train(resume_from_checkpoint=True)
    assert re.search(why, str(caught[0].message))
    assert trainers.entries_of(tmp_path, "rest") == entries[3:]


def test_a_torn_checkpoint_of_more_ranks_is_overwritten(tmp_path):
    torn, entries = train_to_six(tmp_path)
    (torn / STATE).rename(torn / STATE.replace("1.pt", "2.pt"))
    trainer = trainers.make_trainer(tmp_path, "rest", num_train_epochs=1, save_steps=3)
    with pytest.warns(UserWarning, match=r"`checkpoint-6` is .* lacks the states of ranks \[1\]"):
        trainer.train(resume_from_checkpoint=True)
    assert trainers.entries_of(tmp_path, "rest") == entries[3:]
    assert [path.name for path in torn.glob("odb_nodes-*")] == [STATE]


def test_a_checkpoint_that_cannot_be_read_is_not_skipped(tmp_path, monkeypatch):
    newest, _ = train_to_six(tmp_path)

    def refuse(real, path, *arguments, **named):
        if f"{newest}" in f"{path}":
            raise PermissionError(errno.EACCES, "Permission denied", f"{path}")
        return real(path, *arguments, **named)

    for module, name in ((zipfile, "ZipFile"), (os, "listdir")):
        with monkeypatch.context() as patch, pytest.raises(PermissionError):
            patch.setattr(module, name, partial(refuse, getattr(module, name)))
            trainers.make_trainer(tmp_path, "rest").train(resume_from_checkpoint=True)


def test_a_run_that_is_done_sees_that_its_data_differ(tmp_path):
    trainers.make_trainer(tmp_path, num_train_epochs=1, save_strategy="epoch").train()
    (done,) = (int(folder.name[11:]) for folder in tmp_path.glob("checkpoint-*"))
    with pytest.raises(StateError, match="`size` was 40 .*20 now"):
        trainers.resume(tmp_path, "rest", done, size=20, num_train_epochs=1)


def test_a_new_run_beside_the_checkpoints_of_another_warns(tmp_path):
    options = {"max_steps": 4, "save_steps": 2}
    trainers.make_trainer(tmp_path, **options).train()
    with pytest.warns(UserWarning, match="earlier run, up to `checkpoint-4`, but this run begins"):
        trainers.make_trainer(tmp_path, **options).train()


def test_without_a_complete_checkpoint_the_newest_is_refused(tmp_path):
    newest, _ = train_to_six(tmp_path)
    for path in tmp_path.glob(f"*/{STATE}"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="checkpoint-6` has no state of a loader"):
        trainers.make_trainer(tmp_path, "rest").train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainers.make_trainer(tmp_path, "rest", output_dir=str(tmp_path / newest)).train(True)


@pytest.mark.filterwarnings("ignore:(the run continues|no token of):UserWarning")
def test_a_run_resumes_with_a_smaller_budget_where_the_config_allows_it(tmp_path):
    trainers.make_trainer(tmp_path, save_steps=3, num_train_epochs=1).train()
    with pytest.raises(StateError, match="`change_budget` is a field of the `ODBConfig`"):
        trainers.resume(tmp_path, "refused", 3, odb={"token_budget": 32})
    smaller = {"token_budget": 32, "change_budget": True}
    after, resumed = trainers.resume(tmp_path, "resumed", 3, num_train_epochs=1, odb=smaller)
    before = trainers.entries_of(tmp_path)
    assert sorted(trainers.trained_ids([*before[:3], *after])) == [*range(SIZE)]
    assert len(after) + 3 > len(before)
    assert resumed.state.epoch == 1


@pytest.mark.slow
def test_two_ranks_skip_the_same_torn_checkpoint(tmp_path):
    body = """
        import contextlib, pytest
        options = dict(num_train_epochs=1, save_steps=3)
        trainers.make_trainer(sys.argv[1], **options).train()
        steps = len(trainers.entries_of(sys.argv[1]))
        last = f"{sys.argv[1]}/checkpoint-{steps}"
        if rank == 1:
            os.unlink(f"{last}/odb_nodes-rank00001-of-00002.pt")
        dist.barrier()
        why = rf"checkpoint-{steps}` is .* lacks .* ranks \\[1\\]"
        warned = pytest.warns(UserWarning, match=why)
        with contextlib.nullcontext() if rank else warned:
            trainers.make_trainer(sys.argv[1], "rest", **options).train(resume_from_checkpoint=True)
        entries = trainers.entries_of(sys.argv[1])
        assert trainers.entries_of(sys.argv[1], "rest") == entries[(steps - 1) // 3 * 3 :]
        dist.barrier()
        if rank == 0:  # An error of rank 0 is one of all.
            def refuse(path):
                raise PermissionError(path)
            os.listdir = refuse
        with pytest.raises(PermissionError):
            refused = trainers.make_trainer(sys.argv[1], "refused", **options)
            refused.train(resume_from_checkpoint=True)
        r.finish(None)
    """
    with trainers.on_ranks(tmp_path, 2, body, str(tmp_path)) as job:
        job.finish(200)
