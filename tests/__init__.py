"""Tests of Hibernode."""
