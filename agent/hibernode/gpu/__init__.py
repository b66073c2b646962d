"""The node's GPUs: what they do, and who holds them.

``service`` is the part that the agent runs; ``state`` holds what it says, as plain data.
"""
