"""The commands of `odb-nodes`, one to a module."""
