"""Tests of impls.perturbation."""
