"""Turns Hugging Face models into checkpoints, and checkpoints into folders that Transformers loads.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json             sizes and other choices                  config_rules.py, families.py
    DIR/model.safetensors       {name: tensor}; a large model has        tensor_mapping.py, safetensors_files.py
                                several such files, and
                                model.safetensors.index.json with
                                {"weight_map": {name: file}}
    DIR/tokenizer.json ...      the tokenizer's files, copied in both directions

**Bounded memory.** The whole model is never in memory. import_model.py reads the parts of one parameter at a time,
joins them, converts them to fp32 (fp64 stays), and writes the result. export_model.py also converts one parameter at a
time, but holds a whole weight file: at most 5 GB, unless a single parameter is larger.

**The same bits.** Every 16-bit number can be represented in fp32, so import loses nothing. Export uses the dtype of the
imported model by default, so it restores the original bits. Import pads the vocabulary with rows of zeros, which export
leaves out.

**Complete or absent.** Names, shapes and dtypes are checked in the files' headers before any tensor is read. The output
is written to a hidden folder. Only when all of it is there, this folder is renamed to its final name.

safetensors files hold only numbers. A file written by torch.save, such as pytorch_model.bin, can run code when it is
loaded, so it is never read.
"""
