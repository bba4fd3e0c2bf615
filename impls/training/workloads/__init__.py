"""What is measured of training workloads: each family's cases as something that the harness can time."""
