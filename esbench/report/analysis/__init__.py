"""Runs to numbers: pivots, quality, rankings, rooflines. No text, no torch."""
