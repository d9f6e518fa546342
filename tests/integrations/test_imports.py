"""What is imported, and when; and what is said where it cannot be."""

import subprocess
import sys

import pytest

FRAMEWORKS = (
    "transformers",
    "accelerate",
    "lightning",
    "datasets",
    "jinja2",
    "matplotlib",
    "ray",
    "rich",
    "tensorboard",
    "typer",
)


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )


def test_the_library_alone_imports_no_framework():
    code = f"""
import sys
from odb_nodes import *
import odb_nodes.integrations, odb_nodes.testing
import odb_nodes.monitor, odb_nodes.integrations.learning_rate
import odb_nodes.integrations.step_estimate
print([name for name in {FRAMEWORKS} if name in sys.modules])
"""
    result = run(code)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(
    "module, missing, extra",
    [
        ("huggingface", "transformers", "hf"),
        ("huggingface", "accelerate", "hf"),
        ("accelerate", "accelerate", "accelerate"),
        ("lightning", "lightning.pytorch", "lightning"),
    ],
)
def test_a_missing_framework_is_an_error_that_names_the_command(module, missing, extra):
    code = f"import sys; sys.modules[{missing!r}] = None; import odb_nodes.integrations.{module}"
    result = run(code)
    assert result.returncode == 1
    assert f"`{missing}` cannot be imported" in result.stderr
    assert f"pip install 'odb-nodes[{extra}]'" in result.stderr


def test_arguments_need_no_transformers_but_a_trainer_does():
    code = """
import sys; sys.modules["transformers"] = None
from types import SimpleNamespace as Names
from odb_nodes.integrations.llama_factory import DynamicBatches
batches = DynamicBatches.of({"cutoff_len": 8, "per_device_train_batch_size": 2})
print(batches.budget.tokens, flush=True)
args = Names(gradient_accumulation_steps=1)
batches.configure(Names(args=args, train_dataset=[], data_collator=None))
"""
    result = run(code)
    assert result.stdout.strip() == "16"
    assert result.returncode == 1
    assert "pip install 'odb-nodes[hf]'" in result.stderr


def test_the_integration_of_accelerate_does_not_import_transformers():
    result = run(
        "import sys, odb_nodes.integrations.accelerate; print('transformers' in sys.modules)"
    )
    assert result.stdout.strip() == "False", result.stderr


def test_the_command_says_what_to_install_where_llama_factory_is_missing():
    result = run("import odb_nodes.integrations.llama_factory as m; m.main({'stage': 'sft'})")
    assert result.returncode == 1
    assert "LLaMA-Factory cannot be imported" in result.stderr
    assert "pip install llamafactory" in result.stderr
