"""Settings of the whole suite."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Compiled kernels and their messages stay out of the way: a build log is not a warning of ours.
os.environ.setdefault("PYOPENCL_COMPILER_OUTPUT", "0")

# What is no terminal gets whole lines, unless somebody set a width; pytest-xdist does, in its workers.
os.environ.pop("COLUMNS", None)

# Deadlines are off: this suite runs on shared machines, and has benchmarks for speed.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("default"), max_examples=2000)
settings.load_profile("default")
