"""Training as something to measure: one module for each family of workloads that are no perturbed layers."""
