"""One file per exercise. FACTS stand in the blank, and `hint` prints HINTS one at a time. check(answer, reference)
raises Wrong, with a sentence of MISTAKES if it recognises the mistake. A file without check() is judged by program().
"""
