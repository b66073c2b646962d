"""What the kernel says: raw system calls, /proc, mounts, sockets and paths that cannot be led astray."""
