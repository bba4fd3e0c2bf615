"""Analysis of runs: pivots, quality, rankings, rooflines. Returns numbers, not text; no torch."""
