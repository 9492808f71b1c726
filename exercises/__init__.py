"""Sixteen blanks, each with a check that says what is wrong. README.md explains how to use them."""
