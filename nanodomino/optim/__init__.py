"""Updates flat buffers of parameters; zero.py shards that work over the replicas.

Read optimizers.py (AdamW and Lion on flat buffers), buckets.py (which parameters share a flat buffer),
loss_scale.py (fp16).
"""
