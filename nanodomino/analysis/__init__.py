"""Predicts the memory, communication and time of a training step from the sizes alone, without running it.

    sizes.py              the quantities that the formulas use
    sublayer_memory.py    what a tape keeps of attention, an MLP, experts
    context_parallel.py   what attention needs in addition if ranks share samples
    expected_memory.py    bytes of memory
    expected_traffic.py   collectives and bytes sent
    step_time.py          seconds, from a few rates such as FLOP/s
    hardware.py           peak FLOP/s of known GPUs
"""
