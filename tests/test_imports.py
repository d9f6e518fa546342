"""What is imported, and when; and what is said where it cannot be. Each in a new interpreter."""

import subprocess
import sys

import pytest

FRAMEWORKS = {
    *"PIL transformers accelerate lightning datasets matplotlib ray rich".split(),
    *"plotly tensorboard wandb mlflow".split(),
}
TOOLS = {"matplotlib", "plotly", "rich", "tensorboard"}


def run(code, *arguments, without=()):
    """Run a program that cannot import some packages."""
    begin = f"import sys; sys.modules |= dict.fromkeys({[*without]})"
    command = [sys.executable, "-c", f"{begin}\n{code}", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


ALONE = f"""
from odb_nodes import *
import odb_nodes.integrations, odb_nodes.testing, odb_nodes.training.vision
import odb_nodes.training.monitor, odb_nodes.integrations.learning_rate
import odb_nodes.tools.estimate
print(sorted({FRAMEWORKS} & {{*sys.modules}}))
"""
ACCELERATE = """
import odb_nodes.integrations.accelerate
print([name for name in ("transformers",) if name in sys.modules])
"""


@pytest.mark.parametrize("code", [ALONE, ACCELERATE])
def test_no_framework_is_imported_that_is_not_asked_for(code):
    result = run(code)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    ("code", "missing", "expected"),
    [
        ("import odb_nodes.integrations.huggingface", "transformers", "'odb-nodes[hf]'"),
        ("import odb_nodes.integrations.huggingface", "accelerate", "'odb-nodes[hf]'"),
        ("import odb_nodes.integrations.accelerate", "accelerate", "'odb-nodes[accelerate]'"),
        ("import odb_nodes.integrations.lightning", "lightning.pytorch", "'odb-nodes[lightning]'"),
        (
            "import odb_nodes.training.vision as v; v.ImageReader()(b'')",
            "PIL.Image",
            "'odb-nodes[vision]'",
        ),
        (
            "import odb_nodes.integrations.llama_factory as m; m.main({'stage': 'sft'})",
            "llamafactory",
            "llamafactory",
        ),
        (
            "from odb_nodes import *\n"
            "workers = WorkerOptions(num_workers=1, method='ray', timeout_s=3)\n"
            "node = ParallelProcessor(ShardedSampler(9), str, workers=workers)\n"
            "node.reset()\nnext(node)",
            "ray",
            "'odb-nodes[ray]'",
        ),
    ],
)
def test_what_is_missing_is_an_error_that_names_the_command(code, missing, expected):
    result = run(code, without=[missing])
    assert result.returncode == 1
    assert "cannot be imported" in result.stderr
    assert f"pip install {expected}" in result.stderr


def test_arguments_need_no_transformers_but_a_trainer_does():
    code = """
from types import SimpleNamespace as Names
from odb_nodes.integrations.llama_factory import DynamicBatches
batches = DynamicBatches.of({"cutoff_len": 8, "per_device_train_batch_size": 2})
print(batches.budget.tokens, flush=True)
args = Names(gradient_accumulation_steps=1)
batches.configure(Names(args=args, train_dataset=[], data_collator=None))
"""
    result = run(code, without=["transformers"])
    assert (result.stdout.strip(), result.returncode) == ("16", 1)
    assert "pip install 'odb-nodes[hf]'" in result.stderr


HELP = """
from odb_nodes.cli import main
for line in ("--help", "profile --help", "step --help", "audit --help", "profile --rank 8",
             "simulate", "tune --lengths no.npz", "inspect", "step x", "profile no.jsonl"):
    try:
        main(line.split())
    except SystemExit as exit:
        assert exit.code in (0, 2) and "torch" not in sys.modules, line
import odb_nodes
assert odb_nodes.__version__ and "torch" not in sys.modules
assert {"Loader", "__version__"} <= {*dir(odb_nodes)} and not hasattr(odb_nodes, "Nothing")
assert odb_nodes.planning.plan_epoch and odb_nodes.memory.OomGuard and odb_nodes.contract.snapshot
assert odb_nodes.Loader is odb_nodes.core.loader.Loader and "torch" in sys.modules
"""


def test_help_and_errors_of_usage_need_no_torch():
    done = run(HELP)
    assert done.returncode == 0, done.stderr


MODULE = """
import runpy
module, *sys.argv[1:] = sys.argv[1:]
runpy.run_module(module, run_name="__main__")
"""


def test_commands_need_no_extra_and_a_page_says_what_to_install():
    job = ["simulate", "--cv", 1, "--samples", 180, "--ranks", 1, 2]
    done = run(MODULE, "odb_nodes", *job, without=TOOLS)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[-2:]] == ["1", "2"]
    page = "from odb_nodes.tools.profile import *; from odb_nodes.tools.lengths import *\n"
    page += "profile(LengthTable.of([1, 2]), budget=9).to_html()"
    done = run(page, without=TOOLS)
    assert done.stderr.splitlines()[-1].endswith("pip install 'odb-nodes[report]'")
