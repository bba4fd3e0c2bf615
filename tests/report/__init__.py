"""Tests of what is made of stored runs."""
