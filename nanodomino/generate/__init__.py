"""Samples text from a trained model, on any number of stages and tensor-parallel ranks.

Read cache.py (keys and values of earlier tokens), sampling.py (the loop over tokens; temperature, top-k), writing.py
(output). `python -m nanodomino.generate` is the command.
"""
