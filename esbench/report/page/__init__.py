"""The page for a browser: what of the runs it holds, and how it is written."""
