"""Tests of the command line, in this process where that suffices."""
