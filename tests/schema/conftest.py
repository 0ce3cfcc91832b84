"""Hypothesis settings of these tests: few examples by default, SONDE_TEST_EXAMPLES=1000 for a thorough search."""

from __future__ import annotations

import os

from hypothesis import settings

# No deadline: how long an example takes says nothing about the law it checks.
settings.register_profile("schema", max_examples=int(os.environ.get("SONDE_TEST_EXAMPLES", "40")), deadline=None)
settings.load_profile("schema")
