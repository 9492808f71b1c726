"""Turns text into a folder of token ids, and loads it: documents, tokenizers, prepared_folder."""
