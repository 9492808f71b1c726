"""Trains GPTs with tensor, pipeline and data parallelism, Domino's overlap and ZeRO, in pure PyTorch.

The story, in reading order; train.py in the parent folder puts it together:

    minimal.py    the whole idea in one file, which imports none of the others: start here
    mesh.py       gives each process its place in a grid of pipeline x data x tensor parallel ranks
    parallel.py   splits a matrix over ranks and all-reduces the partial results
    model.py      builds a GPT as a chain of sublayers, each of which ends in one all-reduce
    domino.py     lets one slice of a batch compute while the other slice's all-reduce is in flight
    pipeline.py   runs a stage's schedule and exchanges activations with the neighbouring stages
    zero.py       shards gradients and optimizer state over the data-parallel replicas
    data.py       finds the tokens of any step from nothing but the seed and the step number

The chapters, with their files in reading order (errors.py and files.py serve them all):

    comm/         world         starts a process and its process group
                  device        a rank's device: which one, what it can do, which kernels
                  collectives   gathers and reduces that leave no rank with more work than another
                  trace         records what a rank did, and when
    layers/       sublayers     norm, two matmuls around a core, MLP
                  attention     with attention_mask (rotary positions, and which keys a query sees)
                  gradients     sums of gradients, and the residual addition
                  dropout_and_positions, cross_entropy
    overlap/      slices        a slice's state, and the steps launch, yield, wait, multiply
                  compute       what a slice computes between two collectives, and at the two ends of the model
    schedules/    definitions   1F1B and six more, as lists of actions
                  simulation    bubble, peak memory and pictures of a schedule, without a process
    optim/        buckets       how a parameter is declared, and which parameters share a flat buffer
                  optimizers    learning rate, loss scale, AdamW
                  muon          an optimizer of whole matrices
    corpus/       tokenizers, prepared_folder: from text in files to token ids on disk
    options/      what goes beyond a dense GPT: sequence_parallel, recompute, documents, context_parallel,
                  experts with router, multi_token_prediction, fp8

The tools, which the files above never import:

    settings/     config (all settings), choices (which class computes what), rules, flags, presets, records
    checkpoint/   format, save, load: complete or absent, and loaded by any layout
    huggingface/  families, tensors, convert: models from and to Hugging Face
    generate/     generation: text from a trained model
    estimate/     formulas, accounts, rank, stages: what a step takes, without data, memory or GPUs
    run/          session, folder, report, failures
    pictures/     merged_trace (what every rank did in a step), drawing: timeline and loss curve, by matplotlib

A folder has no __init__.py of its own: this map takes the place of all of them. Every import runs this file first, so
it also checks the system.
"""

import sys

if sys.platform == "win32" or sys.version_info < (3, 10):
    sys.exit("error: nanodomino needs Linux or macOS and Python 3.10 or later; on Windows, run it in WSL")
