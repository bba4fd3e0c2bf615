"""Training workloads: one module per suite."""
