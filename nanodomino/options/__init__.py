"""What goes beyond a dense GPT with tensor, pipeline and data parallelism, a file each. The choices in settings/ say
when the core uses it.

    experts                   several MLPs in a layer, of which each token uses a few; expert parallelism
    router                    chooses the experts of a token
    context_parallel          several ranks share the tokens of a sample
    multi_token_prediction    further layers predict further tokens
    documents                 effects of the ends of documents within a sample
    recompute                 backward recomputes activations, or fetches them from the host
    sequence_parallel         tensor-parallel ranks share the rows of the residual stream
    fp8                       matmuls of 8-bit numbers
"""
