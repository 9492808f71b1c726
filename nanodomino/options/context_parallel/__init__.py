"""Context parallelism: several ranks share the tokens of each sample.

    places.py    which tokens a rank holds        attention.py    what ranks exchange
"""
