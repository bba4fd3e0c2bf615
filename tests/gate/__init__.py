"""Tests of the regression gate."""
