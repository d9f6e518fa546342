"""A `Trainer` whose steps run out of memory trains as one whose steps do not."""

import gc
import json
import random

import language_models as lm
import pytest
import torch
import trainers
from ledgers import check_ledger
from memory_faults import above, at_call, fail, never
from transformers import TrainerCallback

from odb_nodes import TokenBudget, audit
from odb_nodes.core.sample import Observation
from odb_nodes.integrations.huggingface import ODBTrainer

pytestmark = [
    pytest.mark.filterwarnings(trainers.OF_TRANSFORMERS),
    pytest.mark.filterwarnings("ignore:no token of the optimizer step:UserWarning"),
    pytest.mark.filterwarnings("ignore:the run (continues|ends) after:UserWarning"),
]

SIZE = 40
CLOSE = 1e-10


@pytest.fixture(autouse=True)
def quick_collections():
    """Each lack of memory collects garbage: let that leave out what has been imported."""
    gc.freeze()
    yield
    gc.unfreeze()


class PerToken(lm.Normalizing):
    """Predicts each token from the one before alone, so samples may share a row."""

    def features(self, input_ids):
        return torch.tanh(self.hidden(self.embedding(input_ids)))

    def forward(self, input_ids, position_ids=None, labels=None, id=None, **kwargs):
        return super().forward(input_ids, labels=labels, id=id, **kwargs)


class Events(TrainerCallback):
    """Notes the states of the loader, and what the steps of a run had."""

    def __init__(self, trainer):
        self.trainer, self.states, self.events, self.steps = trainer, [], [], []

    def on_substep_end(self, *args, **kwargs):
        self.events.append("substep")

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        model, guard = self.trainer.model, self.trainer.odb_run.guard
        infos = [] if guard is None else guard.infos
        self.steps.append({"ids": [info.keys for info in infos]})
        self.steps[-1] |= {"step": state.global_step, "epoch": 0}
        self.steps[-1] |= {"fillers": [info.is_filler for info in infos]}
        self.steps[-1] |= {"before": lm.weights_of(model).tolist()}
        self.steps[-1] |= {"gradient": lm.gradient_of(model).tolist()}

    def on_step_end(self, args, state, control, **kwargs):
        self.states.append(self.trainer.odb_run.state_dict())
        self.events.append((state.global_step, state.epoch, state.num_input_tokens_seen))


class Calls:
    """Counts the forwards in training, of which none runs out of memory."""

    number = 0

    def __call__(self, rows, width):
        self.number += 1
        return False


def run(folder, fails=never, place="forward", model="Normalizing", resume=None, **options):
    """A trainer that has trained, and what it went through."""
    kind = model if isinstance(model, type) else getattr(lm, model)
    arguments = {"num_train_epochs": 1, "include_num_input_tokens_seen": "all", "logging_steps": 1}
    arguments |= options | {"odb": {"on_oom": "split", **options.get("odb", {})}}
    model = fail(kind(), "features", fails, place)
    odb = trainers.config(**arguments.pop("odb"))
    kind, size = arguments.pop("kind", ODBTrainer), arguments.pop("size", SIZE)
    function = arguments.pop("compute_loss_func", None)
    args = trainers.arguments(folder, **arguments)
    trainer = kind(model, args, train_dataset=lm.Texts(size), odb=odb, compute_loss_func=function)
    trainer.add_callback(events := Events(trainer))
    trainer.train(resume_from_checkpoint=resume)
    return trainer, events


def check_equal(actual, expected):
    (trainer, events), (whole, before) = actual, expected
    assert lm.weights_of(trainer.model) == pytest.approx(lm.weights_of(whole.model), abs=CLOSE)
    assert events.states == before.states
    assert events.events == before.events
    assert trainers.logs_of(trainer, "loss") == pytest.approx(
        trainers.logs_of(whole, "loss"), abs=2e-4
    )
    assert trainer.state.global_step == whole.state.global_step >= 4


def long_texts(size=SIZE):
    """Those of more than 20 tokens."""
    return {key for key in range(size) if len(lm.sample_of(key)["input_ids"]) > 20}


# --- one rank -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accumulate", "layout", "model", "function", "place"),
    [
        (1, "packed", PerToken, None, "forward"),
        (3, "padded", "Normalizing", None, "backward"),
        (3, "padded", "Plain", lm.sum_over_items, "forward"),
    ],
)
def test_what_does_not_fit_is_computed_in_parts(
    tmp_path, accumulate, layout, model, function, place
):
    def train(name, fails):
        odb = {"token_budget": TokenBudget(64, layout=layout), "ledger": tmp_path / name / "ledger"}
        options = {"model": model, "gradient_accumulation_steps": accumulate, "odb": odb}
        return run(tmp_path / name, fails, place, compute_loss_func=function, **options)

    expected, failing = train("whole", never), train("failing", above(30))
    check_equal(failing, expected)
    check_ledger(tmp_path / "failing" / "ledger", SIZE, attempts=1, epochs=1)
    assert sum(trainers.logs_of(failing[0], "odb/ooms")) > 5
    assert max(trainers.logs_of(failing[0], "odb/parts")) > 1.5
    assert {*trainers.logs_of(expected[0], "odb/parts")} == {1.0}
    assert {*trainers.logs_of(expected[0], "odb/ooms")} == {0.0}


class Numbers(torch.nn.Module):
    """Takes the mean over samples, or over tokens, of a number of each sample."""

    def __init__(self, loss_is):
        super().__init__()
        self.loss_is, self.seen = loss_is, []
        self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def features(self, input_ids):
        return self.weight**2 * input_ids.double()

    def forward(self, input_ids, attention_mask):
        values, mask = self.features(input_ids), attention_mask
        if self.loss_is == "sample_mean":
            return {"loss": values[:, 0].mean() / 100}
        return {"loss": (values * mask).sum() / mask.sum() / 100}


@pytest.mark.parametrize("loss_is", ["sample_mean", "token_mean"])
def test_means_of_each_kind_are_weighed_in_parts(tmp_path, loss_is):
    def observe(sample):
        tokens = len(sample["input_ids"])
        return Observation(tokens=tokens, targets=tokens)

    def run_numbers(name, fails):
        model = fail(Numbers(loss_is), "features", fails)
        data = [{"input_ids": [1 + n] * (n % 13 + 2)} for n in range(SIZE)]
        odb = trainers.config(on_oom="split", loss_is=loss_is, observe=observe)
        args = trainers.arguments(tmp_path / name, num_train_epochs=1)
        ODBTrainer(model, args, train_dataset=data, odb=odb).train()
        return model.weight.item()

    assert run_numbers("failing", above(30)) == pytest.approx(
        run_numbers("whole", never), abs=CLOSE
    )


def test_samples_that_do_not_fit_alone_are_left_out_of_the_mean(tmp_path):
    odb = {"on_oom": "skip", "ledger": tmp_path / "ledger"}
    options = {"gradient_accumulation_steps": 3, "odb": odb}
    trainer, noted = run(tmp_path, above(20), **options)
    assert lm.check_steps([noted.steps], SIZE, long_texts()) < 1e-12
    before = [torch.tensor(step["before"], dtype=torch.float64) for step in noted.steps]
    ids = [lm.ids_of([step]) for step in noted.steps]
    losses = [lm.expected_loss(*pair) for pair in zip(before, ids, strict=True)]
    assert trainers.logs_of(trainer, "loss") == pytest.approx(losses, abs=2e-4)
    report = audit(tmp_path / "ledger", SIZE)
    assert report.ok
    assert f"{len(long_texts())} skipped (out of memory)" in str(report)
    assert sum(trainers.logs_of(trainer, "odb/samples_per_step")) == SIZE - len(long_texts())


def test_after_memory_ran_out_batches_are_smaller(tmp_path):
    odb = {"shrink": 0.8, "round_size": 1, "ledger": tmp_path / "ledger"}
    trainer, _ = run(tmp_path, above(40), odb=odb)
    assert 0 < sum(trainers.logs_of(trainer, "odb/ooms")) <= 2
    check_ledger(tmp_path / "ledger", SIZE, attempts=1, epochs=1)


# --- the Trainer's own ways -----------------------------------------------------------------------


def test_scaled_and_clipped_gradients_are_those_without_failures(tmp_path, monkeypatch):
    class Scaled(ODBTrainer):
        """On a CPU, scales gradients as it does for fp16 on a GPU."""

        def train(self, **options):
            kind, scaler = type(self.accelerator), torch.amp.GradScaler("cpu", 2.0**12)
            scaler.set_growth_interval(3)
            monkeypatch.setattr(kind, "mixed_precision", property(lambda self: "fp16"))
            self.accelerator.scaler = scaler
            self.add_callback(Unscales(self.accelerator))
            return super().train(**options)

    class Unscales(TrainerCallback):
        def __init__(self, accelerator):
            self.accelerator = accelerator

        def on_train_begin(self, args, state, control, **kwargs):
            self.accelerator.native_amp = True  # so that clipping unscales

    options = {"max_grad_norm": 0.1, "gradient_accumulation_steps": 2, "kind": Scaled}
    (whole, _), (failing, _) = (
        run(tmp_path / name, fails, "backward", **options)
        for name, fails in (("whole", never), ("failing", above(40)))
    )
    assert lm.weights_of(failing.model) == pytest.approx(lm.weights_of(whole.model), abs=CLOSE)
    norms = trainers.logs_of(whole, "grad_norm")
    assert trainers.logs_of(failing, "grad_norm") == pytest.approx(norms, abs=CLOSE)
    assert max(norms) > 0.1
    scales = [trainer.accelerator.scaler.get_scale() for trainer in (whole, failing)]
    assert scales[0] == scales[1] > 2.0**12


def test_a_recomputation_may_run_out_of_memory(tmp_path):
    def run_checkpointed(name, fails):
        model = trainers.decoder().double()
        fail(model.model.layers[0].mlp, "forward", fails)
        args = trainers.arguments(tmp_path / name, gradient_checkpointing=True, max_steps=4)
        odb = trainers.config(on_oom="split", loss_is="divided")
        function = {"compute_loss_func": lm.sum_over_items}  # in fp64, as the model's own is not
        ODBTrainer(model, args, train_dataset=lm.Texts(SIZE), odb=odb, **function).train()
        return lm.weights_of(model)

    expected = run_checkpointed("whole", calls := Calls())
    assert calls.number == 8  # each layer is computed twice
    for number in (1, 4, 7):
        weights = run_checkpointed(f"{number}", at_call({number}, least_rows=1))
        assert weights == pytest.approx(expected, abs=CLOSE)


class Copying(ODBTrainer):
    def training_step(self, model, inputs, *args):
        return super().training_step(model, dict(inputs), *args)


REFUSED = {
    "copies": (never, {"kind": Copying}, ValueError, "`Copying` passes another batch"),
    "lomo": (never, {"optim": "lomo"}, ValueError, '`optim` must not be "lomo"'),
    "layerwise": (never, {"optim": "galore_adamw_layerwise"}, ValueError, "layerwise"),
    "shrink": (never, {"odb": {"on_oom": None, "shrink": 0.9}}, ValueError, "`shrink` must be"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_guard_cannot_do_is_an_error(tmp_path, name):
    fails, options, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        run(tmp_path, fails, **options)


# --- two ranks ------------------------------------------------------------------------------------


class Gathering(ODBTrainer):
    """Gathers what it computes, as trainers do that log it for all ranks."""

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        self.accelerator.gather_for_metrics(loss.detach())
        return loss


def sometimes(share, seed):
    """Some batches of several samples run out of memory, drawn by a seed."""
    rng = random.Random(seed)
    return at_call({number for number in range(1000) if rng.random() < share})


BEGIN = """
import json, test_guard as j
from memory_faults import above, at_call, never
how = json.loads(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "place"), [("Normalizing", "backward"), ("Averaging", "forward")]
)
def test_two_ranks_train_as_without_failures(tmp_path, model, place):
    body = """
        results = []
        for name, share, above in (("whole", 0.0, 1.0), ("failing", 0.3, 0.0)):
            folder = how["folder"] + "/" + name
            odb = {"guard_above": above, "ledger": folder + "/ledger"}
            options = {"size": 37, "gradient_accumulation_steps": 3, "model": how["model"]}
            fails = j.sometimes(share, rank)
            trainer, events = j.run(folder, fails, how["place"], odb=odb, **options)
            losses, ooms = trainers.logs_of(trainer, "loss"), trainers.logs_of(trainer, "odb/ooms")
            weights = lm.weights_of(trainer.model).tolist()
            results.append([weights, losses, sum(ooms), events.events, repr(events.states)])
            del trainer, events
        r.finish(results)
    """
    how = json.dumps({"folder": str(tmp_path), "model": model, "place": place})
    for whole, failing in trainers.results_of(tmp_path, BEGIN + trainers.dedent(body), how):
        assert failing[0] == pytest.approx(whole[0], abs=CLOSE)
        assert failing[1] == pytest.approx(whole[1], abs=2e-4)
        assert failing[3:] == whole[3:]
        assert whole[2] == 0
        assert failing[2] > 1
    for name in ("whole", "failing"):
        check_ledger(tmp_path / name / "ledger", 37, attempts=1, epochs=1)


GATHERS = """
odb = {"guard_above": 0.0, "timeout_s": 20, "loss_is": "divided"}
j.run(how, kind=j.Gathering, odb=odb)
"""


@pytest.mark.slow
def test_a_loss_that_gathers_is_an_error_on_both(tmp_path):
    with trainers.on_ranks(tmp_path, 2, BEGIN + GATHERS, json.dumps(str(tmp_path))) as job:
        results = job.results(100)
    text = "`compute_loss` of `Gathering` gathers from other ranks"
    assert all(code != 0 and text in errors for code, _, errors in results)
