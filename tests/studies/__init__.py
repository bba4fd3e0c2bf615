"""Tests that take minutes or compare times; only `nox -s studies` runs them."""
