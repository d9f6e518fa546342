"""Integrations with trainers of other libraries, one module for each; import the one you use."""
