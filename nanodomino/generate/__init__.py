"""Samples text from a trained model, on any number of stages and tensor-parallel ranks.

Read cache.py (keys and values of earlier tokens), then generation.py (the loop over tokens, temperature, top-k), then
printing.py (output). draft.py guesses tokens with a depth of multi-token prediction. `python -m nanodomino.generate` is
the command.
"""
