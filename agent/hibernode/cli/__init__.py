"""The ``hibernode`` command: one small module per noun, no logic."""
