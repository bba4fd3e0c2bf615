"""What a scheme does to the gradient: never timed, seeded, and estimated with an interval."""
