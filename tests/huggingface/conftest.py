import shutil
from pathlib import Path

import pytest
import torch
from support import needs
from support.huggingface import MODELS


@pytest.fixture(scope="session")
def transformers():
    needs("safetensors")
    package = needs("transformers")
    package.logging.set_verbosity_error()
    package.logging.disable_progress_bar()
    return package


@pytest.fixture(scope="session")
def saved(transformers, tmp_path_factory):
    """saved(name) -> (Transformers model with random weights in float64, the folder that its save_pretrained wrote)."""
    made = {}

    def saved(name):
        if name not in made:
            model_type, sizes = MODELS[name]
            torch.manual_seed(0)
            configuration = transformers.AutoConfig.for_model(model_type, **sizes)
            model = transformers.AutoModelForCausalLM.from_config(configuration).double().eval()
            with torch.no_grad():
                for weight in model.parameters():
                    weight.normal_(0.0, 0.2).add_(weight.dim() == 1)
            made[name] = model, tmp_path_factory.mktemp("saved") / "model"
            model.save_pretrained(made[name][1])
        return made[name]

    return saved


@pytest.fixture
def folder(saved, tmp_path):
    """folder(name) -> a copy of the folder of a model, to be changed."""
    return lambda name="llama": Path(shutil.copytree(saved(name)[1], tmp_path / "folder"))
