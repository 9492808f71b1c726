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

The chapters, each readable by itself (every file may use errors.py, the exception for a user's
mistake, and files.py, which reads only regular files):

    comm          process groups, collectives, traces       schedules    1F1B and six more, as lists of actions
    layers        what a sublayer computes on one rank      optim        buckets, optimizers, loss scale
    overlap       collectives in flight, residual and norm  corpus       tokens on disk, tokenizers
    options       experts, context parallelism, fp8, recomputation and more, each in a file of its own

The tools around them, which the files above never import:

    settings      all settings, their rules and choices     run          a run's folder, signals, failures, report
    checkpoint    save, resume on any layout, verify        plot         loss curves
    huggingface   import and export of models               timeline     pictures of a traced step
    generate      text from a trained model                 estimate     formulas, and a step without data, memory or
                                                                         GPUs: what it takes
"""
