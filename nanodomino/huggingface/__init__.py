"""Converts models from and to the format of Hugging Face: convert, families, tensors."""
