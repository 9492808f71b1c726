"""Updates parameters in flat buffers; zero.py shards this work over the replicas.

Read buckets.py (declares how a parameter is cut, summed and updated, and which parameters share a flat buffer),
optimizers.py (the learning rate, the loss scale, AdamW), muon.py (an optimizer of whole matrices).
"""
