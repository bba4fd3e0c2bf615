"""Registers the schemes with esbench: suites, workloads, baselines, minimum work."""
