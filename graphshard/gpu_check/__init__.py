"""What `bench/gpu_check.sh` runs on one GPU, step by step; every check dry-runs on the host device."""
