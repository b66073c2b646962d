"""Artifacts on disk: the manifest, digests, the store and its retention."""
