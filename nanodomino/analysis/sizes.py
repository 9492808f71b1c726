"""Computes the quantities that the formulas of this package use, for one rank of a Config.

    b, s, h       samples of a microbatch, tokens of a sample, hidden size
    ffn, V        width of the MLP, size of the padded vocabulary
    t, p, d       tensor, pipeline and data parallel sizes
    m, v          microbatches of a replica in a step, chunks of layers on a stage
    e             bytes of one element of the weights and activations: 2 in 16-bit training
    w             bytes of one element of the main gradients and the optimizer state: 4, or 8 in fp64
    X = e b s h   bytes of one activation [b, s, h], such as the output of a layer

A rank is given by its Mesh; `mesh_at` makes one without starting processes. Shapes come from the model itself, which is
built on the meta device, so nothing is allocated and nothing runs.
"""

from collections import Counter
from dataclasses import replace
from functools import lru_cache, wraps

from torch.nn import Parameter

from nanodomino.config.config import Config
from nanodomino.mesh import Mesh, meta_mesh
from nanodomino.model import GPT, Chunk, meta_model, meta_stage
from nanodomino.optim.buckets import flat_layout, sort_into_buckets
from nanodomino.optim.parameters import ParameterKind
from nanodomino.parallel import VocabParallelEmbedding
from nanodomino.schedules.definitions import SCHEDULES

# ---- the whole model

def parameters_by_kind(config: Config) -> Counter:
    """Count the parameters of the whole model by their ParameterKind, as parameter_count() does."""
    model, count = meta_model(config), Counter()
    for weight in model.parameters():
        count[weight.spec.kind] += weight.numel()
    padding = (config.padded_vocab_size - config.vocab_size) * config.hidden_size
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            count[module.weight.spec.kind] -= padding
    return count


def parameter_count(config: Config) -> int:
    """Count the parameters of the whole model. A tied matrix counts once; rows that pad the vocabulary do not count."""
    return sum(parameters_by_kind(config).values())


def active_parameter_count(config: Config) -> int:
    """Count the parameters that a token uses: k of the E experts in a layer, and everything else."""
    return round(sum(count * (expert_share(config) if "ep" in kind.shards else 1)
                     for kind, count in parameters_by_kind(config).items()))


def expert_share(config: Config) -> float:
    """Return the share of a layer's experts that a token uses: k/E. 1 without experts."""
    return config.moe_router_topk / config.num_experts if config.num_experts else 1.0


def flops_per_token(config: Config) -> float:
    """Return the training FLOPs per token: 6 N + 12 L n d s (PaLM, 2204.02311, appendix B; nanoGPT).

    N: active parameters without learned position embeddings; L: layers; n heads of size d. Attention counts all pairs
    of tokens, although a causal mask needs only half of them. Each depth of multi-token prediction is one more layer,
    and multiplies by the head once more.
    """
    learned = config.position_embedding_type == "learned_absolute"
    parameters = active_parameter_count(config) - learned * config.max_position_embeddings * config.hidden_size
    parameters += config.mtp_num_layers * config.vocab_size * config.hidden_size
    layers = config.num_layers + config.mtp_num_layers
    return 6 * parameters + 12 * layers * config.num_attention_heads * config.kv_channels * config.seq_length


# ---- the ranks


def mesh_at(config: Config, pp_rank=0, dp_rank=0, tp_rank=0, cp_rank=0) -> Mesh:
    """Return the Mesh of one rank, without processes."""
    return meta_mesh(config.pp, config.dp, config.tp, pp_rank, dp_rank, tp_rank, config.ep, config.cp, cp_rank)


def all_meshes(config: Config) -> list[Mesh]:
    """Return the Mesh of every rank in rank order: tp varies fastest, then cp, dp and pp (2104.04473, section 3)."""
    return [mesh_at(config, pp_rank, dp_rank, tp_rank, cp_rank) for pp_rank in range(config.pp)
            for dp_rank in range(config.dp) for cp_rank in range(config.cp) for tp_rank in range(config.tp)]


def group_ranks(mesh: Mesh, group: str) -> list[int]:
    """Return the world ranks of this rank's process group, by its name: tp, cp, dp, pp, ep, expert_dp, embedding (first
    and last stage) or world."""
    (count, own), own_rank = mesh.axis("dp"), mesh.stage_rank(mesh.pp_rank)
    first, first_ep, ep_rank = mesh.dp_rank * mesh.cp, own // mesh.ep * mesh.ep, own % mesh.ep

    def holders(indices) -> list[int]:
        return [own_rank + (index - own) * mesh.tp for index in indices]           # index: as in axis("dp")

    ranks = {"tp": lambda: [own_rank - mesh.tp_rank + i for i in range(mesh.tp)],
             "cp": lambda: holders(range(first, first + mesh.cp)),
             "dp": lambda: holders(range(count)),
             "ep": lambda: holders(range(first_ep, first_ep + mesh.ep)),
             "expert_dp": lambda: holders(range(ep_rank, count, mesh.ep)),
             "pp": lambda: [mesh.stage_rank(i) for i in range(mesh.pp)],
             "embedding": lambda: [mesh.stage_rank(i) for i in (0, mesh.pp - 1)],
             "world": lambda: list(range(mesh.pp * count * mesh.tp))}
    return ranks[group]()


def stage_model(config: Config, mesh: Mesh) -> GPT:
    """Return this rank's part of the model on the meta device."""
    return meta_stage(shapes_only(config), mesh.pp_rank, mesh.tp_rank)


def stage_chunks(config: Config, mesh: Mesh) -> list[Chunk]:
    """Return the chunks of this rank's stage. A training microbatch passes through the depths of multi-token prediction
    after the model's last chunk, so here that chunk also has their layers."""
    return chunks_with_depths(shapes_only(config), mesh.pp_rank, mesh.tp_rank)


@lru_cache(maxsize=1024)
def chunks_with_depths(config: Config, pp_rank: int, tp_rank: int) -> list[Chunk]:
    model = meta_stage(config, pp_rank, tp_rank)
    depths = [layer for chunk in model.depth_chunks for layer in chunk.layers]
    return [replace(chunk, layers=chunk.layers + depths) if depths and chunk.post_process else chunk
            for chunk in model.chunks]


@lru_cache(maxsize=1024)
def shapes_only(config: Config) -> Config:
    """Return a copy of the Config in which the settings that do not affect shapes have fixed values.

    So Configs that differ only in these settings share one cached model.
    """
    placement = config.placement
    schedule = next(name for name, schedule in SCHEDULES.items()
                    if placement.chunks in schedule.chunks and placement.folded == schedule.folded)
    return replace(config, global_batch_size=1, micro_batch_size=1, slices=1, columns=1, recompute_granularity="none",
                   checkpoint_in_cpu=False, zero_stage=0, schedule=schedule, data_parallel_size=config.ep,
                   context_parallel_size=1, world_size=1)


def stage_actions(config: Config, mesh: Mesh) -> tuple:
    """Return the actions of this rank's stage in one step (forwards, backwards, pairs), in their order."""
    return config.timetable.rows[mesh.pp_rank]


def linear_in_microbatches(rounds: int):
    """Decorate function(config, ...) so that it is as quick for many microbatches as for a few.

    A schedule repeats itself every p microbatches. So after some rounds of p microbatches, each further round adds the
    same amount to a time or to a peak (mostly 0). Let n = rounds x p. For m microbatches the function is called with
    n + m % n and with 2 n + m % n, and its results are extrapolated. A result is a number or {name: number}.
    """
    def decorate(function):
        @wraps(function)
        def extrapolated(config: Config, *arguments):
            times, rest = divmod(config.microbatches, n := rounds * config.pp)
            if times <= 2:
                return function(config, *arguments)
            one, two = (function(with_microbatches(config, count * n + rest), *arguments) for count in (1, 2))
            if isinstance(one, dict):
                return {name: one[name] + (times - 1) * (two[name] - one[name]) for name in one}
            return one + (times - 1) * (two - one)
        return extrapolated
    return decorate


def with_microbatches(config: Config, count: int) -> Config:
    """Return a copy of the Config with `count` microbatches per replica and step."""
    return replace(config, global_batch_size=count * config.micro_batch_size * config.dp)


# ---- bytes and counts

def slice_count(config: Config) -> int:
    """Return the number of slices of a microbatch: at most one per sample."""
    return min(config.slices, config.micro_batch_size)


def bytes_per_element(config: Config) -> int:
    """Return e, the bytes of one element of the weights and activations."""
    return config.params_dtype.itemsize


def bytes_per_main_element(config: Config) -> int:
    """Return w, the bytes of one element of the main gradients and the optimizer state: fp32, or fp64 for fp64
    weights."""
    return max(4, bytes_per_element(config))


def bytes_per_weight(config: Config, kind: ParameterKind) -> int:
    """Return the bytes of one element of a parameter of this kind."""
    return bytes_per_main_element(config) if kind.update == "sign" else bytes_per_element(config)


def tokens_per_microbatch(config: Config) -> int:
    """Return the number of tokens of a microbatch that a rank holds."""
    return config.micro_batch_size * config.seq_length // config.cp


def hidden_bytes(config: Config) -> int:
    """Return X, the bytes of one activation [b, s, h]; s counts the tokens that a rank holds."""
    return bytes_per_element(config) * tokens_per_microbatch(config) * config.hidden_size


def residual_bytes(config: Config) -> float:
    """Return the bytes of a rank's part of the residual stream: X (see above), or X/t with sequence parallelism."""
    return hidden_bytes(config) / config.sequence_shards


def query_and_key_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of q and of k of a microbatch, each summed over all tp ranks. v is as large as k."""
    column = bytes_per_element(config) * tokens_per_microbatch(config)
    q, k = (column * heads * config.kv_channels for heads in (config.num_attention_heads, config.num_query_groups))
    return q, k


def local_vocab_size(config: Config, mesh: Mesh) -> int:
    """Return how many logits this rank computes per token. Its stage must hold the head."""
    return stage_model(config, mesh).head[0].num_logits


def fp8_matrices(chunk: Chunk) -> list[Parameter]:
    """Return the weights of a chunk that are multiplied in 8 bits."""
    return [linear.weight for sublayer in chunk.sublayers if sublayer.fp8 for linear in (sublayer.column, sublayer.row)]


# ---- parameters, gradients, optimizer state

def replica_count(config: Config, replicas="dp") -> int:
    """Return how many replicas train the same shard of a parameter. replicas: see ParameterKind; dp, or expert_dp for
    the experts' parameters."""
    return mesh_at(config).axis(replicas)[0]


def optimizer_shards(config: Config, replicas="dp") -> int:
    """Return the number of shards of the optimizer state: one per replica in ZeRO-1 and ZeRO-2, else 1."""
    return replica_count(config, replicas) if config.zero_stage else 1


def gradient_shards(config: Config, replicas="dp") -> int:
    """Return the number of shards of the gradients: one per replica in ZeRO-2, else 1."""
    return replica_count(config, replicas) if config.zero_stage == 2 else 1


def gradient_reductions(config: Config) -> int:
    """Return how often a step sums each gradient over the replicas: in ZeRO-2 once per microbatch, else once."""
    return config.microbatches if gradient_shards(config) > 1 else 1


def bucket_sizes(config: Config, mesh: Mesh) -> list[tuple[ParameterKind, int]]:
    """Return (kind, number of elements with padding) of each bucket. All ranks of a stage have the same buckets."""
    return stage_bucket_sizes(shapes_only(config), mesh.pp_rank, optimizer_shards(config),
                              optimizer_shards(config, "expert_dp"))


@lru_cache(maxsize=1024)
def stage_bucket_sizes(config: Config, pp_rank: int, dp: int, expert_dp: int) -> list[tuple[ParameterKind, int]]:
    shards = {"dp": dp, "expert_dp": expert_dp}
    return [(kind, flat_layout(weights, shards[kind.replicas])[1])
            for kind, weights in sort_into_buckets(meta_stage(config, pp_rank))]
