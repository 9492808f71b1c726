"""Turns text into a folder of token ids, and loads it."""
