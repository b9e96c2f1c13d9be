"""Reports, benchmarks, checks and named workloads. Only the command line and the public entry points import this package."""
