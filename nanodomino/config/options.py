"""The list of options. An option can be deleted: its file or folder in nanodomino/options/, and its line below.

The order is that of the bases of Config: an option's methods run around those of the options below it.
"""

from importlib import import_module

OPTIONS = tuple(import_module(f"nanodomino.options.{name}") for name in (
    "fp8",                              # matmuls of 8-bit numbers
    "experts.settings",                 # several MLPs in a layer, of which each token uses a few; expert parallelism
    "context_parallel.settings",        # several ranks share the tokens of a sample
    "multi_token_prediction.settings",  # further layers predict further tokens
    "documents",                        # effects of the ends of documents within a sample
    "recompute.settings",               # backward recomputes activations, or fetches them from the host
    "sequence_parallel",                # tensor-parallel ranks share the rows of the residual stream
    "eager_1f1b",                       # a schedule for slow messages between stages
    "muon",                             # an optimizer that orthogonalizes the momentum of matrices
))
