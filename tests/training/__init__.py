"""Tests of impls.training and of its workloads."""
