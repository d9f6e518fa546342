"""Private: what we rely on inside of other libraries, a file for each.

Every name has a test in `tests/_compat` that says, when it fails, which library has changed.
"""
