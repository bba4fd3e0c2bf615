"""Training workloads and their suites."""
