"""Tests that need processes and caches of their own: ``nox -s tests_fresh``."""
