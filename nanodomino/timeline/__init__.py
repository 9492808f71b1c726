"""Shows what every rank did in a traced step, and where its time went.

Read merged_trace.py, which merges the ranks' traces and adds up computing, waiting and idle time; then draw.py, which
draws the picture.
"""
