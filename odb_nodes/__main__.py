"""`python -m odb_nodes` is `odb-nodes`."""

from odb_nodes.cli import main

if __name__ == "__main__":
    main()
