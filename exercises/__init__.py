"""Sixteen blanks, each with a check that says what is wrong. README.md explains how to use them.

    __main__.py     the command line: start, hint, check, show, status, predict, grade
    beyond.py       the second tier: six pieces of the whole system, beside nanodomino/minimal.py
    workbook.py     finds the exercises in minimal.py and beyond.py, cuts out their bodies, and puts answers in
    fake_ranks.py   lets ranks run as threads of one process, with a stand-in for torch.distributed
    stages.py       makes stages of a tiny model on fake ranks
    judge.py        compares what an answer computes with the reference, and with typical mistakes
    predict.py      compares a student's number with one that bench.py measures
    grade.py        checks the files of many students, each in a confined process
    checks/         one file per exercise: its hint and its check
"""
