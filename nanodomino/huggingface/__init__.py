"""Turns Hugging Face models into checkpoints, and checkpoints into folders that Transformers loads.

    python -m nanodomino.huggingface import DIR --output CHECKPOINT
    python train.py --load CHECKPOINT --finetune --data-path DATA --run-dir RUN      on any layout
    python -m nanodomino.huggingface export RUN DIR                                  from_pretrained("DIR")

    DIR/config.json                    sizes and choices                           config_rules.py, families.py
    DIR/model.safetensors              {name: tensor}, or several such files and   tensor_mapping.py,
    DIR/model.safetensors.index.json   an index {"weight_map": {name: file}}       safetensors_files.py
    DIR/tokenizer.json ...             the tokenizer's files, copied along both ways

**Bounded memory.** No model is ever in memory as a whole. import_model.py gives torch.distributed.checkpoint only the
shapes. When a tensor is being written, its parts are read, joined and converted to fp32. export_model.py converts one
parameter at a time, and keeps the tensors of one file, at most --max-shard-size.

**The same bits.** fp32 represents every 16-bit number, so import loses nothing, and export, by default in the dtype of
the imported model, restores the original bits. The rows that pad the vocabulary are zeros, and are not exported.

**Complete or absent.** Names, shapes and dtypes are checked in the files' headers before any tensor is read. All output
goes to a hidden folder, is flushed to the disk, and gets its name with one rename.

safetensors files hold only numbers. A file from torch.save (pytorch_model.bin) can run code, and is not read.
"""
