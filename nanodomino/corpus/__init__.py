"""Loads a corpus, which is a folder of token ids, and holds the parts of data/prepare.py that make one.

    documents.py          finds text files and the documents in them
    tokenizers.py         converts text to token ids and back; also reads a Hugging Face tokenizer.json
    prepared_folder.py    checks and loads a corpus
"""
