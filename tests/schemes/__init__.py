"""Tests of impls.schemes."""
