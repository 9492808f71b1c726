"""The parts of domino.py: what a slice runs between and around two all-reduces, and what it keeps for backward.

Read slices.py (a slice's state, a collective in flight, and the steps launch, yield, wait, multiply), linear_pair.py
(what a sublayer computes between its norm and its reduce), ends.py (where one sublayer ends and the next one starts,
and the two ends of the model).
"""
