"""Turns Hugging Face models into checkpoints, and checkpoints into folders that Transformers loads.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json             sizes and other choices                  families.py
    DIR/model.safetensors       {name: tensor}; a large model has        tensors.py, convert.py
                                several such files, and
                                model.safetensors.index.json with
                                {"weight_map": {name: file}}
    DIR/tokenizer.json ...      the tokenizer's files, copied in both directions

**The same bits.** Every 16-bit number can be represented in fp32, so import loses nothing. Export uses the dtype of the
imported model by default, so it restores the original bits. Import pads the vocabulary with rows of zeros, which export
leaves out.

safetensors files hold only numbers. A file written by torch.save, such as pytorch_model.bin, can run code when it is
loaded, so it is never read.
"""
