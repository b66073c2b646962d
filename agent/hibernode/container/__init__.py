"""What a container adds to a dump and to a restore."""
