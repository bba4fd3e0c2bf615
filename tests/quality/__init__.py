"""Tests of impls.quality."""
