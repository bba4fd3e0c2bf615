"""Measuring variants on a device. Needs torch; shares only the records of runs with esbench.report."""

import os

# From torch 2.13 on the profiler announces itself on stderr, and any release warns there when a
# call frees what was allocated before profiling, which says nothing about our figures. Both are
# read when torch is imported or first used, so this has to come before.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
