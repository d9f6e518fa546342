"""Command: `python -m odb_nodes.integrations.llama_factory run.yaml [name=value ...]`."""

from odb_nodes.integrations.llama_factory.run import main

if __name__ == "__main__":  # Spawned workers also import this module.
    main()
