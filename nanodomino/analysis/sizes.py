from functools import lru_cache

from nanodomino.config.config import Config
from nanodomino.layers.activations import ACTIVATIONS
from nanodomino.mesh import Mesh, meta_mesh
from nanodomino.model import GPT, meta_model, meta_stage
from nanodomino.optim.buckets import ParameterKind, flat_layout, sort_into_buckets
from nanodomino.parallel import VocabParallelEmbedding


# ---- the grid


def all_meshes(config: Config) -> list[Mesh]:
    """Every rank's place, in order: tp fastest, then dp, then pp (2104.04473, section 3)."""
    return [mesh_at(config, stage, replica, rank)
            for stage in range(config.pp) for replica in range(config.dp) for rank in range(config.tp)]


def mesh_at(config: Config, pp_rank=0, dp_rank=0, tp_rank=0) -> Mesh:
    """`at` of all that follows. A Mesh of real processes will do as well."""
    return meta_mesh(config.pp, config.dp, config.tp, pp_rank, dp_rank, tp_rank)


def group_ranks(at: Mesh, group: str) -> list[int]:
    """World ranks of this place's group: tp, dp, pp, embedding (first and last stage) or world."""
    return {"tp": [at.rank_of(at.pp_rank, at.dp_rank, i) for i in range(at.tp)],
            "dp": [at.rank_of(at.pp_rank, i, at.tp_rank) for i in range(at.dp)],
            "pp": [at.stage_rank(i) for i in range(at.pp)],
            "embedding": [at.stage_rank(i) for i in (0, at.pp - 1)],
            "world": list(range(at.pp * at.dp * at.tp))}[group]


def stage_model(config: Config, at: Mesh) -> GPT:
    """The model's stage at this place, without memory."""
    return meta_stage(config, at.pp_rank, at.tp_rank)


def stage_actions(config: Config, at: Mesh) -> tuple:
    """What this place's stage does in a step."""
    return config.timetable.rows[at.pp_rank]


def slice_count(config: Config) -> int:
    """Into how many a microbatch is cut."""
    return min(config.slices, config.micro_batch_size)


def bytes_per_element(config: Config) -> int:
    """e: bytes of an element of the weights and activations."""
    return config.params_dtype.itemsize


def bytes_per_main_element(config: Config) -> int:
    """w: bytes of what is kept in fp32, or in the wider type of the weights."""
    return max(4, bytes_per_element(config))


def tokens_per_microbatch(config: Config) -> int:
    """Of a microbatch."""
    return config.micro_batch_size * config.seq_length


def hidden_bytes(config: Config) -> int:
    """X: bytes of the activation of a microbatch."""
    return bytes_per_element(config) * tokens_per_microbatch(config) * config.hidden_size


def residual_bytes(config: Config) -> float:
    """Bytes of what a rank has of it between two sublayers: X, or X/t."""
    return hidden_bytes(config) / config.sequence_shards


# ---- model state

def optimizer_shards(config: Config) -> int:
    """Into how many parts the optimizer is cut."""
    return config.dp if config.zero_stage else 1


def gradient_shards(config: Config) -> int:
    """Into how many parts the gradients are cut."""
    return config.dp if config.zero_stage == 2 else 1


def gradient_reductions(config: Config) -> int:
    """How often in a step gradients are summed over the replicas."""
    return config.microbatches if gradient_shards(config) > 1 else 1


@lru_cache(maxsize=1024)
def stage_bucket_sizes(config: Config, pp_rank: int) -> list[tuple[ParameterKind, int]]:
    return [(kind, flat_layout(weights, optimizer_shards(config))[1]) for kind, weights in
            sort_into_buckets(meta_stage(config, pp_rank))]


def bucket_sizes(config: Config, at: Mesh) -> list[tuple[ParameterKind, int]]:
    """(kind, elements with padding) of each flat buffer; the same on all ranks of a stage."""
    return stage_bucket_sizes(config, at.pp_rank)


def qkv_and_mlp_bytes(config: Config) -> tuple[int, int, int, int]:
    """Bytes of a microbatch's q; k, or v; what an MLP's activation takes, and gives. Of all ranks together."""
    each = bytes_per_element(config) * tokens_per_microbatch(config)
    heads, groups, after = config.num_attention_heads, config.num_query_groups, each * config.ffn_hidden_size
    return (each * heads * config.kv_channels, each * groups * config.kv_channels,
            ACTIVATIONS[config.activation].inputs * after, after)


def local_vocab_size(config: Config, at: Mesh) -> int:
    """Logits of a token on this rank, whose stage has the head: its words, rounded up (VocabParallelEmbedding)."""
    return stage_model(config, at).head[0].num_logits


# ---- the whole model

def parameter_count(config: Config) -> int:
    """Return the parameters of the whole model: a tied matrix counts once, the vocabulary's padding not at all."""
    model = meta_model(config)
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    matrices = sum(isinstance(module, VocabParallelEmbedding) for module in model.modules())
    return sum(weight.numel() for weight in model.parameters()) - matrices * padding


def flops_per_token(config: Config) -> float:
    """Return the training FLOPs per token: 6 N + 12 L n d s (PaLM, 2204.02311, appendix B; nanoGPT).

    N: parameters without learned positions; n heads of d numbers. Attention is not halved for causality.
    """
    learned = config.position_embedding_type == "learned_absolute"
    parameters = parameter_count(config) - learned * config.max_position_embeddings * config.hidden_size
    return 6 * parameters + 12 * config.num_layers * config.num_attention_heads * config.kv_channels * config.seq_length
