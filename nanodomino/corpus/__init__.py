"""Loads a corpus, which is a folder of token ids, and holds the parts of data/prepare.py that make one.

    documents.py               finds text files and the documents in them
    tokenizer.py               converts text to token ids and back
    huggingface_tokenizer.py   does the same with a Hugging Face tokenizer.json and the optional package tokenizers
    prepared_folder.py         checks and loads a corpus
"""
