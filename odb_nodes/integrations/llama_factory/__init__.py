"""Dynamic batches for LLaMA-Factory.

`python -m odb_nodes.integrations.llama_factory run.yaml` takes the same YAML as
`llamafactory-cli train`, and runs LLaMA-Factory's training with dynamic batches. In your own
program, `DynamicBatches` configures its trainer.
"""

from odb_nodes.integrations.llama_factory.run import DynamicBatches, main

__all__ = ["DynamicBatches", "main"]
