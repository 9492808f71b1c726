"""Updates parameters in flat buffers; zero.py shards this work over the replicas.

Read optimizers.py (AdamW and Lion on flat buffers), buckets.py (which parameters share a flat buffer),
loss_scale.py (keeps small fp16 gradients from being rounded to 0).
"""
