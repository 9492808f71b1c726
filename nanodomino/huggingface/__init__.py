"""Turns Hugging Face models into checkpoints, and checkpoints into Hugging Face models.

Read families.py (which tensor and which setting is called what), import_model.py, export_model.py,
safetensors_files.py. `python -m nanodomino.huggingface` does both.
"""
