"""The page of the reports in a real browser: skipped, with the reason, without one."""
