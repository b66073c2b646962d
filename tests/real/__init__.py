"""Tests on real processes, real CRIU, real sockets and real files."""
