"""Stand-ins for NVIDIA's driver."""
