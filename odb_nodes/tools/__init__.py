"""Tools that simulate a job before it runs, and report on one while it runs."""
