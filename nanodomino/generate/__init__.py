"""Samples text from a trained model, on any number of stages and tensor-parallel ranks.

Read cache.py (keys and values of earlier tokens), then generation.py (the loop over tokens, temperature, top-k). The
command is `python -m nanodomino.generate`.
"""
