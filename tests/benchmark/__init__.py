"""Tests of impls.benchmark."""
