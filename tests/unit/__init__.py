"""Tests that need nothing but temporary files and processes of their own."""
