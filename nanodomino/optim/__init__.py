"""Updates parameters in flat buffers; zero.py shards this work over the replicas.

Read optimizers.py (AdamW on flat buffers), parameter_spec.py (declares how a parameter is cut, summed and updated),
buckets.py (which parameters share a flat buffer), learning_rate.py (rises, then decays), loss_scale.py (keeps small
fp16 gradients from being rounded to 0).
"""
