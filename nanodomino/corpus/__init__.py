"""Opens a tokenized corpus and its tokenizer; data/prepare.py wrote it, data.py reads batches from it.

Read folder.py (the token files and meta.json), tokenizer.py (bytes, GPT-2), huggingface_tokenizer.py
(tokenizer.json).
"""
