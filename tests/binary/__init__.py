"""Tests of impls.binary and of the schemes that perturb its layers."""
