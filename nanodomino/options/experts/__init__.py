"""Mixture of experts: the MLP of a layer becomes several, of which each token uses a few.

    router.py    chooses experts        moe.py    sends tokens to them
"""
