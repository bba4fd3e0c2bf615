"""Measuring variants on a device. Needs torch."""

import os

# The profiler of torch 2.13 prints a line on stderr, and any release warns there if a call frees memory that
# was allocated before profiling. Both variables are read when torch is imported or first used.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
