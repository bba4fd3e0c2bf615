"""Tests. A test's docstring is a sentence of behavior."""
