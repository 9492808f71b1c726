"""One file per exercise. HINT stands in the blank; check(answer, reference) raises Wrong, with a sentence of MISTAKES
if it recognises the mistake.
"""
