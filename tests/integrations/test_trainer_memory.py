"""A `Trainer` whose steps run out of memory trains as one whose steps do not."""

import gc
import json
import sys
import textwrap
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import language_models as lm  # noqa: E402
import trainer_jobs as t  # noqa: E402
from ledgers import check_ledger  # noqa: E402
from memory_faults import PLACES, above, at_call, fail, never  # noqa: E402
from rank_jobs import RankJob, run_ranks  # noqa: E402
from trainer_memory_jobs import (  # noqa: E402
    Calls,
    Events,
    Gradients,
    PerToken,
    logs_of,
    run,
    worst_error,
)
from transformers import TrainerCallback  # noqa: E402

from odb_nodes import TokenBudget, audit  # noqa: E402
from odb_nodes.errors import StepMemoryError  # noqa: E402
from odb_nodes.integrations.huggingface import ODBConfig, ODBTrainer  # noqa: E402
from odb_nodes.sample import Observation  # noqa: E402

SIZE = 40
LOSSES = [("Normalizing", None), ("Averaging", None), ("Plain", lm.sum_over_items)]
CLOSE = 1e-10


@pytest.fixture(autouse=True)
def quick_collections():
    """Each lack of memory collects garbage: let that leave out what has been imported."""
    gc.freeze()
    yield
    gc.unfreeze()


def check_equal(found, expected):
    (trainer, events), (whole, before) = found, expected
    assert lm.weights_of(trainer.model) == pytest.approx(lm.weights_of(whole.model), abs=CLOSE)
    assert events.states == before.states
    assert events.events == before.events
    assert logs_of(trainer, "loss") == pytest.approx(logs_of(whole, "loss"), abs=2e-4)
    assert trainer.state.global_step == whole.state.global_step >= 4


# --- one rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model, function", LOSSES)
def test_a_run_is_that_without_failures_whichever_batch_fails(
    tmp_path, model, function, accumulate, place, sampled
):
    options = {"gradient_accumulation_steps": accumulate, "model": model}
    options |= {"compute_loss_func": function}
    expected = run(tmp_path / "whole", calls := Calls(), **options)
    every = sampled(every=5).get("every", 1)
    for number in range(0, calls.number, every):
        folder = tmp_path / f"{number}"
        fails = at_call({number}, least_rows=1)
        found = run(folder, fails, place, odb={"ledger": folder / "ledger"}, **options)
        check_equal(found, expected)
        assert sum(logs_of(found[0], "odb/ooms")) == 1
        check_ledger(folder / "ledger", SIZE, attempts=1, epochs=1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_does_not_fit_is_computed_in_parts(tmp_path, accumulate, layout, place):
    budget = TokenBudget(64, layout=layout)
    options = {"model": PerToken, "gradient_accumulation_steps": accumulate}
    expected = run(tmp_path / "whole", odb={"token_budget": budget}, **options)
    found = run(tmp_path / "failing", above(30), place, odb={"token_budget": budget}, **options)
    check_equal(found, expected)
    trainer, _ = found
    assert sum(logs_of(trainer, "odb/ooms")) > 5
    assert max(logs_of(trainer, "odb/parts")) > 1.5
    assert {*logs_of(expected[0], "odb/parts")} == {1.0}
    assert {*logs_of(expected[0], "odb/ooms")} == {0.0}


@pytest.mark.parametrize("loss_is", ["sample_mean", "token_mean"])
def test_means_of_each_kind_are_weighed_in_parts(tmp_path, loss_is):
    def observe(sample):
        tokens = len(sample["input_ids"])
        return Observation(tokens=tokens, targets=tokens)

    def run_rows(name, fails):
        model = fail(Rows(), "values", fails)
        odb = {"on_oom": "split", "loss_is": loss_is, "observe": observe}
        trainer = t.make_trainer(tmp_path / name, model=model, odb=odb, num_train_epochs=1)
        trainer.train_dataset = [{"input_ids": [1 + n] * (n % 13 + 2)} for n in range(SIZE)]
        trainer.train()
        return model.weight.item()

    class Rows(torch.nn.Module):
        """Takes the mean over samples, or over tokens, of a number of each sample."""

        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
            self.seen = []

        def values(self, input_ids):
            return self.weight**2 * input_ids.double()

        def forward(self, input_ids, attention_mask):
            values, mask = self.values(input_ids), attention_mask
            if loss_is == "sample_mean":
                return {"loss": values[:, 0].mean() / 100}
            return {"loss": (values * mask).sum() / mask.sum() / 100}

    assert run_rows("failing", above(30)) == pytest.approx(run_rows("whole", never), abs=CLOSE)


def test_a_run_that_resumes_after_a_failure_goes_on_alike(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "gradient_accumulation_steps": 2}
    options |= {"odb": {"ledger": tmp_path / "ledger"}}
    whole, events = run(tmp_path / "run", above(40), **options)
    for place in (1, len(events.states) // 2, len(events.states) - 1):
        folder = tmp_path / f"from-{place}"
        resume = str(tmp_path / "run" / f"checkpoint-{place}")
        found, after = run(folder, above(40), "backward", resume=resume, **options)
        assert lm.weights_of(found.model) == pytest.approx(lm.weights_of(whole.model), abs=CLOSE)
        assert after.events[-1] == events.events[-1]
        assert sum(logs_of(found, "odb/ooms")) > 0
    check_ledger(tmp_path / "ledger", SIZE, attempts=4, epochs=1)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("model", ["Normalizing", "Averaging"])
def test_samples_that_do_not_fit_alone_are_left_out_of_the_mean(tmp_path, model, accumulate):
    odb = {"on_oom": "skip", "ledger": tmp_path / "ledger"}
    options = {"model": model, "gradient_accumulation_steps": accumulate, "odb": odb}
    trainer, noted = run(tmp_path, above(20), notes=Gradients, **options)
    error, seen = worst_error([noted.steps])
    assert error < 1e-12
    losses = [
        lm.expected_loss(torch.tensor(step["before"], dtype=torch.float64), step["keys"])
        if step["keys"]
        else 0.0
        for step in noted.steps
    ]
    assert logs_of(trainer, "loss") == pytest.approx(losses, abs=2e-4)
    long = {key for key in range(SIZE) if len(lm.sample_of(key)["input_ids"]) > 20}
    assert sorted(seen) == sorted({*range(SIZE)} - long)
    report = audit(tmp_path / "ledger", SIZE)
    assert report.ok
    assert f"{len(long)} skipped (out of memory)" in str(report)
    assert sum(logs_of(trainer, "odb/samples_per_step")) == len(seen)


def test_a_sample_that_does_not_fit_alone_is_an_error_that_names_it(tmp_path):
    with pytest.raises(StepMemoryError, match=r"of epoch 0, rank 0: a sample \(key \d+\) with 2\d"):
        run(tmp_path, above(20))


def test_without_on_oom_the_models_own_error_is_raised(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        run(tmp_path, above(40), odb={"on_oom": None})


def test_another_error_is_raised_as_it_is(tmp_path):
    def fails(rows, width):
        raise KeyError("of the model")

    with pytest.raises(KeyError, match="of the model"):
        run(tmp_path, fails)


def test_after_memory_ran_out_batches_are_smaller(tmp_path):
    odb = {"shrink": 0.8, "round_size": 1, "ledger": tmp_path / "ledger"}
    trainer, _ = run(tmp_path, above(40), odb=odb)
    assert 0 < sum(logs_of(trainer, "odb/ooms")) <= 2
    check_ledger(tmp_path / "ledger", SIZE, attempts=1, epochs=1)


def test_metrics_of_memory_are_logged_only_where_it_may_run_out(tmp_path):
    trainer, _ = run(tmp_path, odb={"on_oom": None})
    assert logs_of(trainer, "odb/padding_share")
    assert not logs_of(trainer, "odb/ooms") + logs_of(trainer, "odb/parts")


# --- the Trainer's own ways -----------------------------------------------------------------------


class Scaled(TrainerCallback):
    """Lets an accelerator on a CPU scale gradients as it does for fp16 on a GPU."""

    def __init__(self, accelerator):
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
        self.accelerator = accelerator

    def on_train_begin(self, args, state, control, **kwargs):
        self.accelerator.native_amp = True  # so that clipping unscales


@pytest.mark.parametrize("place", PLACES)
def test_scaled_and_clipped_gradients_are_those_without_failures(tmp_path, monkeypatch, place):
    def run_scaled(name, fails):
        options = {"num_train_epochs": 1, "max_grad_norm": 0.1, "gradient_accumulation_steps": 2}
        model = fail(lm.Normalizing(), "features", fails, place)
        trainer = t.make_trainer(tmp_path / name, model=model, odb={"on_oom": "split"}, **options)
        kind = type(trainer.accelerator)
        monkeypatch.setattr(kind, "mixed_precision", property(lambda self: "fp16"))
        trainer.add_callback(Scaled(trainer.accelerator))
        trainer.add_callback(events := Events(trainer))
        trainer.train()
        return trainer, events, logs_of(trainer, "grad_norm")

    *whole, norms = run_scaled("whole", never)
    *found, found_norms = run_scaled("failing", above(40))
    assert lm.weights_of(found[0].model) == pytest.approx(lm.weights_of(whole[0].model), abs=CLOSE)
    assert found_norms == pytest.approx(norms, abs=CLOSE)
    assert max(norms) > 0.1
    scales = [one[0].accelerator.scaler.get_scale() for one in (whole, found)]
    assert scales[0] == scales[1] > 2.0**12


def test_a_recomputation_may_run_out_of_memory(tmp_path):
    from test_huggingface import decoder

    def run_checkpointed(name, fails):
        torch.manual_seed(0)
        model = decoder().double()
        model.seen = []
        fail(model.model.layers[0].mlp, "forward", fails)
        options = {"num_train_epochs": 1, "gradient_checkpointing": True, "max_steps": 4}
        odb = {"on_oom": "split", "loss_is": "divided"}
        trainer = t.make_trainer(tmp_path / name, model=model, odb=odb, **options)
        trainer.train()
        return lm.weights_of(model)

    expected = run_checkpointed("whole", calls := Calls())
    assert calls.number == 8  # each layer is computed twice
    for number in (1, 4, 7):
        found = run_checkpointed(f"{number}", at_call({number}, least_rows=1))
        assert found == pytest.approx(expected, abs=CLOSE)


def test_a_subclass_that_passes_on_other_batches_is_refused(tmp_path):
    class Copying(ODBTrainer):
        def training_step(self, model, inputs, *args):
            return super().training_step(model, dict(inputs), *args)

    with pytest.raises(ValueError, match="`Copying` passes on another one"):
        run(tmp_path, kind=Copying)
    run(tmp_path, kind=Copying, odb={"on_oom": None})


@pytest.mark.parametrize("when, times", [(None, 0), ("epoch", 2), ("evaluate", 6)])
def test_cached_memory_is_given_back_when_that_is_asked_for(tmp_path, monkeypatch, when, times):
    freed = []
    for module in ("callback", "trainer"):
        name = f"odb_nodes.integrations.huggingface.{module}.free_memory"
        monkeypatch.setattr(name, lambda: freed.append(1))
    odb = {"on_oom": None, "empty_cache": when}
    data = {"eval_dataset": lm.Texts(5), "eval_strategy": "epoch", "label_names": ["labels"]}
    run(tmp_path, odb=odb, num_train_epochs=2, **data)
    assert len(freed) == times


@pytest.mark.parametrize(
    "options, message",
    [
        ({"on_oom": "raise"}, "`on_oom` must be one of"),
        ({"guard_above": 1.5}, "`guard_above` must be in 0..1, but is 1.5"),
        ({"on_oom": "split", "shrink": 1.0}, "`shrink` must be above 0 and below 1"),
        ({"shrink": 0.9}, "`shrink` must be None where `on_oom` is None"),
        ({"empty_cache": "step"}, "`empty_cache` must be one of"),
    ],
)
def test_options_that_are_not_valid_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ODBConfig(token_budget=64, **options)


@pytest.mark.parametrize("optim", ["lomo", "galore_adamw_layerwise"])
def test_optimizers_that_step_within_backward_are_refused(tmp_path, optim):
    with pytest.raises(ValueError, match=f'`optim` must not be "{optim}" .*`on_oom`'):
        run(tmp_path, optim=optim)


# --- two ranks ------------------------------------------------------------------------------------

WARM = ("transformers.trainer_seq2seq", "odb_nodes.integrations.huggingface")
BEGIN = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import trainer_memory_jobs as j
import trainer_jobs as t
from memory_faults import above, at_call
how = json.loads(sys.argv[1])
"""


def program(body):
    """The program of each rank."""
    return BEGIN + textwrap.dedent(body)


def ends_of(tmp_path, body, **options):
    """What each rank says in the end, where both are to fail."""
    how = json.dumps({"folder": str(tmp_path), "options": options})
    with RankJob(tmp_path, program(body), 2, how, warm=WARM) as job:
        results = job.results(100)
    assert all(code != 0 for code, _, _ in results)
    return [errors for _, _, errors in results]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("model", ["Normalizing", "Averaging"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_two_ranks_train_as_without_failures(tmp_path, accumulate, model, place):
    body = """
        found = []
        for name, share, above in (("whole", 0.0, 1.0), ("failing", 0.3, 0.0)):
            folder = how["folder"] + "/" + name
            odb = {"guard_above": above, "ledger": folder + "/ledger"}
            trainer, events = j.run(folder, j.sometimes(share, rank), odb=odb, **how["options"])
            losses, ooms = j.logs_of(trainer, "loss"), j.logs_of(trainer, "odb/ooms")
            weights = t.weights_of(trainer.model).tolist()
            found.append([weights, losses, sum(ooms), events.events, repr(events.states)])
            del trainer, events
        r.finish(found)
    """
    options = {"model": model, "gradient_accumulation_steps": accumulate, "place": place}
    how = json.dumps({"folder": str(tmp_path), "options": options | {"size": 37}})
    for whole, failing in run_ranks(tmp_path, program(body), 2, how, timeout_s=200, warm=WARM):
        assert failing[0] == pytest.approx(whole[0], abs=CLOSE)
        assert failing[1] == pytest.approx(whole[1], abs=2e-4)
        assert failing[3:] == whole[3:]
        assert whole[2] == 0
        assert failing[2] > 1
    for name in ("whole", "failing"):
        check_ledger(tmp_path / name / "ledger", 37, attempts=1, epochs=1)


def test_two_ranks_leave_out_alike_what_does_not_fit_alone(tmp_path):
    body = """
        odb = {"on_oom": "skip", "guard_above": 0.0, "ledger": how["folder"] + "/ledger"}
        found = []
        for model, size in (("Normalizing", 37), ("Averaging", 37)):
            folder = how["folder"] + "/" + model
            odb["ledger"] = folder + "/ledger"
            options = {"model": model, "size": size, "notes": j.Gradients, "odb": odb}
            trainer, noted = j.run(folder, above(20), gradient_accumulation_steps=2, **options)
            found.append(j.worst_error(r.gathered(noted.steps)))
            del trainer, noted
        r.finish(found)
    """
    how = json.dumps({"folder": str(tmp_path)})
    found = run_ranks(tmp_path, program(body), 2, how, timeout_s=200, warm=WARM)
    long = {key for key in range(37) if len(lm.sample_of(key)["input_ids"]) > 20}
    for error, seen in found[0] + found[1]:
        assert error < 1e-12
        assert sorted(seen) == sorted({*range(37)} - long)
    for model in ("Normalizing", "Averaging"):
        assert audit(tmp_path / model / "ledger", 37).ok


def test_where_a_sample_does_not_fit_alone_both_ranks_say_so(tmp_path):
    body = """
        odb = {"guard_above": 0.0, "timeout_s": 60}
        j.run(how["folder"], above(0) if rank else j.never, odb=odb, **how["options"])
    """
    for text in ends_of(tmp_path, body, gradient_accumulation_steps=3):
        assert "does not fit into memory alone" in text


def test_what_cannot_be_taken_back_ends_both_ranks_and_a_resume_completes_the_epoch(tmp_path):
    body = """
        odb = {"guard_above": 1.0, "ledger": how["folder"] + "/ledger", "timeout_s": 20}
        fails = j.never if rank == 0 or how["options"].get("resume") else at_call({5}, 1)
        j.run(how["folder"], fails, save_strategy="steps", save_steps=1, odb=odb, **how["options"])
        r.finish()
    """
    for text in ends_of(tmp_path, body):
        assert "StepMemoryError: rank 1 ran out of memory in step 5 of epoch 0" in text
        assert "Resume from the last checkpoint with a budget of" in text
    how = {"folder": str(tmp_path), "options": {"resume": str(tmp_path / "checkpoint-5")}}
    run_ranks(tmp_path, program(body), 2, json.dumps(how), timeout_s=200, warm=WARM)
    check_ledger(tmp_path / "ledger", SIZE, attempts=2, epochs=1)


def test_a_loss_that_gathers_from_other_ranks_is_refused(tmp_path):
    body = """
        odb = {"guard_above": 0.0, "timeout_s": 20, "loss_is": "divided"}
        j.run(how["folder"], kind=j.Gathering, odb=odb)
    """
    for text in ends_of(tmp_path, body):
        assert "`compute_loss` of `Gathering` gathers from other ranks" in text
