"""A process that holds N MiB of random data and sleeps: what the benchmarks dump."""

import mmap
import os
import sys
import time

size = int(sys.argv[1]) << 20
memory = mmap.mmap(-1, size)
block = os.urandom(1 << 20)
for offset in range(0, size, 1 << 20):
    memory[offset : offset + (1 << 20)] = block
os.write(1, b"ready\n")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
while True:
    time.sleep(3600)
