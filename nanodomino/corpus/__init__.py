"""Loads a prepared folder of tokens, and contains all that data/prepare.py needs to make one.

    documents.py               text files and the documents in them
    tokenizer.py               text <-> token ids: bytes, GPT-2's tokens, or
    huggingface_tokenizer.py   a tokenizer.json, read by the optional package tokenizers
    safe_cuts.py               where a long text can be cut without changing its token ids
    atomic_folder.py           a prepared folder appears complete or not at all
    prepared_folder.py         the prepared folder, checked and loaded
"""
