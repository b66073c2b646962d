"""The agent in a cluster: which pods of its node ask for something, and how they and their Jobs are told."""
