"""How many examples hypothesis tries."""

from hypothesis import settings


def fewer(times):
    """Settings for a property whose examples take long: so many times fewer than of others."""
    return settings(max_examples=max(3, settings.default.max_examples // times))
