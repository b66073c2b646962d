"""The metadata service: it tells the workers of this node which peers hold their weights."""
